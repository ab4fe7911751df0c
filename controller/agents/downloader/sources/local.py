# SPDX-License-Identifier: Apache-2.0
"""pvc:// and file://: weights that are mounted already, so nothing is copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.agents.downloader.checksums import digest_of
from controller.agents.downloader.core.errors import (
    AccessRefused,
    ChecksumMismatch,
    ContentRefused,
    NotThere,
    UriInvalid,
)
from controller.agents.downloader.core.listing import Checksum, safe_path
from controller.agents.downloader.core.uri import ClaimPlace

if TYPE_CHECKING:
    from pathlib import Path

    from controller.agents.downloader.core.key import Wanted
    from controller.agents.downloader.core.uri import FilePlace


def locate(place: ClaimPlace | FilePlace, claims: Path, files: Path) -> Path:
    """The directory or file, with links resolved.

    ``claims``: below which claims are mounted by name. ``files``: below which ``file://`` may look. Raises NotThere,
    AccessRefused, and ContentRefused if a link leads out of them.
    """
    root = claims / place.claim if isinstance(place, ClaimPlace) else files
    asked = root / place.path if isinstance(place, ClaimPlace) else files.__class__(place.path)
    try:
        found = asked.resolve(strict=True)
        top = root.resolve(strict=True)
        if not found.is_relative_to(top):
            raise ContentRefused(f"{asked} leads out of {root}")
        if found.is_dir():
            next(found.iterdir(), None)
        else:
            found.open("rb").close()
    except FileNotFoundError as error:
        raise NotThere(f"{asked} does not exist; is the volume mounted?") from error
    except PermissionError as error:
        raise AccessRefused(f"{asked} may not be read by this user") from error
    except OSError as error:
        raise NotThere(f"{asked} cannot be read: {error.strerror}") from error
    return found


def check_local(wanted: Wanted, found: Path) -> None:
    """Raises UriInvalid for what needs a copy, and ChecksumMismatch."""
    if wanted.revision or wanted.allow or wanted.ignore:
        raise UriInvalid("--revision, --allow and --ignore need a copy; pvc:// and file:// make none")
    for name, value in wanted.sha256:
        file = found / safe_path(name) if found.is_dir() else found
        if not file.is_file():
            raise NotThere(f"{file} does not exist")
        digest = digest_of(file, Checksum("sha256", value), lambda: False)
        if digest != value.lower():
            raise ChecksumMismatch(f"{file} should have sha256 {value}, and has {digest}")

# SPDX-License-Identifier: Apache-2.0
"""The name of a cache entry: the same for the same bytes, whoever asks."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

import msgspec

from controller.agents.downloader.core.uri import Place

if TYPE_CHECKING:
    from controller.agents.downloader.core.listing import Listing

# Of how entries are laid out: an entry of another layout is never taken for one of this.
_LAYOUT: Final = 1


class Wanted(msgspec.Struct, frozen=True):
    """What a user asks for. ``sha256``: pairs of file and digest; they are part of what is asked."""

    place: Place
    revision: str = ""
    allow: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    sha256: tuple[tuple[str, str], ...] = ()
    unpack: bool = True


def content_key(wanted: Wanted, listing: Listing) -> str:
    """The directory of what ``wanted`` is at the listing's revision."""
    files = [(one.path, one.size, one.version, one.archive, one.only, one.checksum) for one in listing.files]
    return _digest([_LAYOUT, wanted.place.canonical(), listing.revision, *_choice(wanted), files])


def question_key(wanted: Wanted, who: str) -> str:
    """The file that remembers what this question of ``who`` was last answered with."""
    return _digest([_LAYOUT, who, wanted.place.canonical(), asked_revision(wanted), *_choice(wanted)])


def asked_revision(wanted: Wanted) -> str:
    """The revision that the option, the URI, or neither says."""
    return wanted.revision or str(getattr(wanted.place, "revision", "") or getattr(wanted.place, "reference", ""))


def listing_digest(parts: object) -> str:
    """A short text that changes with any of ``parts``: the revision of a source that has no revisions."""
    return _digest(parts)


def _choice(wanted: Wanted) -> list[object]:
    return [sorted(wanted.allow), sorted(wanted.ignore), sorted(wanted.sha256), wanted.unpack]


def _digest(parts: object) -> str:
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]

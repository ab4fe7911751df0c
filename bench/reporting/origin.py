# SPDX-License-Identifier: Apache-2.0
"""What made a report: the command, the versions of what ran it, its files."""

from __future__ import annotations

import contextlib
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

# An installed package may lie inside somebody else's repository.
_ROOT: Final = Path(__file__).resolve().parents[2]


class MadeBy(msgspec.Struct, frozen=True):
    """The command that made results, the versions of what ran it, and the digests of files with policies."""

    command: str
    versions: dict[str, str]
    files: dict[str, str] = {}

    @property
    def versions_line(self) -> str:
        """The versions in a line."""
        return ", ".join(f"{name} {one}" for name, one in self.versions.items())


def made_by(
    command: str, *, versions: Mapping[str, str] | None = None, files: Mapping[str, str] | None = None
) -> MadeBy:
    """``command``, and what runs it, with the commit if the code is in a clone.

    ``versions``: further ones. ``files``: digests by file.
    """
    found = {"Python": platform.python_version(), "numpy": version("numpy"), **(versions or {})}
    with contextlib.suppress(PackageNotFoundError):  # a clone need not be installed
        found["attache"] = version("attache")
    if (_ROOT / ".git").exists() and (commit := _commit()):
        found["commit"] = commit
    return MadeBy(command, found, dict(files or {}))


def _commit() -> str:
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty"],  # noqa: S607 - whichever git the user has
            cwd=_ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:  # a clone may be copied to where there is no git
        return ""
    return said.stdout.strip() if said.returncode == 0 else ""

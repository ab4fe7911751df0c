# SPDX-License-Identifier: Apache-2.0
"""Make weights appear where an engine looks for them, without a copy."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from controller.agents.downloader.core.errors import CacheUnusable

if TYPE_CHECKING:
    from pathlib import Path


def link(path: Path, target: Path, cache: Path) -> None:
    """Let ``path`` lead to ``target``, a directory or file.

    A ``path`` that is a directory, such as a volume that is mounted there, gets a link for each file in ``target``;
    links into ``cache`` from before are removed. Raises CacheUnusable if something else is in the way.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            _link_each(path, target, cache)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, target)
    except OSError as error:
        raise CacheUnusable(f"{path} cannot be made a link to {target}: {error.strerror}") from error


def _link_each(directory: Path, target: Path, cache: Path) -> None:
    wanted = {one.name: one for one in (target.iterdir() if target.is_dir() else (target,))}
    for old in directory.iterdir():
        if old.is_symlink() and old.name not in wanted and old.readlink().is_relative_to(cache):
            old.unlink()
    for name, one in wanted.items():
        _replace(directory / name, one)


def _replace(path: Path, target: Path) -> None:
    """At once: nobody finds no link, or half of one."""
    if path.exists() and not path.is_symlink():
        raise CacheUnusable(f"{path} is there and is no link of ours; it is not replaced")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(path)

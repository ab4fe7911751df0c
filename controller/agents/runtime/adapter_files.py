# SPDX-License-Identifier: Apache-2.0
"""The files of adapters: where they come from, and the links under which the engine finds them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from controller.agents.runtime.adapter_names import (
    NameInvalid,
    NotDeclared,
    check_name,
    check_uri,
    is_uri,
    link_name,
    local_path,
)

if TYPE_CHECKING:
    from controller.agents.runtime.adapter_names import Declared
    from controller.agents.runtime.downloads import Downloads
    from controller.agents.runtime.settings import AdapterSettings


class AdapterFiles:
    """``is_repository``: the engine finds them by their names in its model repository, and is given no paths."""

    def __init__(self, settings: AdapterSettings, downloads: Downloads, *, is_repository: bool) -> None:
        self._settings = settings
        self._downloads = downloads
        self._is_repository = is_repository

    def place(self, name: str, source: str, declared: Declared | None) -> tuple[str, str]:
        """The source, and the path of its files; raises NameInvalid or NotDeclared for what is not allowed.

        ``source``: empty for that of ``declared``. Both are empty for a model that is in the repository already.
        """
        source = source or (declared.uri if declared is not None else "")
        check_name(name, is_directory=self._is_repository)
        if self._settings.policy.declared_only and (declared is None or source != declared.uri):
            raise NotDeclared(f"{name} is not declared with this source, and others are not allowed (--declared-only)")
        if not source:
            if self._is_repository:
                return "", ""
            raise NameInvalid(f"{name} is not declared: lora_path is missing")
        if not is_uri(source):
            return source, local_path(source, self._settings.policy)
        if declared is None or source != declared.uri:
            check_uri(source, self._settings.policy)
        return source, str(self._settings.links / (name if self._is_repository else link_name(name, source)))

    async def bring(self, name: str, source: str, path: str) -> None:
        """Raises DownloadFailed or OSError."""
        if is_uri(source):
            link = Path(path)
            link.parent.mkdir(parents=True, exist_ok=True)
            await self._downloads.fetch(source, link)
        elif self._is_repository and path:
            _link(Path(path), self._settings.links / name)

    def remove(self, name: str) -> None:
        """Take an unloaded model out of the repository, if it is a link there; the files stay in the cache.

        Links to LoRA adapters stay: they are in a cache that pods share, and another engine may read by them.
        """
        link = self._settings.links / name
        if self._is_repository and link.is_symlink():
            link.unlink()


def _link(target: Path, link: Path) -> None:
    """A local directory becomes a model of the repository."""
    if link == target or (link.exists() and not link.is_symlink()):
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(target)

# SPDX-License-Identifier: Apache-2.0
"""Follows the file of declared adapters; what is broken leaves the last good state."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from controller.agents.runtime.adapter_names import Declared, read_declared

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from controller.agents.runtime.adapter_names import SourcePolicy

_MOST_BYTES: Final = 1024 * 1024

log = logging.getLogger(__name__)


class DeclaredFile:
    """``declared``: of the last good file. ``problem``: of the present one, empty if it is good.

    ``removed``: names that were in an earlier file and are in none now, until they are forgotten.
    """

    def __init__(self, path: Path | None, policy: SourcePolicy, *, is_directory: bool) -> None:
        self.declared: Mapping[str, Declared] = {}
        self.removed: set[str] = set()
        self.problem = ""
        self._path = path
        self._policy = policy
        self._is_directory = is_directory
        self._version: tuple[int, int, int] | None = None

    def poll(self) -> bool:
        """Read the file if it changed; whether there are other adapters now.

        A ConfigMap's file is a link through a link that is replaced: the inode of its target changes.
        """
        if self._path is None:
            return False
        try:
            stat = self._path.stat()
            version = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if version == self._version:
                return False
            if stat.st_size > _MOST_BYTES:
                raise ValueError(f"the file has more than {_MOST_BYTES} bytes")
            content = self._path.read_bytes()
            found, mistakes = read_declared(content, self._policy, is_directory=self._is_directory)
        except (OSError, ValueError) as error:
            self._complain(f"{self._path}: {error}")
            return False
        self._version = version
        # an adapter with a mistake stays as it was declared before, if it was
        found |= {name: self.declared[name] for name in mistakes if name in self.declared}
        if mistakes:
            self._complain(f"{self._path}: {'; '.join(f'{name}: {mistake}' for name, mistake in mistakes.items())}")
        elif self.problem:
            log.info("%s can be read again", self._path)
            self.problem = ""
        if found == self.declared:
            return False
        self.removed = (self.removed | set(self.declared)) - set(found)
        self.declared = found
        log.info("%d adapters are declared", len(found))
        return True

    def _complain(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("%s; what was declared before stays", problem)
        self.problem = problem

# SPDX-License-Identifier: Apache-2.0
"""Which of a worker's predecessor and successor writes its files in the directory of --state."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class StateLock:
    """The process that holds a lock in ``directory``, which exists. The kernel releases it when the process ends."""

    def __init__(self, directory: Path, number: int) -> None:
        """``number``: of the worker."""
        self._file = directory / f"owner-{number}.lock"
        self._descriptor: int | None = None
        self._has_released = False

    def try_acquire(self) -> bool:
        """Become the owner unless another process is. Where files cannot be locked, every process is."""
        if self._descriptor is not None or self._has_released:
            return not self._has_released
        try:
            descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            return not isinstance(error, BlockingIOError)
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """A successor owns the files from now on."""
        self._has_released = True
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

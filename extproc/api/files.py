# SPDX-License-Identifier: Apache-2.0
"""Opens files whose names come from others."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from pathlib import Path


def open_regular(name: str | Path) -> BinaryIO:
    """A regular file, for reading. Raises OSError, also for a pipe, which is not waited for, and for a name that no
    file can have.
    """
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), str(name)) from None
    # before it is a file object: that of a directory would raise, and leave the descriptor open
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", str(name))
    return os.fdopen(descriptor, "rb")

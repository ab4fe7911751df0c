# SPDX-License-Identifier: Apache-2.0
"""Opens files whose names come from others, and reads tokens of them."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, BinaryIO, Final

if TYPE_CHECKING:
    from pathlib import Path

_LEAST_TOKEN_BYTES: Final = 16
_MOST_TOKEN_BYTES: Final = 4096


def open_regular_file(name: str | Path) -> BinaryIO:
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


def read_token(file: Path) -> bytes:
    """A secret that clients send in a header. Raises OSError, ValueError."""
    with open_regular_file(file) as opened:
        token = opened.read(_MOST_TOKEN_BYTES + 1).strip()
    # what a client can send in a header
    is_sendable = token.isascii() and token.decode().isprintable() and b" " not in token
    if not is_sendable or not _LEAST_TOKEN_BYTES <= len(token) <= _MOST_TOKEN_BYTES:
        text = f"write a token of {_LEAST_TOKEN_BYTES} to {_MOST_TOKEN_BYTES} ASCII characters into it"
        raise ValueError(f"{file}: {text}")
    return token

# SPDX-License-Identifier: Apache-2.0
"""Names of files that any file system takes, however long the names of objects are."""

from __future__ import annotations

from hashlib import sha256
from typing import Final

# File systems take 255 bytes, of which the name of a draft needs some. Of a longer name this much is kept.
_LONGEST: Final = 200
_KEPT: Final = 120


def bounded_name(stem: str, suffix: str) -> str:
    """``stem`` and ``suffix``. A stem that is too long is cut, and has a digest in place of the rest.

    Names of objects may have 253 characters, and one file that cannot be written would keep all others from use. Stems
    have no ``~``, so no two share a name.
    """
    if len(stem) + len(suffix) > _LONGEST:
        stem = f"{stem[:_KEPT]}~{sha256(stem.encode()).hexdigest()[:32]}"
    return stem + suffix

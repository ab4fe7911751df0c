# SPDX-License-Identifier: Apache-2.0
"""Names of files in the directory, within what file systems take."""

from __future__ import annotations

from typing import Final

import xxhash

_LONGEST_STEM: Final = 180


def within_limit(stem: str) -> str:
    """``stem`` of a file's name, or what stands for it: file systems take names of 255 bytes, and drafts have longer
    ones. Otherwise one long name of anybody's object would keep the whole directory from being written.
    """
    if len(stem) <= _LONGEST_STEM:
        return stem
    # no other stem has two underscores and a digest behind as much text
    return f"{stem[:_LONGEST_STEM]}__{xxhash.xxh3_64_hexdigest(stem.encode())}"

# SPDX-License-Identifier: Apache-2.0
"""Whether readers take a directory of this size: one that they refuse must not replace the one that they have."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from extproc.api.load import MAX_DIRECTORY_BYTES, SUFFIXES, max_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

# Of namespaces in one message.
_MOST_SAID: Final = 3


def size_problem(files: Mapping[str, bytes]) -> str:
    """Why a directory of ``files`` would be refused, and by whose objects; empty if it would not be.

    A reader that starts with a directory that is too large serves nothing at all, to anybody.
    """
    sizes = {name: len(content) for name, content in files.items() if name.endswith(SUFFIXES)}
    for name, size in sizes.items():
        if size > max_bytes(name):
            return f"{name} would have {size} bytes, and {max_bytes(name)} are read; make that object smaller"
    total = sum(sizes.values())
    if total <= MAX_DIRECTORY_BYTES:
        return ""
    # names begin with kind and namespace
    shares = Counter[str]()
    for name, size in sizes.items():
        shares[name.split(".")[1]] += size
    largest = ", ".join(f"{namespace} {size}" for namespace, size in shares.most_common(_MOST_SAID))
    return (
        f"all objects come to {total} bytes, and {MAX_DIRECTORY_BYTES} are read; "
        f"the namespaces with most of them: {largest}"
    )

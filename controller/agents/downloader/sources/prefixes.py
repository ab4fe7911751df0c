# SPDX-License-Identifier: Apache-2.0
"""Which objects of a bucket a prefix means, and under which names they are kept."""

from __future__ import annotations


def path_below(prefix: str, key: str) -> str:
    """The path of the object ``key``; empty: it is none of the model's files.

    ``models/llama`` means the object of that name, or what is in that folder, and never ``models/llama-2/...``. Names
    that end in ``/`` only mark folders.
    """
    if key.endswith("/"):
        return ""
    if key == prefix:
        return key.rpartition("/")[2]
    folder = prefix if not prefix or prefix.endswith("/") else f"{prefix}/"
    return key.removeprefix(folder) if key.startswith(folder) else ""

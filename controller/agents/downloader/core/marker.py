# SPDX-License-Identifier: Apache-2.0
"""The marker that makes a cache entry complete, and what to do about an entry as it is found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence


class KeptFile(msgspec.Struct, frozen=True):
    """A file of a complete entry; ``checksum``: as the source said it, ``algorithm:digits``."""

    path: str
    size: int
    checksum: str = ""


class Marker(msgspec.Struct, frozen=True):
    """Written last: everything before it is on the disk. ``uri`` is without credentials; times are RFC 3339."""

    uri: str
    revision: str
    size: int
    files: tuple[KeptFile, ...]
    completed_at: str


class Found(msgspec.Struct, frozen=True):
    """An entry and its lock, as a process sees them."""

    is_ready: bool
    holds_lock: bool


Step = Literal["use", "fetch", "follow"]


def next_step(found: Found) -> Step:
    """Use what is complete; fetch only with the lock; else follow whoever has it.

    A lock that its holder lost by dying is free at once (it is the kernel's), so the follower that gets it next finds
    an entry that is not ready and fetches what is missing.
    """
    if found.is_ready:
        return "use"
    return "fetch" if found.holds_lock else "follow"


def read_marker(text: bytes) -> Marker | None:
    """None: it is no marker, such as one that a full disk cut short; the entry then counts as unfinished."""
    try:
        return msgspec.json.decode(text, type=Marker)
    except msgspec.DecodeError:
        return None


class Entry(msgspec.Struct, frozen=True):
    """A cache entry to consider for eviction. ``used_at_s``: the last use, or the last write of an unfinished one."""

    key: str
    size: int
    used_at_s: float
    is_held: bool
    is_ready: bool = True


def to_evict(entries: Sequence[Entry], *, limit: int, needed: int, keep: str) -> list[str]:
    """Keys to remove, least recently used first, until all entries and ``needed`` more bytes fit ``limit``.

    Entries that somebody holds stay, and so does ``keep``, the one that is about to be made. Unfinished ones go first:
    nobody reads them.
    """
    excess = sum(one.size for one in entries if one.key != keep) + needed - limit
    removed: list[str] = []
    for one in sorted(entries, key=lambda entry: (entry.is_ready, entry.used_at_s)):
        if excess <= 0:
            break
        if not one.is_held and one.key != keep:
            removed.append(one.key)
            excess -= one.size
    return removed

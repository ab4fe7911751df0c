# SPDX-License-Identifier: Apache-2.0
"""KV events in virtual time: from an engine's journal to the core's precise index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.engine.blocks import BlocksRemoved
from bench.engine.text import tokens_of
from extproc.prefix import kv_events
from extproc.prefix.kv_index import Source

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.engine.blocks import CacheChange
    from extproc.core.core import Core


def kv_event_feed(
    core: Core,
    *,
    server: str,
    address: str,
    block_size: int,
    later: Callable[[float, Callable[[float], None]], None],
) -> Callable[[list[CacheChange], float], None]:
    """What to call with changes in the cache of the engine at ``address``, and with the instant.

    ``later(now, act)`` calls ``act`` when events of the instant ``now`` have reached extproc.
    """
    pool = core.pools[server]
    row = pool.table.row_of(address)
    kv = pool.caches.kv_index
    assert row is not None
    assert kv is not None
    pool.caches.set_feed_state(row, is_whole=True)
    source = Source(row)

    def changed(changes: list[CacheChange], now: float) -> None:
        later(now, lambda _: kv.apply(source, [_event(one, block_size) for one in changes]))

    return changed


def _event(change: CacheChange, block_size: int) -> kv_events.Event:
    if isinstance(change, BlocksRemoved):
        return kv_events.Removed(tuple(change.hashes), "GPU")
    return kv_events.Stored(tuple(change.hashes), change.parent, tuple(tokens_of(change.text)), block_size)

"""What engines tell of their caches, as late as KV events are, to the pipeline's precise index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.engine.journal import Removed, Stored
from bench.engine.text import tokens_of
from extproc.prefix import kv_events
from extproc.prefix.kv_index import Source

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.core.pipeline import Pipeline

    Change = Stored | Removed


def follow_blocks(
    pipeline: Pipeline,
    server: str,
    address: str,
    block_size: int,
    later: Callable[[float, Callable[[float], None]], None],
) -> Callable[[list[Change], float], None]:
    """What to tell of changes in the cache of the engine at ``address``; ``later`` does things when events are there."""
    pool = pipeline.pools[server]
    row = pool.table.row_of(address)
    kv = pool.caches.kv_index
    assert row is not None
    assert kv is not None
    pool.caches.set_feed_state(row, is_whole=True)
    source = Source(row)

    def changed(changes: list[Change], now: float) -> None:
        later(now, lambda _: kv.apply(source, [_event(one, block_size) for one in changes]))

    return changed


def _event(change: Change, block_size: int) -> kv_events.Event:
    if isinstance(change, Removed):
        return kv_events.Removed(tuple(change.hashes), "GPU")
    return kv_events.Stored(tuple(change.hashes), change.parent, tuple(tokens_of(change.text)), block_size)

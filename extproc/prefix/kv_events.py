"""KV events of vLLM and SGLang, off the wire: three frames (topic, sequence, batch), of which this reads the last two.

A batch is ``[timestamp, events, data_parallel_rank]``, as an array or as a map of these names; an event is an array with its
tag first or a map with its tag under ``type``. vLLM has written arrays (``vllm/distributed/kv_events.py``, ``array_like``)
and, since 0.30 or so, maps; SGLang writes arrays. Fields at the end may be missing, unknown ones are passed over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

BlockHash = int | bytes

# Groups of hybrid models whose blocks hold a whole prefix; sliding windows and states do not.
_WHOLE_PREFIX: Final = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
_STORED_FIELDS: Final = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"),
    *("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
)
_REMOVED_FIELDS: Final = ("block_hashes", "medium", "group_idx")
_BATCH_FIELDS: Final = ("ts", "events", "data_parallel_rank")


class Stored(msgspec.Struct, frozen=True):
    """Blocks came into a cache, each after the one before it. Hashes are the engine's own and mean nothing to others."""

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    token_ids: tuple[int, ...]
    block_size: int
    medium: str = "GPU"
    lora_name: str | None = None
    extra_keys: tuple[Any, ...] = ()


class Removed(msgspec.Struct, frozen=True):
    """Blocks left a cache; without a medium, every one."""

    hashes: tuple[BlockHash, ...]
    medium: str | None = None


class Cleared(msgspec.Struct, frozen=True):
    """The cache is empty."""


Event = Stored | Removed | Cleared


class Batch(msgspec.Struct, frozen=True):
    """Events of one step, and of which data-parallel rank."""

    events: tuple[Event, ...]
    rank: int


class UnreadableEvents(Exception):
    """The payload is none of the forms that are known."""


def decode_batch(payload: bytes) -> Batch:
    """The events of one message; raises UnreadableEvents."""
    try:
        fields = _named(msgspec.msgpack.decode(payload), _BATCH_FIELDS)
        events = tuple(_events(fields.get("events") or ()))
        return Batch(events, int(fields.get("data_parallel_rank") or 0))
    except (msgspec.DecodeError, TypeError, ValueError, LookupError) as error:
        raise UnreadableEvents(f"a batch of KV events that cannot be read: {error}") from None


def _events(raw: Iterable[Any]) -> Iterator[Event]:
    for one in raw:
        tag = one.get("type") if isinstance(one, dict) else one[0]
        if tag == "BlockStored":
            fields = _named(one, _STORED_FIELDS, skip=1)
            if fields.get("kv_cache_spec_kind") in _WHOLE_PREFIX:
                yield _stored(fields)
        elif tag == "BlockRemoved":
            fields = _named(one, _REMOVED_FIELDS, skip=1)
            yield Removed(tuple(fields["block_hashes"]), fields.get("medium"))
        elif tag == "AllBlocksCleared":
            yield Cleared()


def _stored(fields: dict[str, Any]) -> Stored:
    return Stored(
        hashes=tuple(fields["block_hashes"]),
        parent=fields["parent_block_hash"],
        token_ids=tuple(fields["token_ids"]),
        block_size=int(fields["block_size"]),
        medium=fields.get("medium") or "GPU",
        lora_name=fields.get("lora_name"),
        extra_keys=tuple(fields.get("extra_keys") or ()),
    )


def _named(raw: object, names: tuple[str, ...], *, skip: int = 0) -> dict[str, Any]:
    if isinstance(raw, dict):
        return raw
    if not isinstance(raw, list):
        msg = f"expected an array or a map, got {type(raw).__name__}"
        raise TypeError(msg)
    return dict(zip(names, raw[skip:], strict=False))

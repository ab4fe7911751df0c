# SPDX-License-Identifier: Apache-2.0
"""Decodes batches of KV events as vLLM and SGLang publish them.

A message has three frames: topic, sequence number, batch. A batch is ``[timestamp, events, data_parallel_rank]``, as
a msgpack array or as a map with these names. An event is an array that starts with its tag, or a map with its tag
under ``type``. vLLM published arrays (``vllm/distributed/kv_events.py``, ``array_like``) and since about 0.30 maps;
SGLang publishes arrays. Trailing fields may be missing; unknown ones are ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

BlockHash = int | bytes

# Cache groups of hybrid models whose blocks hold a whole prefix, unlike sliding windows and states.
_WHOLE_PREFIX: Final = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
_STORED_FIELDS: Final = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"),
    *("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
)
_REMOVED_FIELDS: Final = ("block_hashes", "medium", "group_idx")
_BATCH_FIELDS: Final = ("ts", "events", "data_parallel_rank")


class Stored(msgspec.Struct, frozen=True):
    """Blocks were added to a cache, each one the successor of the one before.

    ``hashes``: the engine's own, opaque to others. ``parent``: of the first block, None at the start of a prompt.
    ``medium``: GPU or CPU memory, for example. ``extra_keys``: what else distinguishes each block, such as a cache
    salt.
    """

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    token_ids: tuple[int, ...]
    block_size: int
    medium: str = "GPU"
    lora_name: str | None = None
    extra_keys: tuple[Any, ...] = ()


class Removed(msgspec.Struct, frozen=True):
    """Blocks were removed from a cache; ``medium`` None: from all media."""

    hashes: tuple[BlockHash, ...]
    medium: str | None = None


class Cleared(msgspec.Struct, frozen=True):
    """All blocks were removed."""


Event = Stored | Removed | Cleared


class Batch(msgspec.Struct, frozen=True):
    """The events of one engine step of one data-parallel rank."""

    events: tuple[Event, ...]
    rank: int


class UnreadableEvents(Exception):
    """The payload has no known format."""


def decode_batch(payload: bytes) -> Batch:
    """Decode the last frame of a message; raises UnreadableEvents."""
    try:
        fields = _named(msgspec.msgpack.decode(payload), _BATCH_FIELDS)
        events = tuple(_events(fields.get("events") or ()))
        return Batch(events, int(fields.get("data_parallel_rank") or 0))
    except (msgspec.DecodeError, TypeError, ValueError, LookupError) as error:
        raise UnreadableEvents(f"cannot decode a batch of KV events: {error}") from None


def _events(raw: Iterable[Any]) -> Iterator[Event]:
    for one in raw:
        tag = one.get("type") if isinstance(one, dict) else one[0]
        if tag == "BlockStored":
            fields = _named(one, _STORED_FIELDS, skip=1)
            if fields.get("kv_cache_spec_kind") in _WHOLE_PREFIX:
                yield _stored(fields)
        elif tag == "BlockRemoved":
            fields = _named(one, _REMOVED_FIELDS, skip=1)
            yield Removed(tuple(fields["block_hashes"]), _medium(fields))
        elif tag == "AllBlocksCleared":
            yield Cleared()


def _stored(fields: dict[str, Any]) -> Stored:
    return Stored(
        hashes=tuple(fields["block_hashes"]),
        parent=fields["parent_block_hash"],
        token_ids=tuple(fields["token_ids"]),
        block_size=int(fields["block_size"]),
        medium=_medium(fields) or "GPU",
        lora_name=fields.get("lora_name"),
        extra_keys=tuple(fields.get("extra_keys") or ()),
    )


def _medium(fields: dict[str, Any]) -> str | None:
    """In capitals: vLLM writes GPU, connectors of other caches cpu."""
    given = fields.get("medium")
    return str(given).upper() if given else None


def _named(raw: object, names: tuple[str, ...], *, skip: int = 0) -> dict[str, Any]:
    if isinstance(raw, dict):
        return raw
    if not isinstance(raw, list):
        msg = f"expected an array or a map, got {type(raw).__name__}"
        raise TypeError(msg)
    return dict(zip(names, raw[skip:], strict=False))

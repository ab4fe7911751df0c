# SPDX-License-Identifier: Apache-2.0
"""Decodes batches of KV events as vLLM and SGLang publish them.

A message has three frames: topic, sequence number, batch. A batch is ``[timestamp, events, data_parallel_rank]``, as
a msgpack array or as a map with these names. An event is an array that starts with its tag, or a map with its tag
under ``type``. vLLM published arrays (``vllm/distributed/kv_events.py``, ``array_like``) and since about 0.30 maps;
SGLang publishes arrays. Trailing fields may be missing; unknown ones are ignored.

Engines are not trusted to be well formed: types, ranges and sizes are checked here, and nowhere behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Generic, TypeVar, cast

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from collections.abc import Iterator

BlockHash = int | Annotated[bytes, Meta(max_length=64)]
# Of one source, over all media, and of all sources together: some 200 bytes each, so less than 1 GiB. A source that has
# more is not followed further.
MOST_BLOCKS: Final = 1_000_000
MOST_BLOCKS_IN_ALL: Final = 4_194_304
# Of one message; an engine's step has some thousands.
_MOST_EVENTS: Final = 65_536
# Of one event; an engine's context is seldom longer.
_MOST_TOKENS: Final = 1 << 20
# An event with more blocks is handed on as several, so that requests are served in between.
_PIECE: Final = 512
# Cache groups of hybrid models whose blocks hold a whole prefix, unlike sliding windows and states.
_WHOLE_PREFIX: Final = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})

_Hashes = Annotated[tuple[BlockHash, ...], Meta(max_length=_MOST_TOKENS)]
_Tokens = Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 32)], ...], Meta(max_length=_MOST_TOKENS)]
_BlockSize = Annotated[int, Meta(ge=1, le=1 << 16)]
_Name = Annotated[str, Meta(max_length=1024)]
# Of one block: a cache salt, for example, or an image and its place.
_ExtraKeys = Annotated[list[msgspec.Raw], Meta(max_length=256)]
_T = TypeVar("_T", bound=msgspec.Struct)
# The first bytes of msgpack's arrays and strings.
_ARRAYS: Final = frozenset(bytes([one]) for one in (*range(0x90, 0xA0), 0xDC, 0xDD))
_STRINGS: Final = frozenset(bytes([one]) for one in (*range(0xA0, 0xC0), 0xD9, 0xDA, 0xDB))
_string: Final = msgspec.msgpack.Decoder(str)


def max_blocks_per_source(sources: int) -> int:
    """How many blocks a process with so many sources may keep of each."""
    return min(MOST_BLOCKS, MOST_BLOCKS_IN_ALL // max(1, sources))


class BlocksStored(msgspec.Struct, frozen=True):
    """Blocks were added to a cache, each one the successor of the one before.

    ``hashes``: the engine's own, opaque to others. ``parent``: of the first block, None at the start of a prompt.
    ``medium``: GPU or CPU memory, for example. ``extra_keys``: what else distinguishes each block, such as a cache
    salt, as text.
    """

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None
    token_ids: tuple[int, ...]
    block_size: int
    medium: str = "GPU"
    lora_name: str | None = None
    extra_keys: tuple[list[str] | None, ...] = ()


class BlocksRemoved(msgspec.Struct, frozen=True):
    """Blocks were removed from a cache; ``medium`` None: from all media."""

    hashes: tuple[BlockHash, ...]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True):
    """All blocks were removed."""


class IgnoredEvent(msgspec.Struct, frozen=True):
    """An event about no whole prefix, or of unknown content. It costs as much to read as others."""


Event = BlocksStored | BlocksRemoved | AllBlocksCleared | IgnoredEvent
_IGNORED: Final = IgnoredEvent()


class UnreadableEvents(Exception):
    """The payload has no known format."""


class _Batch(msgspec.Struct):
    """The fields of what is on the wire stand in the order of the arrays."""

    ts: msgspec.Raw = msgspec.Raw()
    events: Annotated[list[msgspec.Raw], Meta(max_length=_MOST_EVENTS)] | None = None


class _Tagged(msgspec.Struct):
    type: str


class _BlockStored(_Tagged):
    block_hashes: _Hashes
    parent_block_hash: BlockHash | None
    token_ids: _Tokens
    block_size: _BlockSize
    lora_id: msgspec.Raw = msgspec.Raw()
    medium: _Name | None = None
    lora_name: _Name | None = None
    extra_keys: tuple[_ExtraKeys | None, ...] | None = None
    group_idx: msgspec.Raw = msgspec.Raw()
    kv_cache_spec_kind: str | None = None


class _BlockRemoved(_Tagged):
    block_hashes: _Hashes
    medium: _Name | None = None


class _Decoder(Generic[_T]):
    """Decodes maps and arrays of the same fields."""

    def __init__(self, fields: type[_T]) -> None:
        self._map = msgspec.msgpack.Decoder(fields)
        self._array = msgspec.msgpack.Decoder(
            cast("type[_T]", msgspec.defstruct(fields.__name__, [], bases=(fields,), array_like=True))
        )

    def decode(self, raw: bytes | msgspec.Raw) -> _T:
        is_array = bytes(memoryview(raw)[:1]) in _ARRAYS
        return (self._array if is_array else self._map).decode(raw)


_batch: Final = _Decoder(_Batch)
_tagged: Final = _Decoder(_Tagged)
_block_stored: Final = _Decoder(_BlockStored)
_block_removed: Final = _Decoder(_BlockRemoved)


def decode_batch(payload: bytes) -> Iterator[Event]:
    """The events in the last frame of a message, each with a few hundred blocks at most.

    Each event of the message comes as one or several, so that their number is proportional to what was read. Raises
    UnreadableEvents when it comes to what cannot be read.
    """
    try:
        for raw in _batch.decode(payload).events or ():
            tag = _tagged.decode(raw).type
            if tag == "BlockStored":
                yield from _stored(_block_stored.decode(raw))
            elif tag == "BlockRemoved":
                yield from _removed(_block_removed.decode(raw))
            else:
                yield AllBlocksCleared() if tag == "AllBlocksCleared" else _IGNORED
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableEvents(f"cannot decode a batch of KV events: {error}") from None


def _stored(event: _BlockStored) -> Iterator[BlocksStored | IgnoredEvent]:
    """The blocks of ``event`` in pieces. Without tokens they are known ones, copied to another medium."""
    hashes, tokens, size, parent = event.block_hashes, event.token_ids, event.block_size, event.parent_block_hash
    whole = len(tokens) // size if tokens else len(hashes)
    if not (hashes and whole) or event.kv_cache_spec_kind not in _WHOLE_PREFIX:
        yield _IGNORED
        return
    for start in range(0, min(len(hashes), whole), _PIECE):
        end = min(start + _PIECE, whole)
        yield BlocksStored(
            hashes=hashes[start:end],
            parent=parent,
            token_ids=tokens[start * size : end * size],
            block_size=size,
            medium=_in_capitals(event.medium) or "GPU",
            lora_name=event.lora_name,
            extra_keys=tuple(
                [_text(one) for one in keys or ()] or None for keys in (event.extra_keys or ())[start:end]
            ),
        )
        parent = hashes[min(end, len(hashes)) - 1]


def _removed(event: _BlockRemoved) -> Iterator[BlocksRemoved | IgnoredEvent]:
    if not event.block_hashes:
        yield _IGNORED
    for start in range(0, len(event.block_hashes), _PIECE):
        yield BlocksRemoved(event.block_hashes[start : start + _PIECE], _in_capitals(event.medium))


def _text(raw: msgspec.Raw) -> str:
    """Of an extra key. A value that is no text is only compared, and not decoded."""
    encoded = bytes(raw)
    return _string.decode(encoded) if encoded[:1] in _STRINGS else encoded.hex()


def _in_capitals(medium: str | None) -> str | None:
    """vLLM writes GPU, connectors of other caches cpu."""
    return medium.upper() if medium else None

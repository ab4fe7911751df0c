# SPDX-License-Identifier: Apache-2.0
"""KV events over ZeroMQ as vLLM publishes them: PUB for news, ROUTER for replays.

Source: ``vllm/distributed/kv_events.py``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from bench.engine.kv_cache import BlocksStored

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.engine.kv_cache import CacheChange

_BUFFERED: Final = 10_000
_END: Final = (-1).to_bytes(8, "big", signed=True)

Form = Literal["maps", "arrays"]


class KvEventsConfig(msgspec.Struct, frozen=True):
    """vLLM's ``--kv-events-config``. ``form``: batches and events as maps (new versions) or arrays (old versions).

    ``replay_port``: None for no replays. ``topic``: the first frame of every message.
    """

    port: int
    replay_port: int | None
    topic: str
    form: Form = "maps"


class KvEventPublisher:
    """Publishes the events of one engine."""

    def __init__(self, config: KvEventsConfig, *, host: str, block_size: int, base_model: str) -> None:
        """Bind the ports on ``host``. ``base_model``: blocks of requests for any other name belong to an adapter."""
        self._config = config
        self._block_size = block_size
        self._base_model = base_model
        self._next = 0
        self._drops = 0
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=_BUFFERED)
        self._context = zmq.asyncio.Context()
        self._events = self._context.socket(zmq.PUB)
        self._events.setsockopt(zmq.SNDHWM, 100_000)
        self._events.bind(f"tcp://{host}:{config.port}")
        self._replay = self._context.socket(zmq.ROUTER)
        if config.replay_port is not None:
            self._replay.bind(f"tcp://{host}:{config.replay_port}")

    def drop_next(self, count: int) -> None:
        """Do not send the next ``count`` messages; they can still be replayed."""
        self._drops += count

    def store_for_replay_only(self, payload: bytes) -> None:
        """Store a message with any content for replay requests; subscribers do not get it."""
        self._sent.append((self._next, payload))
        self._next += 1

    async def publish(self, changes: Sequence[CacheChange]) -> None:
        """Send one message with the changes of a step."""
        if not changes:
            return
        payload = self._encode(changes)
        number, self._next = self._next, self._next + 1
        self._sent.append((number, payload))
        if self._drops:
            self._drops -= 1
            return
        await self._events.send_multipart([self._config.topic.encode(), number.to_bytes(8, "big"), payload])

    async def answer_replays(self) -> None:
        """Answer requests for replays until cancelled."""
        if self._config.replay_port is None:
            await asyncio.Event().wait()
        while True:
            client, *_, start = await self._replay.recv_multipart()
            first = int.from_bytes(start, "big")
            for number, payload in list(self._sent):
                if number >= first:
                    await self._replay.send_multipart([client, b"", number.to_bytes(8, "big"), payload])
            await self._replay.send_multipart([client, b"", _END, b""])

    def close(self) -> None:
        """Release the ports."""

        self._context.destroy(linger=0)

    def _encode(self, changes: Sequence[CacheChange]) -> bytes:
        events = [self._stored(one) if isinstance(one, BlocksStored) else self._removed(one.hashes) for one in changes]
        if self._config.form == "arrays":
            return msgspec.msgpack.encode([0.0, [list(one.values()) for one in events], 0])
        return msgspec.msgpack.encode({"ts": 0.0, "events": events, "data_parallel_rank": 0})

    def _stored(self, one: BlocksStored) -> dict[str, Any]:
        adapter = one.model if one.model != self._base_model else None
        of_all = [adapter] if adapter else []
        # as in vLLM, the salt belongs to the first block of a prompt
        extra = [[*of_all, one.salt] if one.salt and not index else of_all for index in range(len(one.hashes))]
        return {
            "type": "BlockStored",
            "block_hashes": one.hashes,
            "parent_block_hash": one.parent,
            "token_ids": np.frombuffer(one.text, np.uint32).tolist(),
            "block_size": self._block_size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": adapter,
            "extra_keys": [keys or None for keys in extra],
        }

    def _removed(self, hashes: list[int]) -> dict[str, Any]:
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}

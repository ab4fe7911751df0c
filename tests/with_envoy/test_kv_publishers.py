# SPDX-License-Identifier: Apache-2.0
"""What publishers of KV events send steers requests, and never fails one: malformed events, floods, ranks that end."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import TYPE_CHECKING, Any, Self

import httpx
import msgspec
import pytest
import pytest_asyncio
import yaml
import zmq
import zmq.asyncio

from bench.stack.loopback_stack import EngineFlags, Stack, running_stack
from bench.stack.processes import free_ports, ports_in_a_row
from tests.examples import examples, slow
from tests.waiting import eventually
from tests.with_envoy.load import Load

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

# fails where extproc does
CLOSED = {"failureMode": "Close"}
FLAGS = EngineFlags(count=3, speed=20.0, stream_headers="first-token", publishes_events=True)
SIZE = 16
# of each rank of an engine
MESSAGES = examples(50)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Three honest engines, whose file of configuration tests change."""
    directory = tmp_path_factory.mktemp("publishers") / "stack"
    async with running_stack(directory, FLAGS, gateway=CLOSED, more={"tokenizer": {"timeout": "3s"}}) as running:
        yield running


class Publisher:
    """One rank of an engine that says what it likes: ``replays`` is what it answers whoever asks for the past."""

    def __init__(self, events: int, replay: int | None = None, replays: list[list[bytes]] | None = None) -> None:
        self._replays = replays or []
        self._numbers = count()
        self._context = zmq.asyncio.Context()
        self._events = self._context.socket(zmq.PUB)
        self._events.bind(f"tcp://127.0.0.1:{events}")
        self._replay = self._context.socket(zmq.ROUTER)
        if replay is not None:
            self._replay.bind(f"tcp://127.0.0.1:{replay}")
        self._answering = asyncio.create_task(self._answer())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._answering.cancel()
        await asyncio.wait([self._answering])
        self._context.destroy(linger=0)

    async def send(self, payload: bytes) -> None:
        await self._events.send_multipart([b"", next(self._numbers).to_bytes(8, "big"), payload])

    async def _answer(self) -> None:
        while True:
            client, *_ = await self._replay.recv_multipart()
            for frames in self._replays:
                await self._replay.send_multipart([client, *frames])


def events(*events: object) -> bytes:
    return msgspec.msgpack.encode([0.0, events, 0])


def stored(**changes: object) -> list[object]:
    """A good event with ``changes``, in the order of the wire."""
    fields = {
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": [7] * SIZE,
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": None,
    }
    return ["BlockStored", *{**fields, **changes}.values()]


UNREADABLE = {
    "a token of 2^32": events(stored(token_ids=[2**32] * SIZE)),
    "a token of -1": events(stored(token_ids=[-1] * SIZE)),
    "a token that is text": events(stored(token_ids=["7"] * SIZE)),
    "a token that is a float": events(stored(token_ids=[0.5] * SIZE)),
    "a hash that is a list": events(stored(block_hashes=[[1]])),
    "a hash that is a map": events(stored(block_hashes=[{}])),
    "a parent that is a map": events(stored(parent_block_hash={})),
    "removed hashes that are lists": events(["BlockRemoved", [[1]], "GPU"]),
    "blocks of infinite size": events(stored(block_size=float("inf"))),
    "blocks of size 0": events(stored(block_size=0)),
    "blocks of size -1": events(stored(block_size=-1)),
    "blocks of 2^62 tokens": events(stored(block_size=2**62)),
    "an adapter that is a number": events(stored(lora_name=7)),
    "a medium that is a list": events(stored(medium=[1])),
    "200,000 levels": b"\x91" * 200_000,
    "200,000 levels of extra keys": msgspec.msgpack.encode(
        [0.0, [stored(extra_keys=msgspec.Raw(b"\x91" * 200_000 + b"\xc0"))]]
    ),
    "an event of no kind": events([]),
}


def media(number: int) -> bytes:
    """20,000 media a message."""
    return events(*(stored(medium=f"M{number}-{one}") for one in range(20_000)))


def sizes(number: int) -> bytes:
    """250 block sizes a message."""
    first = 1 + 250 * number
    return events(
        *(stored(block_hashes=[size], token_ids=[7] * size, block_size=size) for size in range(first, first + 250))
    )


def blocks(number: int) -> bytes:
    """250,000 blocks of one token."""
    first = 250_000 * number
    return events(stored(block_hashes=list(range(first, first + 250_000)), token_ids=[7] * 250_000, block_size=1))


def many(number: int) -> bytes:
    """50,000 events."""
    return events(*([["BlockRemoved", [number], None]] * 50_000))


async def counted(stack: Stack, name: str) -> float:
    async with httpx.AsyncClient(timeout=60) as http:
        page = (await http.get(f"{stack.metrics}/metrics")).text
    return float(page.partition(f"{name} ")[2].partition("\n")[0] or "0")


def messages(result: str) -> str:
    return f'attache_kv_events_total{{result="{result}",server="default/llama"}}'


def change(stack: Stack, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the ModelServer in the configuration."""
    file = stack.config / "attache.yaml"
    documents = list(yaml.safe_load_all(file.read_text()))
    edit(next(one["spec"] for one in documents if one["kind"] == "ModelServer"))
    fresh = file.with_suffix(".new")
    fresh.write_text(yaml.safe_dump_all(documents))
    fresh.replace(file)


async def received(stack: Stack, more: int, than: float) -> None:
    """Until extproc has applied so many more messages."""

    async def has() -> bool:
        return await counted(stack, messages("received")) >= than + more

    # an event loop that shares its processor takes these floods in its pauses
    await eventually(has)


async def heard(stack: Stack, publisher: Publisher) -> None:
    """Until extproc hears the publisher."""
    before = await counted(stack, messages("received"))

    async def is_heard() -> bool:
        await publisher.send(events())
        return await counted(stack, messages("received")) > before

    await eventually(is_heard, pause_s=0.1)


@pytest_asyncio.fixture(loop_scope="module")
async def hostile(running: Stack) -> AsyncIterator[Publisher]:
    """It speaks for the first engine."""
    port, replay = free_ports(2)

    def edit(spec: dict[str, Any]) -> None:
        spec["endpoints"][0].update(kvEvents=f"127.0.0.1:{port}", kvReplay=f"127.0.0.1:{replay}")

    change(running, edit)
    async with Publisher(port, replay, [[b"one frame"]]) as publisher:
        yield publisher


async def test_no_event_of_a_hostile_engine_fails_a_request(running: Stack, hostile: Publisher) -> None:
    await heard(running, hostile)
    pid = running.pids["extproc"]
    async with Load(running.url, clients=4, output_tokens=2) as load:
        for name, payload in UNREADABLE.items():
            before = await counted(running, messages("unreadable"))
            await hostile.send(payload)

            async def is_refused(before: float = before) -> bool:
                return await counted(running, messages("unreadable")) > before

            await eventually(is_refused)
            await load.more(8)
            assert load.tally.lost == [], name
        assert await counted(running, messages("replayed")) >= 2, "the honest engines are followed"
    assert (load.tally.lost, load.tally.cut) == ([], 0)
    assert running.processes.is_running("extproc")
    assert running.pids["extproc"] == pid


@pytest.mark.parametrize("flood", [slow(media), slow(sizes), blocks, many])
async def test_no_flood_of_events_fails_a_request(
    running: Stack, hostile: Publisher, flood: Callable[[int], bytes]
) -> None:
    await heard(running, hostile)
    async with Load(running.url, clients=4, output_tokens=2) as load:
        for number in range(examples(15)):
            before = await counted(running, messages("received"))
            await hostile.send(flood(number))
            await received(running, 1, before)
            await load.more(8)
    assert (load.tally.lost, load.tally.cut) == ([], 0)
    assert running.processes.is_running("extproc")


async def test_ranks_with_many_blocks_evict_and_end_without_failing_a_request(running: Stack) -> None:
    port = ports_in_a_row(2)

    def edit(spec: dict[str, Any]) -> None:
        spec["kvEvents"]["dataParallelSize"] = 2
        for endpoint in spec["endpoints"]:
            endpoint.update(kvEvents=f"127.0.0.1:{port}")
            endpoint.pop("kvReplay", None)

    change(running, edit)
    async with Publisher(port) as one, Load(running.url, clients=4, output_tokens=2) as load:
        async with Publisher(port + 1) as other:
            for rank, publisher in enumerate((one, other)):
                await heard(running, publisher)
                before = await counted(running, messages("received"))
                for payload in of_rank(rank):
                    await publisher.send(payload)
                await received(running, MESSAGES, before)
            await load.more(20)
            before = await counted(running, messages("received"))
            for start in range(0, 1_000, 100):
                await one.send(events(["BlockRemoved", list(range(start, start + 100)), "GPU"]))
            await received(running, 10, before)
            await load.more(20)
        # one rank has ended
        await load.more(40)
    assert (load.tally.lost, load.tally.cut) == ([], 0)


def of_rank(rank: int) -> Iterator[bytes]:
    """A thousand blocks a message."""
    for start in range(0, MESSAGES * 1_000, 1_000):
        hashes = list(range(start, start + 1_000))
        tokens = [token for one in hashes for token in [rank, one, *[7] * (SIZE - 2)]]
        yield events(stored(block_hashes=hashes, token_ids=tokens))

# SPDX-License-Identifier: Apache-2.0
"""What the engine publishes of its cache is what extproc's precise index makes of it."""

from __future__ import annotations

import asyncio

import pytest
import zmq
import zmq.asyncio

from bench.engine.fake_tokenizer import tokens_of
from bench.engine.hardware import PRESETS
from bench.engine.kv_cache import CacheJournal
from bench.engine.kv_event_publisher import Form, KvEventPublisher, KvEventsConfig
from bench.engine.request import Request
from bench.engine.scheduler import EngineLimits, Scheduler
from bench.engine.step_time import RooflineStepTime
from bench.stack.processes import free_ports
from extproc.prefix.kv_event_decoder import decode_batch
from extproc.prefix.kv_index import EventSource, KvIndex

PROMPT = b"once upon a time" * 16


@pytest.mark.parametrize("form", ["maps", "arrays"])
@pytest.mark.parametrize("adapter", [None, "sql"])
async def test_blocks_of_a_prompt_with_a_salt_are_found_with_it_alone(form: Form, adapter: str | None) -> None:
    journal = CacheJournal()
    scheduler = Scheduler(RooflineStepTime(PRESETS["h100-llama-3.1-8b"]), EngineLimits(), journal)
    name = adapter or "base"
    scheduler.add(Request(0, PROMPT, b"one two ", model=name, block_size=16, keeps_text=True, salt="acme"))
    while (step := scheduler.begin_step()) is not None:
        scheduler.end_step(step)
    port, replay_port = free_ports(2)
    config = KvEventsConfig(port, replay_port, topic="", form=form)
    publisher = KvEventPublisher(config, host="127.0.0.1", block_size=16, base_model="base")
    index = KvIndex()
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.connect(f"tcp://127.0.0.1:{replay_port}")
        answering = asyncio.create_task(publisher.answer_replays())
        await publisher.publish(journal.pop_changes())
        await asking.send_multipart([b"", bytes(8)])
        *_, payload = await asking.recv_multipart()
        answering.cancel()
    publisher.close()
    index.apply(EventSource(0), decode_batch(payload))

    def held(salt: str | None) -> list[int]:
        keys = index.block_keys(tokens_of(PROMPT), adapter=adapter, salt=salt)
        return [one.holders for one in index.match(keys, 0.0)]

    assert held("acme")
    assert held(None) == held("other") == []

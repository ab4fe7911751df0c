# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode engines in virtual time: when the first token comes, and what stays behind."""

from __future__ import annotations

import random

import pytest

from bench.engine.fake_tokenizer import answer_text
from bench.engine.hardware import PRESETS
from bench.engine.kv_transfer import TransferNetwork
from bench.engine.request import Request
from bench.engine.scheduler import EngineLimits
from bench.engine.step_time import StepWork, step_batch
from bench.virtual.engines import VirtualEngine, roofline_engine
from bench.virtual.event_queue import EventQueue
from bench.virtual.kv_transfers import KvTransfers

KIND = roofline_engine(PRESETS["h100-llama-3.1-8b"], EngineLimits(num_gpu_blocks=3000))
# 131,072 bytes of a token: 1,000 tokens take 0.1 s
NETWORK = TransferNetwork(131_072 * 10_000.0, latency_s=0.01, handshake_s=0.5)


class Fleet:
    """A prefill engine and two that decode. ``first_s``: instants of first tokens by the request's key."""

    def __init__(self, network: TransferNetwork = NETWORK, *, pushes: bool = False) -> None:
        self.events = EventQueue()
        self.transfers = KvTransfers(self.events, network, kv_bytes=KIND.kv_bytes, pushes=pushes)
        self.first_s: dict[int, float] = {}
        self.legs: dict[int, tuple[Request, VirtualEngine]] = {}
        self.prefill, self.one, self.other = (
            VirtualEngine(KIND, self.events, self._on_tokens, leaps=True, transfers=self.transfers) for _ in range(3)
        )

    def _on_tokens(self, tokens: list, now: float) -> None:  # type: ignore[type-arg]
        for token in tokens:
            self.first_s.setdefault(token.request.key, now)
            if token.request.key in self.legs and not self.transfers.pushes:
                request, engine = self.legs[token.request.key]
                engine.add(request, now)

    def ask(self, key: int, tokens: int, engine: VirtualEngine, at_s: float = 0.0) -> Request:
        text = b"".join(b"%01d%03d" % (key % 10, number % 1000) for number in range(tokens))
        request = Request(key, text, answer_text(random.Random(key), 8), model="m", block_size=16)
        leg = request.prefill_leg(100 + key)
        self.legs[leg.key] = (request, engine)
        self.transfers.register(leg, self.prefill, request, engine)

        def begin(now: float) -> None:
            self.prefill.add(leg, now)
            if self.transfers.pushes:
                engine.add(request, now)

        self.events.schedule_at(at_s, begin)
        return request


def step_s(*parts: StepWork) -> float:
    return KIND.speed.seconds(step_batch(parts))


def test_the_first_token_comes_after_prefill_handshake_and_transfer() -> None:
    fleet = Fleet()
    request = fleet.ask(1, 1000, fleet.one)
    fleet.events.run()
    prefilled_s = step_s(StepWork(1000, 0))
    assert fleet.first_s[101] == pytest.approx(prefilled_s)
    assert fleet.first_s[1] == pytest.approx(prefilled_s + 0.5 + 0.01 + 0.1 + step_s(StepWork(1, 999)))
    assert (request.transferred, request.produced) == (1000, 8)
    assert fleet.prefill.scheduler.pool.blocks_in_use == fleet.one.scheduler.pool.blocks_in_use == 0
    assert fleet.transfers.count == 1


def test_another_decode_engine_may_get_the_request_when_the_prefill_has_ended() -> None:
    fleet = Fleet()
    request = fleet.ask(1, 1000, fleet.one)
    fleet.legs[101] = (request, fleet.other)
    fleet.transfers.retarget(request, fleet.other)
    fleet.events.run()
    assert (request.transferred, request.produced) == (1000, 8)
    assert fleet.transfers.count == 1


def test_pairs_shake_hands_once() -> None:
    fleet = Fleet()
    fleet.ask(1, 1000, fleet.one)
    fleet.ask(2, 1000, fleet.one, at_s=10.0)
    fleet.events.run()
    assert fleet.first_s[2] - 10.0 == pytest.approx(fleet.first_s[1] - 0.5)


def test_transfers_of_one_engine_share_its_link() -> None:
    fleet = Fleet(TransferNetwork(NETWORK.bandwidth, latency_s=0.0, handshake_s=0.0))
    fleet.ask(1, 1000, fleet.one)
    fleet.ask(2, 1000, fleet.other)
    fleet.events.run()
    # one step after the other: the first transfer has the link for itself until the second prompt is computed
    prefilled_s = step_s(StepWork(1000, 0))
    assert fleet.first_s[102] == pytest.approx(2 * prefilled_s)
    shared_s = 2 * (0.1 - prefilled_s)
    assert fleet.first_s[1] == pytest.approx(2 * prefilled_s + shared_s + step_s(StepWork(1, 999)))
    assert fleet.first_s[2] == pytest.approx(prefilled_s + 0.2 + step_s(StepWork(1, 999)))


def test_a_push_in_pieces_overlaps_with_the_prefill() -> None:
    slow = TransferNetwork(131_072 * 20_000.0, latency_s=0.0, handshake_s=0.0)
    first_s = {}
    for pushes in (False, True):
        fleet = Fleet(slow, pushes=pushes)
        # three chunks of 8,192 tokens
        fleet.ask(1, 3 * 8192, fleet.one)
        fleet.events.run()
        first_s[pushes] = fleet.first_s[1] - fleet.first_s[101]
        assert fleet.prefill.scheduler.pool.blocks_in_use == fleet.one.scheduler.pool.blocks_in_use == 0
    # all three are seen, or about the last alone
    assert first_s[False] == pytest.approx(3 * 8192 / 20_000, rel=0.05)
    assert first_s[True] < 0.6 * first_s[False]


def test_blocks_stay_pinned_until_they_are_pulled() -> None:
    fleet = Fleet()
    fleet.ask(1, 1000, fleet.one)
    used = {}
    for at_s in (0.4, 1.5):
        fleet.events.schedule_at(at_s, lambda now: used.update({now: fleet.prefill.scheduler.pool.blocks_in_use}))
    fleet.events.run()
    assert used == {0.4: 63, 1.5: 0}


def test_only_what_the_decode_engine_lacks_is_sent() -> None:
    fleet = Fleet()
    fleet.ask(1, 1600, fleet.one)
    again = fleet.ask(11, 1600, fleet.one, at_s=10.0)
    fleet.events.run()
    # the last block is always missing: its last token is computed
    assert again.transferred == 16
    assert fleet.transfers.carried == 1616

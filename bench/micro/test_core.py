"""The parts of a decision by themselves: ``make bench`` runs these with pytest-benchmark."""

from __future__ import annotations

import random
from itertools import cycle
from typing import TYPE_CHECKING

import msgspec
import pytest

from bench.stack import ALIAS, documents
from bench.workload.text import text_of
from extproc.config.load import load
from extproc.pipeline import Head, Pipeline
from extproc.prefix.hashing import hash_blocks
from extproc.request.model import Api
from extproc.request.openai import parse

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

SIZES = [2_000, 400_000]
HEAD = Head("POST", "/v1/chat/completions", {}, has_body=True)


def body(size: int, key: str = "a") -> bytes:
    """A chat of about ``size`` bytes."""
    messages = [{"role": "user", "content": text_of(key, size // 4)}]
    return msgspec.json.encode({"model": ALIAS, "messages": messages})


@pytest.mark.parametrize("size", SIZES)
def test_parse(benchmark: BenchmarkFixture, size: int) -> None:
    assert benchmark(parse, Api.CHAT, body(size)).model == ALIAS


@pytest.mark.parametrize("size", SIZES)
def test_hash(benchmark: BenchmarkFixture, size: int) -> None:
    assert len(benchmark(hash_blocks, text_of("a", size // 4).encode(), "m")) > 10


@pytest.mark.parametrize("endpoints", [8, 100])
@pytest.mark.parametrize("size", SIZES)
def test_a_whole_decision(benchmark: BenchmarkFixture, size: int, endpoints: int) -> None:
    engines = [f"10.0.0.{number + 1}:8000" for number in range(endpoints)]
    snapshot = load({"all.yaml": documents(engines, gateway={}).encode()})
    pipeline = Pipeline(snapshot, rng=random.Random(0), ticket_prefix="t")
    bodies = cycle([body(size, f"key {number}") for number in range(8)])

    def decide() -> str:
        decision = pipeline.arrive(Api.CHAT, HEAD, next(bodies), 0.0)
        pipeline.finish(decision.ticket)
        return decision.server

    assert benchmark(decide) == "llama"

# SPDX-License-Identifier: Apache-2.0
"""A small configuration, a core over it, and the steps that most tests take."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from extproc.api.config_loader import load_snapshot
from extproc.core.core import Core
from extproc.core.effects import Decision, OutcomeJoined, RequestRefused
from extproc.core.request_states import RequestState
from extproc.streams.stream_dependencies import GatewayOptions, StreamContext

if TYPE_CHECKING:
    from collections.abc import Callable

    from extproc.api.config_snapshot import Snapshot
    from extproc.core.effects import Effect
    from extproc.core.request_record import Outcome, RequestHead
    from extproc.metrics.request_metrics import Metrics

CONFIG = b"""
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec:
  model: llama-3.1-8b
  scrapeInterval: 0s
  endpoints: [{address: "10.0.0.1:8000"}, {address: "10.0.0.2:8000"}, {address: "10.0.0.3:8000"}]
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: chat}
spec:
  modelName: chat
  loraAdapters: [sql]
  rules: [{targetModels: [{modelServerName: llama}]}]
"""


@pytest.fixture
def snapshot() -> Snapshot:
    return load_snapshot({"all.yaml": CONFIG})


@pytest.fixture
def core(snapshot: Snapshot) -> Core:
    return Core(snapshot, rng=random.Random(0), ticket_prefix="t")


def decide(core: Core, head: RequestHead, body: bytes, now: float = 0.0) -> Decision:
    """The decision on a request that goes at once; raises the Refusal that its client would get."""
    own, _ = core.arrive(core.builder.build_by_model(head, body), now)
    if isinstance(own, RequestRefused):
        raise own.refusal
    assert isinstance(own, Decision)
    return own


def settle(core: Core, outcome: Outcome, now: float) -> OutcomeJoined | None:
    """What the outcome was joined with; None if nothing."""
    return next((one for one in core.on_outcome(outcome, now) if isinstance(one, OutcomeJoined)), None)


def in_some_state(core: Core) -> int:
    """How many requests the core knows of."""
    return core.count_requests(*RequestState)


def shell(core: Core, metrics: Metrics, now: Callable[[], float] = lambda: 5.0, **options: object) -> StreamContext:
    """What streams work with, where effects are counted and not performed."""

    def perform(effects: list[Effect], own: Effect | None = None) -> None:
        for effect in effects if own is None else (own, *effects):
            metrics.count_effect(effect)

    return StreamContext(core, metrics, now, perform, 77, GatewayOptions(**options))  # type: ignore[arg-type]

# SPDX-License-Identifier: Apache-2.0
"""Two levels of fairness: a tenant's part does not grow with its users, sessions or adapters."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.admission.fairness import DeficitLocality, RoundRobin, SlidingWindow, TenantShares, VirtualTokenCounter
from extproc.admission.flow_queues import FirstCome, FlowKey, Flows, QueuedRequest

if TYPE_CHECKING:
    from extproc.admission.fairness import FairnessPolicy

LARGEST = 500.0
QUANTUM = 1_000.0


class Backlog:
    """Flows that always have a request waiting, served one after the other."""

    def __init__(self, policies: tuple[FairnessPolicy, FairnessPolicy], keys: list[FlowKey], seed: int) -> None:
        self.flows = Flows(policies[0], FirstCome(30.0), 30.0, TenantShares(policies[1]))
        self.rng = random.Random(seed)
        self.served: dict[FlowKey, float] = dict.fromkeys(keys, 0.0)
        self.count = 0
        for key in keys:
            self.enqueue(key)
            self.enqueue(key)

    def enqueue(self, key: FlowKey) -> None:
        self.count += 1
        self.flows.add(QueuedRequest(f"t{self.count}", key, 0.0, expires_at_s=60.0))

    def serve(self, now: float) -> None:
        row, _ = self.flows.choose_flow(self.flows.waiting_rows, self.flows.waiting_rows, now)
        queued = next(self.flows.ordered_requests(row))
        self.flows.remove(queued)
        self.enqueue(queued.flow)
        expected, cost = (self.rng.uniform(1.0, LARGEST) for _ in range(2))
        self.flows.begin_service(queued.flow, expected, now)
        self.flows.end_service(queued.flow, cost - expected, now)
        self.served[queued.flow] += cost

    def of(self, tenant: str) -> float:
        return sum(service for key, service in self.served.items() if key.tenant == tenant)


@pytest.mark.parametrize(
    ("kind", "bound"),
    # VTC's theorem 4.4: two of the largest; DLPM: one quantum and one request, at the end of either's turn
    [("VirtualTokenCounter", 2 * LARGEST), ("SlidingWindow", 2 * LARGEST), ("DeficitLocality", QUANTUM + 2 * LARGEST)],
)
@settings(max_examples=15, deadline=None)
@given(users=st.integers(1, 200), seed=st.integers(0, 1000), rounds=st.integers(1, 600))
def test_a_tenants_part_does_not_grow_with_its_users(
    kind: str, bound: float, users: int, seed: int, rounds: int
) -> None:
    make = {
        "VirtualTokenCounter": VirtualTokenCounter,
        "SlidingWindow": lambda: SlidingWindow(1e9),
        "DeficitLocality": lambda: DeficitLocality(QUANTUM),
    }[kind]
    keys = [FlowKey("many", part=f"user-{number}") for number in range(users)]
    scene = Backlog((make(), make()), [*keys, FlowKey("one", part="alone")], seed)
    for step in range(rounds):
        scene.serve(float(step))
    assert abs(scene.of("many") - scene.of("one")) <= bound


def test_the_users_of_a_tenant_share_its_part() -> None:
    keys = [FlowKey("many", part=f"user-{number}") for number in range(10)]
    scene = Backlog((VirtualTokenCounter(), VirtualTokenCounter()), [*keys, FlowKey("one")], 1)
    for step in range(2_000):
        scene.serve(float(step))
    parts = [scene.served[key] for key in keys]
    assert max(parts) - min(parts) <= 2 * LARGEST


def test_tenants_take_turns_whatever_the_number_of_their_models() -> None:
    keys = [FlowKey("many", f"adapter-{number}") for number in range(8)]
    scene = Backlog((RoundRobin(), RoundRobin()), [*keys, FlowKey("one", "base")], 1)
    order = []
    for step in range(16):
        before = scene.of("one")
        scene.serve(float(step))
        order.append(scene.of("one") > before)
    assert sum(order) == 8


def test_the_tenant_with_most_waiting_gives_up_a_place_not_the_largest_flow() -> None:
    keys = [FlowKey("many", part=f"user-{number}") for number in range(20)]
    scene = Backlog((VirtualTokenCounter(), VirtualTokenCounter()), [*keys, FlowKey("one")], 1)
    for _ in range(5):
        scene.enqueue(FlowKey("one"))
    assert scene.flows.eviction_candidate().flow.tenant == "many"


def test_a_tenant_is_forgotten_with_its_last_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.admission.flow_queues.MAX_IDLE_FLOWS", 10)
    tenants = TenantShares(VirtualTokenCounter())
    flows = Flows(VirtualTokenCounter(), FirstCome(30.0), 30.0, tenants)
    for number in range(300):
        key = FlowKey(f"tenant-{number % 100}", part=str(number))
        flows.begin_service(key, 1.0, 0.0)
        flows.end_service(key, 0.0, 0.0)
    assert len(flows) <= 20
    assert len(tenants) <= len(flows)
    assert tenants.flows_of_same_tenant(flows.assign_row(key)).sum() >= 1

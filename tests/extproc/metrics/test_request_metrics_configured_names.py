# SPDX-License-Identifier: Apache-2.0
"""Series of budgets, guards and response caches end with what they are about, and those of the others go on."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from extproc.core.core import Core
from extproc.core.effects import CacheLookupResult, GuardAnswered
from extproc.metrics.request_metrics import Metrics
from tests.extproc.scenes import configuration, request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.api.config_snapshot import Snapshot

HEADERS = {"x-attache-tenant": "a"}
GATEWAY = """\
apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {{name: g}}
spec:
  clients: Trusted
  budgets: [{budgets}]
  guards: [{guards}]
  authentication:
    apiKeys: [{{name: web, tenant: a, keySHA256: '{digest}', budgets: [{keys}]}}]
"""


def snapshot(
    *, gateway: Sequence[str] = (), route: Sequence[str] = (), guards: Sequence[str] = (), keys: Sequence[str] = ()
) -> Snapshot:
    """With budgets and guards of these names; ``keys``: windows of an API key's own budgets."""

    def budgets(names: Sequence[str]) -> str:
        return ", ".join(f"{{name: {one}, window: Day, soft: 0.01, max: {{requests: 2}}}}" for one in names)

    own = ", ".join(f"{{window: {one}, max: {{requests: 2}}}}" for one in keys)

    services = ", ".join(f"{{name: {one}, url: 'http://127.0.0.1:9/'}}" for one in guards)
    others = GATEWAY.format(budgets=budgets(gateway), guards=services, keys=own, digest="0" * 64)
    return configuration(
        servers={"llama": "endpoints: [{address: '10.0.0.1:8000'}]\nscrapeInterval: 0s\n"},
        routes={"chat": f"budgets: [{budgets(route)}]\n"},
        others=others,
    )


class Process:
    """A core, and the metrics of its effects."""

    def __init__(self, first: Snapshot) -> None:
        self.core = Core(first, rng=random.Random(0), ticket_prefix="t")
        self.core.align_with_wall_clock(1_800_000_000.0, 0.0)
        self.metrics = Metrics(
            lambda: list(self.core.pools.values()),
            lambda: 1_800_000_000.0,
            lambda: 1.0,
            budget_levels=self.core.admission.limits.budget_levels,
        )
        self.metrics.registry.names.set_source(self.core.configured_names)

    def send(self, count: int) -> None:
        for _ in range(count):
            own, effects = self.core.arrive(request(self.core, headers=HEADERS), 1.0)
            for one in (own, *effects):
                self.metrics.count_effect(one)

    def apply(self, new: Snapshot) -> None:
        for one in self.core.apply(new, 2.0):
            self.metrics.count_effect(one)
        self.metrics.on_config_applied()

    def values(self, label: str) -> dict[str, set[str]]:
        """The names in the page that this label has, by family."""
        found: dict[str, set[str]] = {}
        for family in self.metrics.registry.collect():
            for sample in family.samples:
                if label in sample.labels:
                    found.setdefault(family.name, set()).add(sample.labels[label])
        return found


def test_series_of_budgets_end_when_they_leave_the_configuration_and_others_keep_their_counts() -> None:
    process = Process(snapshot(gateway=["all", "gone"], route=["own", "old"]))
    process.send(3)
    before = {"gateway/-/all", "gateway/-/gone", "default/chat/own", "default/chat/old"}
    found = process.values("budget")
    assert found["attache_budget_used_ratio"] == found["attache_budget_warned_requests"] == before
    (refusing,) = found["attache_budget_refused_requests"]
    # a budget of the same name whose owner is another one is another budget
    process.apply(snapshot(gateway=["all", "old"], route=["own", "gone"]))
    found = process.values("budget")
    assert found["attache_budget_used_ratio"] == {"gateway/-/all", "default/chat/own"}
    assert found["attache_budget_warned_requests"] == {"gateway/-/all", "default/chat/own"}
    labels = {"budget": "gateway/-/all"}
    assert process.metrics.registry.get_sample_value("attache_budget_warned_requests_total", labels) == 2
    assert refusing in before
    # one that returns in the same window is used up as it was, and its counters begin anew
    process.apply(snapshot(gateway=["all", "gone"], route=["own"]))
    found = process.values("budget")
    assert "gateway/-/gone" in found["attache_budget_used_ratio"]
    assert "gateway/-/gone" not in found["attache_budget_warned_requests"]


def test_series_of_guards_end_and_what_a_late_call_adds_ends_at_the_next_scrape() -> None:
    process = Process(snapshot(guards=["stays", "leaves"]))
    for name in ("stays", "leaves"):
        process.metrics.count_effect(GuardAnswered(name, "allowed", 0.1, goes_on=True))
    both = {"stays", "leaves"}
    assert process.values("guard") == {"attache_guard_requests": both, "attache_guard_seconds": both}
    process.apply(snapshot(guards=["stays"]))
    assert process.values("guard") == {"attache_guard_requests": {"stays"}, "attache_guard_seconds": {"stays"}}
    # a call that began before
    process.metrics.count_effect(GuardAnswered("leaves", "no answer", 0.1, goes_on=True))
    assert process.values("guard") == {"attache_guard_requests": {"stays"}, "attache_guard_seconds": {"stays"}}
    assert process.metrics.registry.get_sample_value("attache_guard_seconds_count", {"guard": "stays"}) == 1


def test_budgets_of_keys_end_with_the_last_key_that_has_them() -> None:
    process = Process(snapshot(keys=["Day"]))
    (name,) = process.core.configured_names()["budget"]
    assert name.startswith("gateway/-/")
    process.metrics.admission._passed.add(name)
    assert process.values("budget") == {"attache_budget_soft_passed": {name}}
    process.apply(snapshot())
    assert process.values("budget") == {}


def test_series_of_bands_and_classes_end_and_those_of_nobody_in_particular_stay() -> None:
    def with_bands(*names: str) -> Snapshot:
        bands = ", ".join(f"{{name: {one}, priority: {10 * at}, share: 1}}" for at, one in enumerate(names))
        server = "endpoints: [{address: '10.0.0.1:8000'}]\nscrapeInterval: 0s\n"
        classes = ", ".join(f"{{name: {one}-class, priority: {10 * at}, ttft: 1s}}" for at, one in enumerate(names))
        return configuration(
            servers={"llama": f"{server}flowControl: {{bands: [{bands}]}}\n"}, routes={"chat": f"slo: [{classes}]\n"}
        )

    process = Process(with_bands("low", "high"))
    for name in ("low", "high", "low-class", "high-class", "", "(others)"):
        process.metrics._answer_times._held.observe(1.0, "m", "default/llama", name)
        process.metrics.admission._ends.add("default/llama", name, "sent")
    assert process.values("class")["attache_request_held_seconds"] == {
        *("low", "high", "low-class", "high-class", "", "(others)")
    }
    process.apply(with_bands("low"))
    assert process.values("class")["attache_request_held_seconds"] == {"low", "low-class", "", "(others)"}
    assert process.values("band")["attache_queue_waits"] == {"low", "", "(others)"}


def test_series_of_response_caches_end_with_them() -> None:
    def cached(*routes: str) -> Snapshot:
        server = "endpoints: [{address: '10.0.0.1:8000'}]\nscrapeInterval: 0s\n"
        return configuration(
            servers={"llama": server}, routes={one: f"cache: {{}}\nmodelName: {one}\n" for one in routes}
        )

    process = Process(cached("stays", "leaves"))
    for name in ("stays", "leaves"):
        process.metrics.count_effect(CacheLookupResult(f"default/{name}", "miss"))
    process.apply(cached("stays"))
    assert process.values("route")["attache_response_cache_lookups"] == {"default/stays"}

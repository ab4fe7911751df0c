# SPDX-License-Identifier: Apache-2.0
"""What clients asked for, as the manager sums it up over all extproc processes of a pod, behind a real Envoy."""

from __future__ import annotations

import asyncio
import json
import time
from random import Random
from typing import TYPE_CHECKING

import httpx
from prometheus_client import CollectorRegistry

from bench.stack.loopback_stack import ALIAS, EngineFlags, running_stack
from bench.stack.processes import free_ports
from controller.autoscaler.decision.merged_gateway_reports import SignalAggregator
from controller.kube.gateway_reports import DemandFeed
from controller.kube.metrics_and_health import serve_pages
from extproc.api.status_page_contents import LOADS_LABEL
from tests.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from controller.autoscaler.decision.traffic import TrafficTotals
    from extproc.api.status_page_contents import ProcessDemand

POD = "attache/gateway"


class Manager:
    """Follows a pod whose page is at ``address``."""

    def __init__(self, address: str, server: str) -> None:
        ip, _, port = address.partition(":")
        pod = {"metadata": {"labels": {LOADS_LABEL: port}}, "status": {"podIP": ip, "phase": "Running"}}
        self.server = server
        self.signals = SignalAggregator(trusted=("attache",))
        self.signals.set_subscriptions((server,), self.now())
        self.signals.set_gateways((POD,), self.now())
        self.feed = DemandFeed(lambda: {POD: pod}, self.hear, clock=self.now, rng=Random(0), trusted=("attache",))
        self.instances: set[str] = set()

    @staticmethod
    def now() -> float:
        return time.monotonic()  # noqa: TID251 - a real stack

    def hear(self, gateway: str, message: ProcessDemand, at_s: float) -> None:
        self.instances.add(message.instance)
        self.signals.ingest(gateway, message, at_s)

    def totals(self) -> TrafficTotals:
        now = self.now()
        found = self.signals.merged_signals((self.server,), now).traffic.totals_at(now)
        assert found is not None
        return found


async def ask(http: httpx.AsyncClient, number: int) -> tuple[int, int]:
    """The tokens of prompt and answer, as the client is told."""
    body = {
        "model": ALIAS,
        "messages": [{"role": "user", "content": f"{number} " + "tell me more " * (50 + number % 7 * 40)}],
        "max_tokens": 3 + number % 5,
        "stream": number % 2 == 0,
        "stream_options": {"include_usage": True} if number % 2 == 0 else None,
    }
    answer = await http.post("/v1/chat/completions", json={key: one for key, one in body.items() if one is not None})
    assert answer.status_code == 200, answer.text
    if number % 2:
        usage = answer.json()["usage"]
    else:
        lines = [one.removeprefix("data: ") for one in answer.text.splitlines() if one.startswith("data: {")]
        usage = next(found for one in reversed(lines) if (found := json.loads(one).get("usage")))
    return usage["prompt_tokens"], usage["completion_tokens"]


async def test_sums_over_two_processes_equal_what_clients_have_counted(tmp_path: Path) -> None:
    flags = EngineFlags(count=3, speed=20.0, stream_headers="first-token")
    async with running_stack(tmp_path / "stack", flags, workers=2) as stack:
        host, _, first = stack.metrics.removeprefix("http://").partition(":")
        extprocs = [f"{host}:{int(first) + number}" for number in range(2)]
        address = f"127.0.0.1:{free_ports(1)[0]}"
        async with (
            serve_pages(address, CollectorRegistry(), lambda: True, extprocs=extprocs),
            httpx.AsyncClient(base_url=stack.url, timeout=30, limits=httpx.Limits(max_connections=16)) as http,
        ):
            manager = Manager(address, "default/llama")
            following = asyncio.create_task(manager.feed.run())
            try:
                await eventually(lambda: len(manager.instances) == 2)
                # until an answer has said so, it is not known that engines report usage, and prompts are estimated
                await ask(http, 1)
                await eventually(lambda: manager.totals().finished == 1)
                before = manager.totals()
                told = await asyncio.gather(*(ask(http, number) for number in range(200)))
                refused = await http.post("/v1/chat/completions", json={"model": ALIAS, "messages": "none"})
                assert refused.status_code == 400
                await eventually(lambda: manager.totals().finished == 201)
                after = manager.totals()
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
    assert after.arrivals - before.arrivals == 200
    assert after.refused == 0
    assert after.prompt_tokens - before.prompt_tokens == sum(prompt for prompt, _ in told)
    assert after.output_tokens - before.output_tokens == sum(written for _, written in told)
    # each streamed answer has a time to its first token
    assert sum(after.ttft) - sum(before.ttft) == 100

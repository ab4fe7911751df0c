# SPDX-License-Identifier: Apache-2.0
"""Tiers through a real Envoy: two ModelServers of simulated engines, of which the cheaper takes one request at once."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import httpx
import pytest
import pytest_asyncio
import yaml
from prometheus_client.parser import text_string_to_metric_families

from bench.stack.loopback_stack import ALIAS, EngineFlags, Stack, running_stack
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEYS: Final = [{"name": name, "key": f"sk-{name}-0123", "tenant": name} for name in ("eager", "patient", "waiting")]
TIERS: Final = {
    "ttft": "500ms",
    "classes": [{"tenants": ["patient"], "spill": "Never"}, {"tenants": ["waiting"], "ttft": "1s", "wait": "400ms"}],
}
ONE_AT_ONCE: Final = {
    "saturation": {"queueDepth": None, "kvUsage": None, "maxWait": None, "maxRequests": 1},
    "timeout": "60s",
}


def two_tiers(text: str) -> str:
    """The directory of a stack with its second engine as a dearer ModelServer of its own."""
    server, route, gateway = yaml.safe_load_all(text)
    first, second = server["spec"].pop("endpoints")
    cheap = {
        **server["spec"],
        "endpoints": [first],
        "pricing": [{"perMillion": {"input": 1, "output": 2}}],
        "flowControl": ONE_AT_ONCE,
    }
    dear = {**server["spec"], "endpoints": [second], "pricing": [{"perMillion": {"input": 4, "output": 8}}]}
    targets = [{"modelServerName": "dear"}, {"modelServerName": server["metadata"]["name"]}]
    route["spec"]["rules"] = [{"targetModels": targets, "tiers": TIERS}]
    return yaml.safe_dump_all(
        [{**server, "spec": cheap}, {**server, "metadata": {"name": "dear"}, "spec": dear}, route, gateway]
    )


class Tiers:
    """The gateway, as its clients see it, and what it counted."""

    def __init__(self, stack: Stack, http: httpx.AsyncClient) -> None:
        self._stack = stack
        self._http = http

    @asynccontextmanager
    async def asked(self, tenant: str, tokens: int = 1) -> AsyncIterator[httpx.Response]:
        body: dict[str, Any] = {"model": ALIAS, "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens}
        content = json.dumps({**body, "stream": True})
        headers = {"authorization": f"Bearer sk-{tenant}-0123", "content-type": "application/json"}
        url = f"{self._stack.url}/v1/chat/completions"
        async with self._http.stream("POST", url, content=content, headers=headers) as answer:
            yield answer

    async def whole(self, tenant: str) -> int:
        async with self.asked(tenant) as answer:
            await answer.aread()
            return answer.status_code

    async def is_idle(self) -> bool:
        """Whether extproc has seen the end of all requests."""
        page = (await self._http.get(f"{self._stack.metrics}/metrics")).text
        samples = [
            sample
            for family in text_string_to_metric_families(page)
            if family.name == "attache_in_flight"
            for sample in family.samples
        ]
        return bool(samples) and not any(sample.value for sample in samples)

    async def picks(self) -> dict[tuple[str, str], float]:
        """By ModelServer and reason."""
        page = (await self._http.get(f"{self._stack.metrics}/metrics")).text
        return {
            (sample.labels["server"], sample.labels["reason"]): sample.value
            for family in text_string_to_metric_families(page)
            if family.name == "attache_tier_picks"
            for sample in family.samples
            if sample.name == "attache_tier_picks_total"
        }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tiers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Tiers]:
    directory: Path = tmp_path_factory.mktemp("tiers") / "stack"
    flags = EngineFlags(count=2, speed=1.0, stream_headers="first-token")
    eager = {"authorization": f"Bearer {KEYS[0]['key']}"}
    gateway = {"authentication": {"apiKeys": KEYS}, "failureMode": "Close"}
    async with (
        running_stack(directory, flags, watch=True, gateway=gateway, headers=eager) as stack,
        httpx.AsyncClient(timeout=120) as http,
    ):
        file = stack.config / "attache.yaml"
        new = file.with_suffix(".new")
        new.write_text(two_tiers(file.read_text()))
        new.rename(file)
        found = Tiers(stack, http)

        async def are_there() -> bool:
            assert await found.whole("eager") in (200, 503)
            return bool(await found.picks())

        await eventually(are_there)
        yield found


async def test_the_cheapest_first_and_a_dearer_one_while_it_is_taken(tiers: Tiers) -> None:
    await eventually(tiers.is_idle)
    before = await tiers.picks()
    async with tiers.asked("eager", tokens=8000) as first:
        # it has its first token: it is at its engine
        pieces = first.aiter_raw()
        await anext(pieces)
        assert await tiers.whole("eager") == 200
        after = await tiers.picks()
        await pieces.aclose()
    assert after["default/llama", "holds"] - before.get(("default/llama", "holds"), 0) == 1
    assert after["default/dear", "up"] - before.get(("default/dear", "up"), 0) == 1


async def test_a_request_waits_for_its_home_and_then_takes_the_dearer_one(tiers: Tiers) -> None:
    await eventually(tiers.is_idle)
    before = await tiers.picks()
    async with tiers.asked("eager", tokens=8000) as first:
        pieces = first.aiter_raw()
        await anext(pieces)
        assert await tiers.whole("waiting") == 200
        after = await tiers.picks()
        await pieces.aclose()
    assert after["default/dear", "up"] - before.get(("default/dear", "up"), 0) == 1


async def test_a_class_that_never_spills_waits_until_its_home_is_free(tiers: Tiers) -> None:
    await eventually(tiers.is_idle)
    before = await tiers.picks()
    async with tiers.asked("eager", tokens=8000) as first:
        pieces = first.aiter_raw()
        await anext(pieces)
        patient = asyncio.create_task(tiers.whole("patient"))
        # another one, of a tenant that spills, overtakes it
        assert await tiers.whole("eager") == 200
        assert not patient.done()
        await pieces.aclose()
    # the client of the first one has left
    assert await patient == 200
    after = await tiers.picks()
    assert after["default/llama", "misses"] - before.get(("default/llama", "misses"), 0) == 1

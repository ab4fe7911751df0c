# SPDX-License-Identifier: Apache-2.0
"""The console in a real Chromium: what stands there is what the API says, whatever names there are, and it comes back.

The clock of these processes stands still, so that the page and the API speak of one instant.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from decimal import ROUND_HALF_UP, Decimal
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import pytest
import pytest_asyncio
from msgspec import to_builtins

from bench.stack.processes import free_ports
from controller.models.rollouts_page import rollouts_page
from extproc.console.pages import ConsoleWorkerInfo
from extproc.console.token_auth import token_auth_middleware
from extproc.core.request_states import STEP_NAMES
from tests.extproc.console.test_pages import hanging_manager, many_engines, usage_api
from tests.programs import program
from tools.chromium import browser_page
from tools.console_pictures import demo_gateway, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from tools.chromium import Page

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOSTILE: Final = "<img src=x onerror=window.wasRun=1>"
# By id of the table: its rows in the API's answer.
STATE_TABLES: Final = ("servers", "engines", "bands", "tenants", "buckets", "routes")
_CELLS: Final = """
[...document.querySelectorAll("#%s tbody tr")].map((row) => Object.fromEntries(
    [...row.children].map((cell) => [cell.dataset.field, [cell.dataset.kind, cell.textContent]])))
"""
_TOO_WIDE: Final = """
[...document.querySelectorAll("body *")].filter((one) => one.getClientRects().length && !one.closest("svg")
    && one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.outerHTML)
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def page(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Page]:
    browser = program("chromium", "chromium-browser", "google-chrome")
    async with browser_page(browser, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


async def answer_of(url: str) -> Any:  # noqa: ANN401 - JSON
    async with aiohttp.ClientSession() as client, client.get(url) as answer:
        assert answer.status == 200
        return await answer.json()


def rounded(value: float, digits: str = "1") -> str:
    return f"{Decimal(value).quantize(Decimal(digits), ROUND_HALF_UP):,}"


def shown(kind: str, value: Any) -> str:  # noqa: ANN401 - of any column
    """What the page makes of a value."""
    if value is None or value == "":
        return "\N{EN DASH}"
    make = FORMS.get(kind)
    return str(value) if make is None else make(value)


def duration(value: float) -> str:
    if value == 0:
        return "0"
    if value < 0.01:
        return f"{rounded(1000 * value, '0.1')} ms"
    if value < 0.9995:
        return f"{rounded(1000 * value)} ms"
    for unit_s, below_s, unit, digits in (
        (1, 120, "s", "0.1"),
        (60, 7_200, "min", "1"),
        (3_600, 172_800, "h", "1"),
        (86_400, float("inf"), "d", "1"),
    ):
        if value < below_s:
            return f"{rounded(value / unit_s, digits)} {unit}"
    raise AssertionError(value)


# By the kind of a column.
FORMS: Final[Mapping[str, Callable[[float], str]]] = MappingProxyType(
    {
        "count": rounded,
        "share": lambda value: f"{rounded(100 * value)}%",
        "duration": duration,
        "percent": lambda value: f"{rounded(100 * value, '0.1')}%",
        # what is not all is never shown as 100
        "floored": lambda value: f"{int(value * 1e5 + 1e-6) / 1e3:.3f}%",
        "rate": lambda value: rounded(value, "0.01"),
        "hour": lambda value: f"{datetime.fromtimestamp(value, UTC):%Y-%m-%d %H:%M}",
    }
)


async def compare(page: Page, name: str, rows: list[dict[str, Any]]) -> int:
    """The number of values that were found equal to the page's."""
    table = await page.run(_CELLS % name)
    assert len(table) == len(rows), name
    compared = 0
    for line, row in zip(table, rows, strict=True):
        for field, (kind, text) in line.items():
            # texts that the page puts together have names of their own
            if field in row and kind != "time" and not isinstance(row[field], list):
                assert text == shown(kind, row[field]), (name, field, row)
                compared += 1
    return compared


@asynccontextmanager
async def on_screen(page: Page, served: AbstractAsyncContextManager[str]) -> AsyncIterator[str]:
    """The URL of pages, which Chromium leaves before they end: a connection that is accepted then stays open."""
    async with served as url:
        try:
            yield url
        finally:
            await page.show("about:blank")


async def opened(page: Page, url: str, tab: str = "engines", **screen: Any) -> None:  # noqa: ANN401 - size and colours
    await page.show("about:blank")
    page.complaints.clear()
    await page.show(f"{url}#{tab}", **screen)
    await wait_until(page, f"document.querySelector('#panel-{tab} tbody tr') !== null")


async def test_every_number_in_the_page_is_that_of_the_api(page: Page) -> None:
    async with on_screen(page, demo_gateway().served(free_ports(1)[0])) as url:
        await opened(page, url, "requests")
        state = await answer_of(f"{url}/state")
        requests = [
            {**one, **{f"{step}S": one["waitsS"].get(step, 0) for step in STEP_NAMES.values()}}
            for one in (await answer_of(f"{url}/requests?limit=100"))["requests"]
        ]
        compared = {name: await compare(page, name, state[name]) for name in STATE_TABLES}
        compared["requests"] = await compare(page, "requests", requests)
        for tile in ("engines", "serving", "avoided", "silent", "noModel", "inFlight", "held"):
            assert await page.run(f"document.getElementById('tile-{tile}').textContent") == rounded(
                state["total"][tile]
            )
        rules = await page.run("document.querySelector('#routes [data-field=ruleTexts]').textContent")
        assert rules == "if x-plan is 'free': 100% default/qwen; 90% default/llama, 10% default/qwen"
        await compare(
            page, "outcomes", [{"outcome": name, "requests": count} for name, count in state["outcomes"].items()]
        )
        await compare(
            page, "files", [{"file": name, "digest": digest} for name, digest in state["config"]["files"].items()]
        )
    columns = {"servers": 18, "engines": 15, "bands": 7, "tenants": 9, "buckets": 7, "routes": 4, "requests": 19}
    rows = {**{name: len(state[name]) for name in STATE_TABLES}, "requests": 100}
    assert compared == {name: rows[name] * count for name, count in columns.items()}
    assert page.complaints == []


async def test_5000_engines_are_sorted_filtered_and_counted(page: Page) -> None:
    async with on_screen(page, many_engines().served(free_ports(1)[0])) as url:
        await opened(page, url)
        state = await answer_of(f"{url}/state")
        await compare(page, "engines", state["engines"])
        await compare(page, "servers", state["servers"])
        assert await page.run("document.getElementById('tile-engines').textContent") == "5,000"
        assert await page.run("document.querySelector('#engines .empty').textContent") == "50 of 5,000"
        server = state["servers"][7]["name"]
        await page.run(f"""(() => {{
            const chosen = document.getElementById("server");
            chosen.value = "{server}"; chosen.dispatchEvent(new Event("change"));
            [...document.querySelectorAll("#engines th button")].find((one) => one.textContent === "Engine").click();
        }})()""")
        wanted = await answer_of(f"{url}/state?sort=address&server={server}")
        first = wanted["engines"][0]["address"]
        await wait_until(page, "document.querySelectorAll('#servers tbody tr').length === 1")
        await wait_until(page, f"document.querySelector('#engines [data-field=address]').textContent === '{first}'")
        await compare(page, "engines", wanted["engines"])
        assert await page.run("document.querySelector('#engines th[aria-sort=ascending]').textContent") == "Engine"
    assert page.complaints == []


async def test_rows_stay_the_same_elements_and_hostile_names_stay_text(page: Page) -> None:
    gateway = demo_gateway(tenants=(HOSTILE, "x" * 128))
    async with on_screen(page, gateway.served(free_ports(1)[0])) as url:
        await opened(page, url, "requests")
        names = await page.run("[...document.querySelectorAll('#tenants [data-field=name]')].map((o) => o.textContent)")
        assert sorted(names) == [HOSTILE, "x" * 128]
        await page.run("window.kept = [...document.querySelectorAll('#tenants tr, #engines tr')]; undefined")
        # another answer, with other numbers
        gateway.now += 1
        gateway.send("x" * 128, "large")
        count = len((await answer_of(f"{url}/requests?limit=200"))["requests"])
        sent = next(one for one in (await answer_of(f"{url}/state"))["tenants"] if one["name"] == "x" * 128)["sent"]
        cells = "[...document.querySelectorAll('#tenants [data-field=sent]')]"
        await wait_until(page, f"{cells}.some((one) => one.textContent === '{sent}')")
        await wait_until(page, f"document.getElementById('kept').textContent.startsWith('{count} requests')")
        assert await page.run("window.kept.every((one) => one.isConnected)")
        assert await page.run("document.querySelectorAll('img').length + Number('wasRun' in window)") == 0
    assert page.complaints == []


async def test_the_page_says_that_the_process_is_away_and_goes_on_with_the_next_one(page: Page) -> None:
    port, first, second = free_ports(1)[0], demo_gateway(), demo_gateway()
    second.core._ticket_prefix = "another"
    async with first.served(port) as url:
        await opened(page, url)
        assert await page.run("document.getElementById('away').hidden && document.getElementById('restarted').hidden")
    await wait_until(page, "!document.getElementById('away').hidden")
    assert "has not answered since" in await page.run("document.getElementById('away').textContent")
    # what was known still stands
    assert await page.run("document.querySelectorAll('#engines tbody tr').length") == 12
    async with second.served(port):
        await wait_until(page, "document.getElementById('away').hidden")
        await wait_until(page, "!document.getElementById('restarted').hidden")
        assert "counters began anew" in await page.run("document.getElementById('restarted').textContent")
    assert page.complaints == []


async def test_usage_is_shown_where_there_is_an_api_for_it(page: Page) -> None:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0).isoformat()
    sums = {
        "requests": 1_234,
        "refused": 5,
        "input": 67_890,
        "cached": 40,
        "output": 12,
        "cost_micros": {"USD": 1_230_000},
    }
    rows = [{"start": hour, "tenant": HOSTILE, "key": "ci", "model": "chat", **sums}]
    port = free_ports(1)[0]
    async with (
        usage_api(json.dumps({"data": rows}).encode()) as (api, _),
        on_screen(page, demo_gateway().served(port, ConsoleWorkerInfo(("127.0.0.1", port), usage_api=api))) as url,
    ):
        await opened(page, url)
        await page.run("document.getElementById('tab-usage').click()")
        await wait_until(page, "document.querySelector('#usage-model tbody tr') !== null")
        for name in ("tenant", "key", "model"):
            assert await compare(page, f"usage-{name}", rows) == 6
        cost = await page.run("document.querySelector('#usage-tenant [data-field=cost]').textContent")
        assert cost == "1.23 USD"
        chart = await page.run("document.querySelector('#chart svg').getAttribute('aria-label')")
        assert "1234" in chart
    assert page.complaints == []


async def test_objectives_and_keys_are_those_of_their_apis(page: Page) -> None:
    gateway = demo_gateway()
    async with on_screen(page, gateway.served(free_ports(1)[0])) as url:
        await opened(page, url, "objectives")
        answer = await answer_of(f"{url}/objectives")
        assert len(answer["objectives"]) == 2
        assert sum(one["requests"] for one in answer["objectives"]) > 20
        assert await compare(page, "objectives", answer["objectives"]) == 2 * 12
        assert answer["worst"]
        assert await compare(page, "worst", answer["worst"]) == len(answer["worst"]) * 7
        await page.run("document.getElementById('tab-keys').click()")
        await wait_until(page, "document.querySelector('#keys tbody tr') !== null")
        keys = (await answer_of(f"{url}/keys"))["keys"]
        assert await compare(page, "keys", keys) == 3 * 6
        ends = await page.run("[...document.querySelectorAll('#keys [data-field=ends]')].map((one) => one.textContent)")
        assert ends == [duration(keys[0]["endsInS"]), "\N{EN DASH}", "has ended"]
        # a filter holds for them, too
        await page.run("""(() => {
            const find = document.getElementById("find");
            find.value = "support"; find.dispatchEvent(new Event("input"));
        })()""")
        await wait_until(page, "document.querySelectorAll('#keys tbody tr').length === 1")
    assert page.complaints == []


async def test_scaling_decisions_are_those_of_the_manager(page: Page) -> None:
    targets = [
        {"name": HOSTILE, "current": 2, "desired": 5, "ready": 1, "starting": 1, "reason": "the queue grows"},
        {"name": "small", "current": None, "desired": 0, "ready": 0, "starting": 0, "reason": ""},
    ]
    binding = {"binding": "default/llama", "at": 1_800_000_000.0, "mode": "Stable", "targets": targets}
    rows = [{**one, "binding": "default/llama", "at": binding["at"], "mode": "Stable"} for one in targets]
    port = free_ports(1)[0]
    async with (
        usage_api(json.dumps({"bindings": [binding]}).encode(), path="/decisions") as (api, _),
        on_screen(page, demo_gateway().served(port, ConsoleWorkerInfo(("127.0.0.1", port), manager=api))) as url,
    ):
        await opened(page, url)
        await page.run("document.getElementById('tab-scaling').click()")
        await wait_until(page, "document.querySelector('#decisions tbody tr') !== null")
        assert await compare(page, "decisions", rows) == 2 * 9
        assert await page.run("document.querySelectorAll('img').length + Number('wasRun' in window)") == 0
    assert page.complaints == []
    # a manager that does not lead answers no JSON
    async with (
        usage_api(b"this replica does not lead", "text/plain", path="/decisions") as (api, _),
        on_screen(page, demo_gateway().served(port, ConsoleWorkerInfo(("127.0.0.1", port), manager=api))) as url,
    ):
        await opened(page, url)
        await page.run("document.getElementById('tab-scaling').click()")
        await wait_until(page, "!document.getElementById('scaling-problem').hidden")
        text = await page.run("document.getElementById('scaling-problem').textContent")
    assert text == "the manager answered 200 and no JSON."


def rollouts_of_manager() -> dict[str, Any]:
    """What a manager answers of statuses with hostile texts."""
    conditions = [
        {"type": "Degraded", "status": "True", "reason": "RuntimeUnhealthy", "message": "pod x: exit 1"},
        {"type": "Progressing", "status": "True", "reason": "InProgress", "message": HOSTILE},
    ]
    since = "2026-11-29T01:00:00Z"
    infer = {
        "metadata": {
            "namespace": "team",
            "name": "llama-canary",
            "labels": {"attache.dev/backend": "canary"},
            "ownerReferences": [{"kind": "Model", "name": "llama", "controller": True}],
        },
        "spec": {"replicas": 4},
        "status": {
            "currentRevision": "a1",
            "updateRevision": "b2",
            "updatedReplicas": 1,
            "readyReplicas": 3,
            "conditions": [{**one, "lastTransitionTime": since} for one in conditions],
        },
    }
    new = {"metadata": {"namespace": "team", "name": "n" * 253}, "spec": {}}
    model = {
        "metadata": {"namespace": "team", "name": "llama"},
        "spec": {},
        "status": {
            "phase": "Loaded",
            "transitionStatus": "InProgress",
            "phaseSince": since,
            "replicas": 8,
            "readyReplicas": 7,
            "failure": {"reason": HOSTILE, "message": "no such file"},
            "backends": [{"name": "stable", "weight": 90}, {"name": "canary", "weight": 10}],
        },
    }
    found: dict[str, Any] = to_builtins(rollouts_page(([model, new], [infer, new])))
    return found


async def test_rollouts_are_those_of_the_manager(page: Page) -> None:
    answer, port = rollouts_of_manager(), free_ports(1)[0]
    async with (
        usage_api(json.dumps(answer).encode(), path="/rollouts") as (api, asked),
        on_screen(page, demo_gateway().served(port, ConsoleWorkerInfo(("127.0.0.1", port), manager=api))) as url,
    ):
        await opened(page, url)
        await page.run("document.getElementById('tab-rollouts').click()")
        await wait_until(page, "document.querySelector('#rollouts tbody tr') !== null")
        assert await compare(page, "rollouts", answer["rollouts"]) == 2 * 12
        assert await compare(page, "models-phases", answer["models"]) == 2 * 7
        share = await page.run("document.querySelector('#rollouts [data-field=share]').textContent")
        assert share == "10.0%"
        assert await page.run("document.querySelectorAll('img').length + Number('wasRun' in window)") == 0
        for dark in (False, True):
            await page.resize(360, 740, dark=dark)
            assert await page.run("document.documentElement.scrollWidth") == 360
            assert await page.run(_TOO_WIDE) == []
        await page.run("""(() => {
            const find = document.getElementById("find");
            find.value = "a&b"; find.dispatchEvent(new Event("input"));
        })()""")
        fetched = "performance.getEntriesByType('resource').map((one) => one.name)"
        await wait_until(page, f"{fetched}.some((one) => one.endsWith('/rollouts?find=a%26b'))")
    assert asked == ["/rollouts?find=", "/rollouts?find=a%26b"]
    assert page.complaints == []


async def test_the_page_stays_live_while_the_manager_hangs(page: Page) -> None:
    gateway, port = demo_gateway(), free_ports(1)[0]
    async with (
        hanging_manager() as api,
        on_screen(page, gateway.served(port, ConsoleWorkerInfo(("127.0.0.1", port), manager=api))) as url,
    ):
        await opened(page, url)
        await page.run("document.getElementById('tab-rollouts').click()")
        # the clock of the process moves, and the page with it, before the manager's 5 s are over
        began = asyncio.get_running_loop().time()
        for _ in range(2):
            before = await page.run("document.getElementById('live').textContent")
            gateway.now += 60
            await wait_until(page, f"document.getElementById('live').textContent !== {json.dumps(before)}")
        hung = await page.run("document.getElementById('rollouts-problem').hidden")
        took_s = asyncio.get_running_loop().time() - began
        await wait_until(page, "!document.getElementById('rollouts-problem').hidden")
        text = await page.run("document.getElementById('rollouts-problem').textContent")
        assert await page.run("document.getElementById('away').hidden")
    assert hung, took_s
    assert text.startswith("No answer of the manager: ")


async def test_with_a_token_the_browser_shows_everything_after_its_login_and_nothing_before(
    page: Page, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("a-token-of-the-operator\n")
    port = free_ports(1)[0]
    async with on_screen(page, demo_gateway().served(port, guard=token_auth_middleware(file))) as url:
        await page.show("about:blank")
        page.complaints.clear()
        await page.show(url)
        await wait_until(page, "location.href !== 'about:blank' && document.readyState === 'complete'")
        shown_before = await page.run("document.documentElement.innerHTML")
        logged_in = url.replace("//", "//ann:a-token-of-the-operator@")
        await opened(page, logged_in, "requests")
        assert await page.run("document.getElementById('away').hidden")
        await page.run("""(() => {
            document.getElementById("tab-explain").click();
            const messages = [{"role": "user", "content": "hi"}];
            document.getElementById("body").value = JSON.stringify({"model": "large", messages});
            document.getElementById("explain").requestSubmit();
        })()""")
        await wait_until(page, "!document.getElementById('explained').hidden")
        text = await page.run("document.getElementById('explained-text').textContent")
    # the browser would ask for the password
    assert "panel-engines" not in shown_before
    assert text.startswith("default/qwen: 10.0.2.")
    assert page.complaints == []


async def test_the_page_fits_a_phone_in_every_tab(page: Page) -> None:
    names = ("<b>" + "long" * 31, "o'\"&")
    async with on_screen(page, demo_gateway(tenants=names).served(free_ports(1)[0])) as url:
        for tab in ("engines", "tenants", "models", "requests", "objectives", "keys", "config"):
            for dark in (False, True):
                await opened(page, url, tab, width=360, height=740, dark=dark)
                assert (await page.run("document.documentElement.scrollWidth"), await page.run(_TOO_WIDE)) == (
                    360,
                    [],
                ), tab
        light, night = [
            await page.run("getComputedStyle(document.body).backgroundColor")
            for dark in (False, True)
            if not await page.resize(360, 740, dark=dark)
        ]
    assert (light, night) == ("rgb(246, 247, 249)", "rgb(16, 20, 24)")


async def test_a_pasted_request_is_explained(page: Page) -> None:
    async with on_screen(page, demo_gateway().served(free_ports(1)[0])) as url:
        await opened(page, url)
        await wait_until(page, "!document.getElementById('tab-explain').hidden")
        await page.run("""(() => {
            document.getElementById("tab-explain").click();
            const messages = [{"role": "user", "content": "hi"}];
            document.getElementById("body").value = JSON.stringify({"model": "large", messages});
            document.getElementById("explain").requestSubmit();
        })()""")
        await wait_until(page, "!document.getElementById('explained').hidden")
        text = await page.run("document.getElementById('explained-text').textContent")
        assert text.startswith("default/qwen: 10.0.2.")
        rows = await page.run("document.querySelectorAll('#candidates tbody tr').length")
        assert 0 < rows <= 4
    assert page.complaints == []

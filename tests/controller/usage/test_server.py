# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import threading
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given
from hypothesis import strategies as st

from controller.bundle.envoy.authentication import usage_reports_header
from controller.usage.ingest import IngestCounters
from controller.usage.log_follower import LogPosition
from controller.usage.queries import BadQuery, UsageReport, parse_query, run_query
from controller.usage.reports import as_csv, as_json, as_table, completions_page, costs_page
from controller.usage.rows import parse_usage_line
from controller.usage.server import UsageQueryRunner, UsageReportsApi, ingest_monitoring_pages
from controller.usage.store import SqlStore, open_engine
from extproc.api.usage_log import OTHERS
from extproc.wire_names import CALLER_CLIENT, CALLER_REPORTS, CALLER_TENANT, CALLER_USER
from tests.usage_lines import NOON_S, PRICE, context, line, text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
    from pathlib import Path

    from aiohttp import ClientResponse

    from controller.usage.queries import Query

DAY_S = 86_400
DAY = {"start": "2026-11-23", "end": "2026-11-24"}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    """Two keys of team-a, one of team-b; on two days."""
    made = SqlStore(open_engine(f"sqlite:///{tmp_path}/usage.db"), "log")
    made.prepare()
    callers = [("team-a", "key-1"), ("team-a", "key-1"), ("team-a", "key-2"), ("=team-b()", "key-3")]
    rows = [
        parse_usage_line(
            text(line(f"{day}/{index}", of=context(tenant=tenant, api_key=key), at=NOON_S - day * DAY_S)), NOON_S
        )
        for day in range(2)
        for index, (tenant, key) in enumerate(callers)
    ]
    made.write(rows, LogPosition(), LogPosition(1, 1, "x"))
    yield made
    made.close()


@asynccontextmanager
async def serving(
    store: SqlStore | None, *, is_admin: bool = True, admins: tuple[str, ...] = (), counts: IngestCounters | None = None
) -> AsyncIterator[Any]:
    engine = None if store is None else store.engine
    database = UsageQueryRunner(engine, lambda: 0.0, lambda: NOON_S + 3_600.0)
    counts = counts or IngestCounters()
    reports = UsageReportsApi(database, counts=counts, is_admin_port=is_admin, admin_tenants=admins)
    async with TestClient(TestServer(reports.app())) as client:
        yield client


async def data_of(
    client: TestClient[Any, Any], headers: dict[str, str] | None = None, **parameters: str
) -> list[dict[str, Any]]:
    answer = await client.get("/v1/usage", params={**DAY, **parameters}, headers=headers or {})
    assert answer.status == 200, await answer.text()
    assert answer.headers["cache-control"] == "private, no-store"
    return (await answer.json())["data"]


async def test_an_administrator_sees_all(store: SqlStore) -> None:
    async with serving(store) as client:
        found = await data_of(client, group_by="tenant,key")
    assert [(one["tenant"], one["key"], one["requests"], one["cost_micros"]) for one in found] == [
        ("=team-b()", "key-3", 1, {"USD": 104}),
        ("team-a", "key-1", 2, {"USD": 208}),
        ("team-a", "key-2", 1, {"USD": 104}),
    ]


async def test_a_page_says_until_when_all_that_ended_is_in_it(store: SqlStore) -> None:
    store.write([], LogPosition(1, 1, "x"), LogPosition(1, 2, "x"), NOON_S - 60.0)
    counts = IngestCounters()
    async with serving(store, counts=counts) as client:
        unknown = await (await client.get("/v1/usage", params=DAY)).json()
        counts.kept_until_s = NOON_S + 0.5
        known = await (await client.get("/v1/usage", params=DAY)).json()
    assert unknown["until_s"] is None
    # Envoy may hold lines for a second, and those of extproc are read two seconds later
    assert known["until_s"] == NOON_S - 3.5
    assert known["sources"] == [{"source": "log", "until_s": NOON_S - 60.0}]
    async with serving(store, is_admin=False, counts=counts) as client:
        own = await (await client.get("/v1/usage", params=DAY, headers={CALLER_TENANT: "team-a"})).json()
    assert own["until_s"] == NOON_S - 3.5
    assert "sources" not in own


async def test_callers_see_their_own_rows_whatever_they_ask_for(store: SqlStore) -> None:
    own = {CALLER_CLIENT: "key-1"}
    async with serving(store, is_admin=False, admins=("=team-b()",)) as client:
        for asked in ({}, {"tenant": "team-a"}, {"key": "key-1"}):
            assert [one["requests"] for one in await data_of(client, own, **asked)] == [2]
            assert [one["requests"] for one in await data_of(client, {**own, CALLER_TENANT: "team-a"}, **asked)] == [2]
        for asked in ({"tenant": "=team-b()"}, {"key": "key-2"}, {"key": "'"}):
            assert await data_of(client, own, **asked) == []
        # the name of a key that was another tenant's
        assert await data_of(client, {CALLER_CLIENT: "key-3", CALLER_TENANT: "team-a"}) == []
        assert [one["requests"] for one in await data_of(client, {CALLER_TENANT: "=team-b()"})] == [4]
        # of OpenAI's pages, too
        start = {"start_time": str(NOON_S - DAY_S // 2), "project_ids": "=team-b()"}
        page = await (await client.get("/v1/organization/costs", params=start, headers=own)).json()
        assert [one["results"] for one in page["data"]] == [[]]


async def test_a_key_that_reads_its_tenants_usage_reads_no_other_tenants(store: SqlStore) -> None:
    """Whatever it asks for, and also where its tenant's name is that of an administrator."""
    own, path = {CALLER_CLIENT: "key-2", CALLER_REPORTS: "team-a"}, "/v1/organization/usage/completions"
    start = {"start_time": str(NOON_S - DAY_S // 2), "limit": "1"}
    async with serving(store, is_admin=False, admins=("team-a",)) as client:
        found = await data_of(client, own, group_by="tenant,key")
        assert [(one["tenant"], one["key"], one["requests"]) for one in found] == [
            ("team-a", "key-1", 2),
            ("team-a", "key-2", 1),
        ]
        assert [one["requests"] for one in await data_of(client, own, key="key-1")] == [2]
        for asked in ({"tenant": "=team-b()"}, {"key": "key-3"}, {"tenant": ""}):
            assert await data_of(client, own, **asked) == []
        for asked, expected in (({}, [3]), ({"project_ids": "team-a"}, [3]), ({"project_ids": "=team-b()"}, [])):
            page = await (await client.get(path, params={**start, **asked}, headers=own)).json()
            assert [one["num_model_requests"] for one in page["data"][0]["results"]] == expected


LONG = "a" * 200


@pytest.mark.parametrize("tenant", [" team-a", "team%2Da", "m\xfcller", OTHERS, LONG])
async def test_a_tenant_of_any_name_has_its_own_rows_read(store: SqlStore, tenant: str) -> None:
    store.write(
        [parse_usage_line(text(line("x", of=context(tenant=tenant, api_key="key-x"))), NOON_S)],
        LogPosition(1, 1, "x"),
        LogPosition(1, 2, "x"),
    )
    async with serving(store, is_admin=False) as client:
        found = await data_of(
            client, {CALLER_CLIENT: "lead", CALLER_REPORTS: usage_reports_header(tenant)}, group_by="key"
        )
        assert [(one["key"], one["requests"]) for one in found] == [("key-x", 1)]


async def test_a_token_sees_the_rows_of_its_tenant_and_user_alone(store: SqlStore) -> None:
    """Also where it names no tenant or no user, and whatever its names are."""
    callers = [("team-a", "bob"), ("team-a", ""), ("", "bob"), ("team-a", LONG), (OTHERS, OTHERS), ("team-a", OTHERS)]
    lines = [line(str(index), of=context(tenant=one, user=user)) for index, (one, user) in enumerate(callers)]
    # another caller beyond the bound, of whom no more is known
    folded = context(tenant="team-a", user="folded")
    rows = [parse_usage_line(text(one), NOON_S) for one in [*lines, line("folded", of=folded)]]
    store.write(rows[:-1], LogPosition(1, 1, "x"), LogPosition(1, 2, "x"))
    bounded = SqlStore(store.engine, "log", most_names=1)
    bounded.write(rows[-1:], LogPosition(1, 2, "x"), LogPosition(1, 3, "x"))
    async with serving(store, is_admin=False) as client:
        for tenant, user in callers:
            headers = {name: value for name, value in ((CALLER_TENANT, tenant), (CALLER_USER, user)) if value}
            assert [one["requests"] for one in await data_of(client, headers)] == [1], (tenant, user)
    async with serving(store) as client:
        found = await data_of(client, group_by="tenant,user")
    counts = {(one["tenant"], one["user"]): one["requests"] for one in found}
    assert counts["team-a", OTHERS] == 1
    assert counts["team-a", f"({OTHERS}"] == 1
    assert counts["anonymous", "bob"] == 1


async def test_names_that_are_no_utf8_are_names(store: SqlStore) -> None:
    one = line("x", of=context(tenant="m\xfcller", user=""))
    store.write([parse_usage_line(text(one), NOON_S)], LogPosition(1, 1, "x"), LogPosition(1, 2, "x"))
    async with serving(store, is_admin=False) as client:
        for name in (b"m\xfcller", b"m\xc3\xbcller"):
            reader, writer = await asyncio.open_connection(client.host, client.port)
            head = b"GET /v1/usage?start=2026-11-23&end=2026-11-24 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            writer.write(head + CALLER_TENANT.encode() + b": " + name + b"\r\n\r\n")
            answer = await reader.read()
            writer.close()
            await writer.wait_closed()
            assert b'"requests":1,' in answer, answer


async def test_a_caller_whom_nobody_has_identified_sees_nothing(store: SqlStore) -> None:
    async with serving(store, is_admin=False) as client:
        answer = await client.get("/v1/usage", headers={"x-attache-tenant": "team-a"})
        assert answer.status == 403
        assert (await answer.json())["error"]["code"] == "unknown_caller"


async def test_without_a_database_there_are_no_reports() -> None:
    async with serving(None) as client:
        assert (await client.get("/v1/usage")).status == 501


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"start": "yesterday"}, "start"),
        ({"start": "9" * 30}, "start"),
        ({"end": "2026-11-22"}, "end"),
        ({"start": "1990-01-01"}, "start"),
        ({"group_by": "tenant,colour"}, "group_by"),
        ({"group_by": "day,hour"}, "group_by"),
        ({"group_by": "minute", "start": "2026-11-01"}, "start"),
        ({"tz": "Mars/Olympus"}, "tz"),
        ({"tz": "../../etc/passwd"}, "tz"),
        ({"limit": "0"}, "limit"),
        ({"limit": "1e9"}, "limit"),
        ({"page": "-1"}, "page"),
        ({"format": "xml"}, "format"),
        ({"tenant": "x" * 1_000}, "tenant"),
        ({"start": "0001-01-01T00:00:00+00:00", "end": "0001-02-01T00:00:00+00:00", "tz": "America/New_York"}, "start"),
        ({"start": "9999-12-31", "tz": "Asia/Tokyo"}, "start"),
        ({"limit": "\xb2"}, "limit"),
        ({"page": "\u0661"}, "page"),
    ],
)
async def test_a_parameter_that_cannot_be_used_is_named(
    store: SqlStore, parameters: dict[str, str], named: str
) -> None:
    async with serving(store) as client:
        answer = await client.get("/v1/usage", params={**DAY, **parameters})
        assert answer.status == 400
        error = (await answer.json())["error"]
    assert error["param"] == named
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{named}: ")


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Reports do not end before this, unless they are grouped by route."""
    event, real = threading.Event(), UsageQueryRunner.run

    def slow(self: UsageQueryRunner, query: Query) -> UsageReport:
        assert query.groups == ("route",) or event.wait(60)
        return real(self, query)

    monkeypatch.setattr(UsageQueryRunner, "run", slow)
    return event


async def test_too_many_reports_at_once_are_refused_until_some_end(store: SqlStore, go_on: threading.Event) -> None:
    """Of one caller at most two run or wait; those of administrators' own listener wait for nobody else."""
    asked: list[asyncio.Task[ClientResponse]] = []
    async with serving(store, is_admin=False) as client, serving(store) as admin:
        try:
            # 2 of each of 8 callers fill all places: 3 * 10 - 16 are refused
            names = [name for name in "abcdefghij" for _ in range(3)]
            asked = ask(client, [{CALLER_CLIENT: name} for name in names])
            refused = await refusals(asked, 3 * 10 - 16)
            assert {one.headers["retry-after"] for one in refused} == {"1"}
            assert max(Counter(name for name, one in zip(names, asked, strict=True) if not one.done()).values()) == 2
            assert len(await data_of(admin, group_by="route")) == 1
        finally:
            go_on.set()
            statuses = Counter(one.status for one in await asyncio.gather(*asked))
        assert statuses == {200: 16, 429: 14}


async def test_one_tenants_users_and_keys_leave_places_for_others(store: SqlStore, go_on: threading.Event) -> None:
    """4 of 16 places are a tenant's; callers of whom no tenant is known are no tenant together."""
    users = [{CALLER_TENANT: "team-a", CALLER_USER: name} for name in "abcd"]
    keys = [{CALLER_TENANT: "team-a", CALLER_CLIENT: name} for name in "abcdefgh"]
    users += [{CALLER_REPORTS: "team-a", CALLER_CLIENT: name} for name in "ijkl"]
    alone = [{CALLER_TENANT: "team-b"}, {CALLER_CLIENT: "a"}, *({CALLER_USER: str(number)} for number in range(13))]
    of_tenant: list[asyncio.Task[ClientResponse]] = []
    others: list[asyncio.Task[ClientResponse]] = []
    async with serving(store, is_admin=False) as client:
        try:
            of_tenant = ask(client, users + keys)
            await refusals(of_tenant, 16 - 4)
            others = ask(client, alone)
            await refusals(others, 15 - 12)
        finally:
            go_on.set()
            found = [Counter([(await one).status for one in asked]) for asked in (of_tenant, others)]
        assert found == [{200: 4, 429: 12}, {200: 12, 429: 3}]


def ask(client: TestClient[Any, Any], callers: Sequence[Mapping[str, str]]) -> list[asyncio.Task[ClientResponse]]:
    """A report for each of them."""

    async def answer(caller: Mapping[str, str]) -> ClientResponse:
        return await client.get("/v1/usage", params=DAY, headers=caller)

    return [asyncio.create_task(answer(one)) for one in callers]


async def refusals(asked: Sequence[asyncio.Task[ClientResponse]], most: int) -> list[ClientResponse]:
    """The first answers, as soon as there are ``most``: all say 429."""
    async with asyncio.timeout(45):
        while sum(one.done() for one in asked) < most:
            await asyncio.wait([one for one in asked if not one.done()], return_when=asyncio.FIRST_COMPLETED)
    found = [one.result() for one in asked if one.done()]
    assert {one.status for one in found} == {429}
    return found


def report_of(store: SqlStore, **parameters: str) -> UsageReport:
    with store.engine.connect() as connection:
        return run_query(
            connection, parse_query({name: [value] for name, value in {**DAY, **parameters}.items()}, NOON_S)
        )


def test_csv_has_a_column_for_each_currency_and_no_formulas(store: SqlStore) -> None:
    euros = context(tenant="team-c", price=PRICE.__class__("p2", "EUR", PRICE.rates))
    store.write([parse_usage_line(text(line("c", of=euros)), NOON_S)], LogPosition(1, 1, "x"), LogPosition(1, 2, "x"))
    header, *rows = csv.reader(io.StringIO(as_csv(report_of(store, group_by="day,tenant"))))
    assert header[:4] == ["start", "end", "tenant", "requests"]
    assert header[-2:] == ["cost_micros_EUR", "cost_micros_USD"]
    assert [(row[2], row[3], *row[-2:]) for row in rows] == [
        ("'=team-b()", "1", "0", "104"),
        ("team-a", "3", "0", "312"),
        ("team-c", "1", "104", "0"),
    ]
    assert rows[0][:2] == ["2026-11-23T00:00:00+00:00", "2026-11-24T00:00:00+00:00"]


def test_a_table_has_money_with_a_point_and_no_empty_columns(store: SqlStore) -> None:
    lines = as_table(report_of(store, group_by="tenant")).splitlines()
    assert lines[0].split() == ["tenant", "requests", "input", "cached", "output", "duration_us", "USD"]
    assert lines[2].split() == ["team-a", "3", "300", "120", "60", "4500000", "0.000312"]


def test_without_times_a_report_is_of_today_in_the_zone() -> None:
    query = parse_query({"tz": ["Europe/Berlin"]}, NOON_S)
    assert (query.start, query.end) == (NOON_S - 13 * 3_600, NOON_S + 11 * 3_600)
    with pytest.raises(BadQuery):
        parse_query({"start": ["2026-11-25"]}, NOON_S)
    with pytest.raises(BadQuery, match="groupby: is unknown; write some of start, end, group_by"):
        parse_query({"groupby": ["day"]}, NOON_S)


async def test_openais_pages_have_all_buckets_and_go_on(store: SqlStore) -> None:
    start = NOON_S - 3 * DAY_S
    path = "/v1/organization/usage/completions"
    async with serving(store) as client:
        parameters = {"start_time": str(start), "limit": "3", "group_by": "project_id"}
        page = await (await client.get(path, params=parameters)).json()
        rest = await (await client.get(path, params={**parameters, "page": page["next_page"]})).json()
        hours = {"start_time": str(NOON_S), "bucket_width": "1h", "models[]": "llama"}
        by_hour = await (await client.get(path, params=hours)).json()
        refused = [
            await client.get(path, params=one)
            for one in ({}, {"start_time": "1", "bucket_width": "1w"}, {"start_time": "1", "page": "x"})
        ]
    buckets = [*page["data"], *rest["data"]]
    midnight = NOON_S - 12 * 3_600
    assert [one["start_time"] for one in buckets] == [midnight - DAY_S * days for days in (3, 2, 1, 0)]
    assert [len(one["results"]) for one in buckets] == [0, 0, 2, 2]
    assert (page["has_more"], rest["has_more"], rest["next_page"]) == (True, False, None)
    result = buckets[3]["results"][1]
    assert (result["project_id"], result["input_tokens"], result["num_model_requests"]) == ("team-a", 300, 3)
    assert (result["input_cached_tokens"], result["model"]) == (120, None)
    assert [one["results"][0]["num_model_requests"] for one in by_hour["data"] if one["results"]] == [4]
    assert [one.status for one in refused] == [400, 400, 400]


_ODD = st.sampled_from(
    [
        "page_\xb2",
        "page_99999999999",
        "page_99999999999999",
        "9999-12-31",
        "0001-01-01",
        "\xb2",
        "\u0661",
        "1e99",
        "-1",
        "0",
    ]
)


@given(
    names=st.dictionaries(
        st.sampled_from(
            ["start", "end", "tz", "group_by", "limit", "page", "tenant", "start_time", "end_time", "bucket_width"]
        ),
        st.lists(_ODD | st.text(max_size=20) | st.datetimes().map(str) | st.integers(0, 10**12).map(str), max_size=2),
    )
)
def test_whatever_is_asked_for_is_a_query_or_a_parameter_that_is_named(names: dict[str, list[str]]) -> None:
    def nothing(query: Query) -> UsageReport:
        return UsageReport(query, "requests", (), (), None)

    for make in (
        lambda: as_json(nothing(parse_query(names, NOON_S))),
        lambda: completions_page({"start_time": [str(NOON_S)], **names}, {}, NOON_S, nothing),
        lambda: costs_page({"start_time": [str(NOON_S)], **names}, {}, NOON_S, nothing),
    ):
        with contextlib.suppress(BadQuery):
            make()


async def test_openais_costs_are_amounts(store: SqlStore) -> None:
    async with serving(store) as client:
        parameters = [("start_time", str(NOON_S)), ("group_by", "project_id"), ("group_by", "line_item")]
        page = await (await client.get("/v1/organization/costs", params=parameters)).json()
    (bucket,) = page["data"]
    assert bucket["results"][1] == {
        "object": "organization.costs.result",
        "amount": {"value": 0.000312, "currency": "usd"},
        "project_id": "team-a",
        "line_item": "llama",
    }


async def test_readiness_says_why_rows_are_not_kept() -> None:
    counts = IngestCounters()
    async with TestClient(TestServer(ingest_monitoring_pages(counts, lambda: NOON_S))) as client:
        assert await (await client.get("/readyz")).text() == "the store is not open yet"
        counts.error = ""
        assert (await client.get("/readyz")).status == 200
        counts.error = "the disk is full"
        answer = await client.get("/readyz")
        assert (answer.status, await answer.text()) == (503, "the disk is full")
        assert "attache_usage_failing 1.0" in await (await client.get("/metrics")).text()

# SPDX-License-Identifier: Apache-2.0
"""One suite for both databases."""

from __future__ import annotations

import random
import threading
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import msgspec
import pytest
import sqlalchemy as sa

from controller.commands.usage import main
from controller.usage.log_follower import LogPosition
from controller.usage.queries import BadQuery, Query, parse_query, run_query
from controller.usage.rollups import SUMS, row_sums
from controller.usage.rows import UsageRow, parse_usage_line
from controller.usage.store import SCHEMA, SqlStore, StoreError, next_retention_horizon, open_engine, requests
from controller.usage.traffic_drift import ComparedPeriods, find_drift
from extproc.api.usage_log import OTHERS, UNROUTED
from tests.usage_lines import NOON_S, context, line, text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from controller.usage.queries import UsageReport

HOUR = 3_600


@pytest.fixture
def store(store_url: str) -> Iterator[SqlStore]:
    made = SqlStore(open_engine(store_url), "log")
    made.prepare()
    yield made
    made.close()


def row(name: str, *, at: float = NOON_S, **changes: object) -> UsageRow:
    return parse_usage_line(text(line(name, of=context(**changes), at=at)), at + 10)


def at(offset: int) -> LogPosition:
    return LogPosition(7, offset, "head")


def report(store: SqlStore, **changes: object) -> UsageReport:
    query = Query(**{"start": NOON_S - 12 * HOUR, "end": NOON_S + 12 * HOUR, **changes})
    with store.engine.connect() as connection:
        return run_query(connection, query)


def requests_of(found: UsageReport) -> list[tuple[dict[str, str], int]]:
    return [(dict(one.names), one.sums["requests"]) for one in found.rows]


def test_rows_sums_and_position_are_kept_together(store: SqlStore) -> None:
    assert store.read_position() == LogPosition()
    rows = [row("a"), row("b", tenant="team-b"), row("c", refused="rate_limit_exceeded")]
    assert len(store.write(rows, LogPosition(), at(300))) == 3
    assert store.read_position() == at(300)
    found = report(store, groups=("tenant",))
    assert requests_of(found) == [({"tenant": "team-a"}, 2), ({"tenant": "team-b"}, 1)]
    assert found.rows[0].costs == {"USD": 104}
    assert (found.rows[0].sums["refused"], found.rows[0].sums["input"]) == (1, 100)


def test_a_row_that_is_kept_is_not_counted_again(store: SqlStore) -> None:
    store.write([row("a"), row("a")], LogPosition(), at(1))
    new = store.write([row("a"), row("b")], at(1), at(2))
    assert [one.id for one in new] == ["b"]
    assert requests_of(report(store)) == [({}, 2)]


def test_new_rows_come_to_the_end_of_their_key(store: SqlStore) -> None:
    """Ids are random: a key that begins with them has each row change another page."""
    assert sa.inspect(store.engine).get_pk_constraint("requests")["constrained_columns"] == ["at_us", "id"]
    store.write([row("b"), row("a")], LogPosition(), at(1))
    new = store.write([row("a"), msgspec.structs.replace(row("a"), at_us=1), row("c")], at(1), at(2))
    assert [(one.at_us, one.id) for one in new] == [(1, "a"), (row("c").at_us, "c")]


def test_a_store_whose_rows_have_their_id_alone_as_the_key_stays_as_it_is(store: SqlStore) -> None:
    columns = (sa.Column(one.name, one.type, primary_key=one.name == "id") for one in requests.columns)
    with store.engine.begin() as connection:
        requests.drop(connection)
        sa.Table(requests.name, sa.MetaData(), *columns).create(connection)
    store.prepare()
    store.write([row("a"), row("a")], LogPosition(), at(1))
    new = store.write([row("a"), row("b")], at(1), at(2))
    assert [one.id for one in new] == ["b"]
    assert requests_of(report(store)) == [({}, 2)]


def test_two_writers_of_one_log_are_refused(store: SqlStore) -> None:
    store.write([row("a")], LogPosition(), at(1))
    with pytest.raises(StoreError, match="--source"):
        store.write([row("b")], at(0), at(2))
    assert store.read_position() == at(1)
    assert requests_of(report(store)) == [({}, 1)]


def test_several_logs_of_one_store_add_up_without_deadlocks(store: SqlStore, store_url: str) -> None:
    """Each writes the same keys in another order of requests."""
    failed: list[BaseException] = []

    def write(number: int) -> None:
        one = SqlStore(open_engine(store_url, timeout_s=60.0), f"log {number}")
        try:
            before = LogPosition()
            for batch in range(10):
                names = [f"{number}/{batch}/{index}" for index in range(20)]
                rows = [row(name, tenant=f"team-{(number * 7 + index) % 20}") for index, name in enumerate(names)]
                after = at(batch + 1)
                one.write(rows, before, after)
                before = after
        except BaseException as error:  # noqa: BLE001 - told below
            failed.append(error)
        finally:
            one.close()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert requests_of(report(store)) == [({}, 800)]


def test_a_failed_transaction_leaves_nothing(store: SqlStore) -> None:
    broken = msgspec.structs.replace(row("b"), tenant=None)  # type: ignore[arg-type] # what a table refuses
    with pytest.raises(Exception, match=r"(?i)null"):
        store.write([row("a"), broken], LogPosition(), at(1))
    assert store.read_position() == LogPosition()
    assert report(store).rows == ()


def test_names_beyond_a_days_bound_are_others_of_their_tenant(store_url: str) -> None:
    store = SqlStore(open_engine(store_url), "log", most_names=3)
    store.prepare()
    store.write([row(f"a{index}", user=f"user-{index}") for index in range(2)], LogPosition(), at(1))
    # another process, which has to learn the names that are kept
    again = SqlStore(open_engine(store_url), "log", most_names=3)
    again.write([row(f"b{index}", user=f"user-{index}") for index in range(10)], at(1), at(2))
    expected = [(OTHERS, 7), ("user-0", 2), ("user-1", 2), ("user-2", 1)]
    assert [(one["user"], count) for one, count in requests_of(report(store, groups=("user",)))] == expected
    # it takes no name of another tenant, whose rows without a user are kept apart, too
    again.write([row("c", tenant="team-b", user="user-9"), row("d", tenant="team-b", user="")], at(2), at(3))
    found = report(store, groups=("tenant", "user"), filters=(("tenant", ("team-b",)),))
    assert [(one["user"], count) for one, count in requests_of(found)] == [("", 1), ("user-9", 1)]
    # nor do tenants beyond the bound
    again.write([row(f"e{index}", tenant=f"team-{index}") for index in range(9)], at(3), at(4))
    assert [one["tenant"] for one, _ in requests_of(report(store, groups=("tenant",)))] == [
        *(OTHERS, "team-0", "team-a", "team-b")
    ]
    # a day has its own
    again.write([row("z", at=NOON_S + 24 * HOUR, user="user-9")], at(4), at(5))
    found = report(store, groups=("user",), start=NOON_S + 12 * HOUR, end=NOON_S + 36 * HOUR)
    assert requests_of(found) == [({"user": "user-9"}, 1)]
    store.close()
    again.close()


def test_models_that_no_route_knows_are_one(store: SqlStore) -> None:
    unknown = [
        parse_usage_line(
            text(line(f"r{index}", of=context(route="", server="", model=f"m{index}", refused="x"), status=404)), NOON_S
        )
        for index in range(5)
    ]
    store.write(unknown, LogPosition(), at(1))
    assert requests_of(report(store, groups=("model",))) == [({"model": UNROUTED}, 5)]


def test_what_is_old_is_deleted_and_the_rest_stays(store: SqlStore) -> None:
    times = [NOON_S - days * 24 * HOUR for days in range(6)]
    store.write([row(f"r{index}", at=time) for index, time in enumerate(times)], LogPosition(), at(1))
    assert store.prune(NOON_S, 2.5 * 24 * HOUR, 4.5 * 24 * HOUR) == NOON_S - 2.5 * 24 * HOUR
    with store.engine.connect() as connection:
        kept = connection.execute(sa.select(requests.c.at_us).order_by(requests.c.at_us)).scalars().all()
    assert kept == [time * 1_000_000 for time in sorted(times)[3:]]
    whole = NOON_S - 132 * HOUR
    assert requests_of(report(store, start=whole, end=NOON_S + 12 * HOUR)) == [({}, 6)]
    # sums of a day go when all of it is too old; what is kept is less by a day at a time
    for _ in range(2):
        store.prune(NOON_S, 24 * HOUR, 24 * HOUR)
    with pytest.raises(BadQuery, match="sums are kept since"):
        report(store, start=whole, end=NOON_S + 12 * HOUR)
    assert requests_of(report(store, start=NOON_S - 84 * HOUR, end=NOON_S + 12 * HOUR)) == [({}, 4)]


def test_a_clock_that_is_ahead_deletes_little(store: SqlStore) -> None:
    day = 24 * HOUR
    store.write([row(f"r{days}", at=NOON_S - days * day) for days in range(10)], LogPosition(), at(1))
    assert store.prune(NOON_S, 10 * day, 10 * day) == NOON_S - 10 * day
    # years ahead, without a row of then
    for _ in range(5):
        assert store.prune(NOON_S + 1_000 * day, 10 * day, 10 * day) == NOON_S - 10 * day
    # with one: a day at a time
    store.write([row("ahead", at=NOON_S + 1_000 * day)], at(1), at(2))
    assert store.prune(NOON_S + 1_000 * day, 10 * day, 10 * day) == NOON_S - 9 * day
    with store.engine.connect() as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(requests)).scalar() == 11
    # and what was learnt from such a clock alone is forgotten
    assert next_retention_horizon(NOON_S + 500 * day, NOON_S - 10 * day, NOON_S) == NOON_S - 10 * day
    # rows that are gone stay gone if more is kept from now on
    assert next_retention_horizon(NOON_S - 10 * day, NOON_S - 90 * day, NOON_S) == NOON_S - 10 * day


def test_a_newer_schema_is_refused_and_an_older_one_is_changed(store: SqlStore) -> None:
    store.write([row("a")], LogPosition(), at(1))
    store.prepare(
        version=SCHEMA + 1, migrations=[()] * (SCHEMA - 1) + [("ALTER TABLE requests ADD COLUMN later BIGINT",)]
    )
    with store.engine.connect() as connection:
        assert connection.execute(sa.text("SELECT later FROM requests")).all() == [(None,)]
    with pytest.raises(StoreError, match="run a newer attache"):
        store.prepare()
    assert store.read_position() == at(1)


def test_a_store_of_the_first_version_gets_the_ids_of_keys(store: SqlStore) -> None:
    old, new = row("old"), row("new", key_id="k-2")
    store.write([old], LogPosition(), at(1))
    with store.engine.begin() as connection:
        for later in ("key_id", "service_class"):
            connection.execute(sa.text(f"ALTER TABLE requests DROP COLUMN {later}"))
        connection.execute(sa.text("UPDATE schema_version SET version = 1"))
    store.prepare()
    # nothing to do the second time
    store.prepare()
    store.write([new], at(1), at(2))
    assert requests_of(report(store, groups=("key_id",))) == [({"key_id": ""}, 1), ({"key_id": "k-2"}, 1)]
    columns = {one["name"]: one for one in sa.inspect(store.engine).get_columns("requests")}
    assert columns.keys() == {one.name for one in requests.columns}
    assert not columns["key_id"]["nullable"]


def test_ids_of_keys_are_in_reports_as_long_as_rows_are_kept(store: SqlStore) -> None:
    store.write([row("a"), row("b", key_id="k-2"), row("c", key_id="k-2", api_key="key-2")], LogPosition(), at(1))
    found = report(store, groups=("key", "key_id"))
    assert requests_of(found) == [
        ({"key": "key-1", "key_id": "k-1"}, 1),
        ({"key": "key-1", "key_id": "k-2"}, 1),
        ({"key": "key-2", "key_id": "k-2"}, 1),
    ]
    assert found.source == requests.name
    assert requests_of(report(store, filters=(("key_id", ("k-2",)),))) == [({}, 2)]
    parameters = {"start": ["2026-09-01"], "end": ["2026-11-24"], "group_by": ["key_id"]}
    with pytest.raises(BadQuery, match="at most 32 days"):
        parse_query(parameters, NOON_S)


def test_classes_are_in_reports_as_long_as_rows_are_kept(store: SqlStore) -> None:
    store.write([row("a"), row("b", service_class="gold"), row("c", service_class="gold")], LogPosition(), at(1))
    found = report(store, groups=("service_class",))
    assert requests_of(found) == [({"service_class": ""}, 1), ({"service_class": "gold"}, 2)]
    assert requests_of(report(store, filters=(("service_class", ("gold",)),))) == [({}, 2)]


def test_what_has_changed_is_found(store: SqlStore) -> None:
    before = [row(f"b{number}", at=NOON_S - 24 * HOUR + number) for number in range(9)]
    late = [row(f"l{number}", at=NOON_S + number) for number in range(9)]
    late = [msgspec.structs.replace(one, input=one.input * 4, ttft_us=None) for one in late]
    store.write([*before, *late, row("r", refused="rate_limit_exceeded")], LogPosition(), at(1))
    periods = ComparedPeriods(NOON_S - 48 * HOUR, NOON_S - HOUR, NOON_S + HOUR)
    with store.engine.connect() as connection:
        found, small = find_drift(connection, periods, ("tenant", "model"), least=9)
        assert find_drift(connection, periods, (), least=10) == ([], 1)
    assert small == 0
    first, *others = found
    assert first.names == {"tenant": "team-a", "model": "llama"}
    assert (first.column, first.requests_before, first.requests, first.verdict) == ("input", 9, 9, "changed")
    # nobody has measured a TTFT of late
    assert {(one.column, one.verdict) for one in others} == {
        (name, "same") for name in ("output", "duration_us", "finish", "ended")
    }


def test_tables_are_made_once_by_processes_that_start_together(store_url: str) -> None:
    failed: list[BaseException] = []

    def prepare() -> None:
        one = SqlStore(open_engine(store_url, timeout_s=60.0), "log")
        try:
            one.prepare()
        except BaseException as error:  # noqa: BLE001 - told below
            failed.append(error)
        finally:
            one.close()

    threads = [threading.Thread(target=prepare) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def instants() -> list[float]:
    """About month ends, a leap day, and clock changes in Berlin, New York and Lord Howe (half an hour)."""
    chosen = random.Random(7)
    days = [datetime(2024, 2, 28, tzinfo=UTC), datetime(2024, 12, 31, tzinfo=UTC), datetime(2026, 10, 24, tzinfo=UTC)]
    days += [datetime(2026, 3, 28, tzinfo=UTC), datetime(2026, 11, 1, tzinfo=UTC), datetime(2026, 10, 3, tzinfo=UTC)]
    return [(day + timedelta(seconds=chosen.uniform(0, 3 * 86_400))).timestamp() for day in days for _ in range(40)]


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def many(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[SqlStore, list[UsageRow]]]:
    """Reports change nothing: one store for all of them."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path_factory.mktemp('many')}/usage.db"
    else:
        url = request.getfixturevalue("postgres").make_database("many")
    store = SqlStore(open_engine(url), "log")
    store.prepare()
    chosen = random.Random(3)
    rows = []
    for index, time in enumerate(instants()):
        price = context().price
        assert price is not None
        changes: dict[str, Any] = {
            "tenant": chosen.choice(["team-a", "team-b", "Ünïcode", "'; DROP TABLE requests; --"]),
            "user": chosen.choice(["alice", "bob", ""]),
            "model": chosen.choice(["llama", "qwen"]),
            "refused": chosen.choice(["", "", "", "quota"]),
            "price": chosen.choice([None, price, msgspec.structs.replace(price, currency="EUR")]),
        }
        ends = chosen.choice([{}, {}, {"status": 500}, {"status": 404}, {"flags": "DC"}])
        rows.append(parse_usage_line(text(line(f"r{index}", of=context(**changes), at=time, **ends)), time + 10))
    store.write(rows, LogPosition(), at(1))
    yield store, rows
    store.close()


ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe"]


@pytest.mark.parametrize("group_by", ["day", "hour,model", "day,tenant,user", "tenant", ""])
def test_a_report_equals_what_raw_rows_give(many: tuple[SqlStore, list[UsageRow]], group_by: str) -> None:
    store, rows = many
    # databases differ in their SQL, and not in their zones
    for zone in ZONES if store.engine.dialect.name == "sqlite" else ZONES[1::3]:
        compare(store, rows, zone, group_by)


def compare(store: SqlStore, rows: list[UsageRow], zone: str, group_by: str) -> None:
    names = [name for name in group_by.split(",") if name not in {"", "day", "hour"}]
    tz = ZoneInfo(zone)
    expected: dict[tuple[str, ...], Counter[str]] = {}
    for one in rows:
        local = datetime.fromtimestamp(one.at_us // 1_000_000, tz)
        if not datetime(2024, 2, 1, tzinfo=tz) <= local < datetime(2026, 11, 30, tzinfo=tz):
            continue
        when = [local.date().isoformat()] if "day" in group_by else []
        if "hour" in group_by:
            when = [local.replace(minute=0, second=0, microsecond=0).isoformat()]
        key = (*when, *(getattr(one, name) for name in sorted(names, key=["tenant", "user", "model"].index)))
        found = expected.setdefault(key, Counter())
        found.update(dict(zip(SUMS, row_sums(one), strict=True)))
        found.subtract({"cost_micros": one.cost_micros or 0})
        found.update({one.currency: one.cost_micros or 0})
    parameters = {"start": ["2024-02-01"], "end": ["2026-11-30"], "tz": [zone], "group_by": [group_by], "limit": ["7"]}
    seen: dict[tuple[str, ...], Counter[str]] = {}
    page: str | None = "0"
    while page is not None:
        query = parse_query({**parameters, "page": [page]}, NOON_S + 30 * 86_400)
        with store.engine.connect() as connection:
            part = run_query(connection, query)
        for got in part.rows:
            when = []
            if query.width is not None:
                start = datetime.fromtimestamp(got.start, tz)
                when = [start.date().isoformat() if query.width == "day" else start.isoformat()]
                assert (start.minute, start.second) == (0, 0)
            key = (*when, *got.names.values())
            assert key not in seen
            seen[key] = Counter({**got.sums, **got.costs})
        page = None if part.next_offset is None else str(part.next_offset)
    assert {key: +value for key, value in seen.items()} == {key: +value for key, value in expected.items()}


def test_days_have_as_many_hours_as_clocks_give_them(many: tuple[SqlStore, list[UsageRow]]) -> None:
    store, _ = many
    parameters = {"start": ["2026-10-24"], "end": ["2026-10-27"], "tz": ["Europe/Berlin"], "group_by": ["day"]}
    with store.engine.connect() as connection:
        found = run_query(connection, parse_query(parameters, NOON_S))
    assert found.source == "rollups_hour"
    assert [(one.end - one.start) // HOUR for one in found.rows] == [24, 25, 24]


def test_windows_of_half_hour_zones_are_sums_of_hours_with_rows_at_both_ends(store: SqlStore) -> None:
    """As budgets ask for them: an open month in Kolkata, until now."""
    begin = round(datetime(2026, 11, 1, tzinfo=ZoneInfo("Asia/Kolkata")).timestamp())
    now = NOON_S + 1_234
    times = {
        "before": begin - 1, "first": begin, "edge": begin + 1_799, "hour": begin + 1_800, "middle": NOON_S - 86_400.5,
        "last": now - now % HOUR - 1, "tail": now - now % HOUR, "now": now - 1, "after": now,
    }  # fmt: skip
    store.write([row(name, at=one, tenant=f"team-{len(name)}") for name, one in times.items()], LogPosition(), at(1))
    inside = [name for name in times if name not in {"before", "after"}]
    found = report(store, start=begin, end=now, groups=("tenant",))
    assert found.source == "requests+rollups_hour"
    expected = sorted(Counter(f"team-{len(name)}" for name in inside).items())
    assert requests_of(found) == [({"tenant": tenant}, count) for tenant, count in expected]
    assert sum(one.costs["USD"] for one in found.rows) == 104 * len(inside)
    (total,) = report(store, start=begin, end=now).rows
    assert (total.sums["requests"], total.costs) == (len(inside), {"USD": 104 * len(inside)})
    # rows between are not read
    with store.engine.begin() as connection:
        connection.execute(requests.delete().where(requests.c.id.in_(["hour", "middle", "last"])))
    assert report(store, start=begin, end=now, groups=("tenant",)) == found
    page = [report(store, start=begin, end=now, groups=("tenant",), limit=1, offset=one) for one in range(2)]
    assert [one.rows[0] for one in page] == list(found.rows[:2])
    assert requests_of(report(store, start=NOON_S - 7 * HOUR + 1, end=NOON_S - 6 * HOUR - 1)) == []


def test_a_report_that_needs_rows_which_are_gone_says_what_to_ask(store: SqlStore) -> None:
    store.write([row("a")], LogPosition(), at(1))
    store.prune(NOON_S, HOUR, 90 * 24 * HOUR)
    query = parse_query({"start": ["2026-11-23T00:30:00"], "end": ["2026-11-24"]}, NOON_S)
    # the first half hour
    with store.engine.connect() as connection, pytest.raises(BadQuery, match="whole hours"):
        run_query(connection, query)


def test_a_report_of_the_command_refuses_what_is_gone(
    store: SqlStore, store_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store.write([row("a")], LogPosition(), at(1))
    store.prune(NOON_S, HOUR, 90 * 24 * HOUR)
    words = ["report", "--store", store_url, "--start", "2026-11-23T00:30:00", "--end", "2026-11-24"]
    assert main(words) == 2
    assert "rows are kept since 2026-11-23T11:00:00Z" in capsys.readouterr().err

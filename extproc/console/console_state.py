# SPDX-License-Identifier: Apache-2.0
"""What the console shows of a process: a function of the core's state and the time, bounded whatever there is of each.

It is made in steps, so that requests have their turn between two of them. All figures of one ModelServer and of its
engines are of one instant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest, nsmallest
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
import numpy as np

from extproc.api.status_page_contents import ConfigReport
from extproc.core.explanation import why_avoided
from extproc.core.request_states import IN_FLIGHT, WAITING, RequestState
from extproc.endpoints.health import silent_after_s
from extproc.scheduling.model_check import quoted_names
from extproc.scheduling.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from extproc.api.body_match import BodyCondition
    from extproc.api.model_route import ModelMatch, ModelRoute, StringMatch
    from extproc.core.core import Core
    from extproc.endpoints.health import EndpointHealth
    from extproc.endpoints.table import Floats

# Rows of every table but that of engines; the answer has how many there are.
MOST_ROWS: Final = 50
_MOST_BUCKETS: Final = 20
# Of these, the most recently used, the fullest are found.
_BUCKETS_EXAMINED: Final = 2_000
_MOST_NAMES: Final = 8
_MOST_NAME: Final = 128
# Of a route, and targets of a rule.
_MOST_RULES: Final = 4
_MOST_TEXT: Final = 300
# Of a list that may be long, between two turns of other work.
_AT_ONCE: Final = 500

EngineStatus = Literal["serving", "avoided", "silent", "no model"]
# fmt: off
EngineOrder = Literal[
    "status", "server", "address", "inFlight", "waiting", "running", "kvUsage", "cachedShare", "failedShare",
    "prefillTokensPerS", "ttftS", "tpotS", "reportAgeS",
]
# fmt: on
_STATUSES: Final[tuple[EngineStatus, ...]] = ("silent", "avoided", "no model", "serving")
_COLUMN_OF: Final = {
    "inFlight": "in_flight",
    "waiting": "waiting",
    "running": "running",
    "kvUsage": "kv_usage",
    "cachedShare": "cached_share",
    "failedShare": "failed_share",
    "prefillTokensPerS": "prefill_tokens_per_s",
    "ttftS": "ttft_s",
    "tpotS": "tpot_s",
    "reportAgeS": "report_age_s",
}


class ConsoleQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of engines: ``server``: of this ModelServer alone. ``find``: a part of their addresses or ModelServers; of
    ModelServers, tenants and routes, of their names. ``sort``: by which column; ``descending``: the largest first.
    ``limit``: how many.
    """

    server: Annotated[str, msgspec.Meta(max_length=600)] = ""
    find: Annotated[str, msgspec.Meta(max_length=200)] = ""
    sort: EngineOrder = "status"
    descending: bool = False
    limit: Annotated[int, msgspec.Meta(ge=0, le=200)] = 50

    def matches(self, *names: str) -> bool:
        """Whether one of the names has what is looked for; upper and lower case are the same."""
        text = self.find.lower()
        return not text or any(text in name.lower() for name in names)


class EngineView(msgspec.Struct, frozen=True, rename="camel"):
    """One engine. ``why``: it is not serving. ``since_s``: for how long it has been avoided. ``in_flight``: requests of
    all workers there. ``waiting``, ``running``, ``kv_usage``: as it reports; None before it has. ``cached_share``: of
    the prompt tokens in its answers. ``prefill_tokens_per_s``, ``ttft_s``, ``tpot_s``: learned; None before.
    ``adapters``: the first of those that it has, by name; ``adapter_count``: of all of them.
    """

    server: str
    address: str
    status: EngineStatus
    is_draining: bool
    why: str
    since_s: float | None
    in_flight: int
    waiting: float | None
    running: float | None
    kv_usage: float | None
    cached_share: float | None
    failed_share: float | None
    prefill_tokens_per_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    report_age_s: float | None
    adapters: tuple[str, ...]
    adapter_count: int


class ServerView(msgspec.Struct, frozen=True, rename="camel"):
    """One ModelServer, or all of them (``name`` empty): its ``engines`` by status, and sums over them.

    ``held``: requests that wait in this worker, for an engine, an adapter or their turn; ``oldest_s``: how long the
    first of them has waited. ``kv_usage``, ``prefill_tokens_per_s``, ``tpot_s``: means of the engines that have them.
    ``saturation``: of its queue; None without flow control. ``breaker``: its own, closed, half-open or open.
    """

    name: str
    model: str
    breaker: str
    engines: int
    serving: int
    avoided: int
    silent: int
    no_model: int
    in_flight: int
    waiting: float
    running: float
    kv_usage: float | None
    cached_share: float | None
    prefill_tokens_per_s: float | None
    tpot_s: float | None
    held: int
    oldest_s: float | None
    saturation: float | None


class BandView(msgspec.Struct, frozen=True, rename="camel"):
    """A band of a ModelServer's queue. ``share``: its part of the engines while all bands wait, 0 to 1."""

    server: str
    band: str
    priority: int
    share: float
    waiting: int
    oldest_s: float | None
    bytes: int


class TenantView(msgspec.Struct, frozen=True, rename="camel"):
    """``waiting``, ``in_flight``: requests now. The others count since the process began, and those of tenants beyond
    a number are one. ``service``: weighted tokens.
    """

    name: str
    waiting: int
    in_flight: int
    sent: int
    refused: int
    prompt_tokens: float
    cached_tokens: float
    output_tokens: float
    service: float


class TargetView(msgspec.Struct, frozen=True, rename="camel"):
    """``share``: of the requests of its rule, 0 to 1."""

    server: str
    share: float


class RuleView(msgspec.Struct, frozen=True, rename="camel"):
    """``match``: its conditions in words, empty if it always holds. ``targets``: the first of them."""

    match: str
    targets: tuple[TargetView, ...]
    target_count: int


class RouteView(msgspec.Struct, frozen=True, rename="camel"):
    """A ModelRoute. ``models``: the first names that clients may ask for; ``model_count``: of all of them, as for
    ``rules``. ``limits``: how many it has. ``cache_lookups``: of this worker's requests since it began, those that its
    response cache was asked for, ``cache_hits`` of them were answered; None: it has none.
    """

    name: str
    models: tuple[str, ...]
    model_count: int
    rules: tuple[RuleView, ...]
    rule_count: int
    limits: int
    cache_lookups: int | None
    cache_hits: int | None


class BucketView(msgspec.Struct, frozen=True, rename="camel"):
    """One caller's bucket of a limit. ``left``, ``capacity``: in units of ``resource``. ``used_share``: above 1 if it
    is in debt.
    """

    route: str
    limit: str
    resource: str
    subject: str
    left: float
    capacity: float
    used_share: float


class ConfigView(msgspec.Struct, frozen=True, rename="camel"):
    """The directory in use. ``version``: its digest. ``files``: digests of the first ones by name."""

    version: str
    file_count: int
    files: Mapping[str, str]
    refused: str
    waiting: str
    has_nothing: bool
    missing_keys: tuple[str, ...]
    wrong_models: Mapping[str, str]


class ProcessView(msgspec.Struct, frozen=True, rename="camel"):
    """The process that answers. ``instance``: another one after each start. ``worker`` of ``workers``: its number, from
    0. ``at``: the time of the answer, Unix. ``has_explain``, ``has_usage``, ``has_objectives``, ``has_keys``,
    ``has_manager``: whether these pages are there.
    """

    instance: str
    version: str
    worker: int
    workers: int
    at: float
    uptime_s: float
    is_ready: bool
    has_explain: bool
    has_usage: bool
    has_objectives: bool = False
    has_keys: bool = False
    has_manager: bool = False


class ConsoleState(msgspec.Struct, frozen=True, rename="camel"):
    """Everything. ``counts``: how many there are of each table that the query finds, of which the first are here.
    ``outcomes``: requests of this worker by what was decided, since it began.
    """

    process: ProcessView
    total: ServerView
    servers: tuple[ServerView, ...]
    engines: tuple[EngineView, ...]
    bands: tuple[BandView, ...]
    tenants: tuple[TenantView, ...]
    routes: tuple[RouteView, ...]
    http_routes: int
    buckets: tuple[BucketView, ...]
    outcomes: Mapping[str, int]
    counts: Mapping[str, int]
    config: ConfigView


class ConsoleInputs(msgspec.Struct, frozen=True):
    """What the core does not know. ``tenant_counts``: tenant, name of a count, amount; see
    ``AdmissionMetrics.tenant_counts``. ``cache_lookups``: see ``ResponseCacheMetrics.lookups``.
    """

    process: ProcessView
    report: ConfigReport
    outcomes: Mapping[str, int]
    tenant_counts: Iterable[tuple[str, str, float]]
    cache_lookups: Mapping[str, tuple[int, int]] = {}


class _Engines(msgspec.Struct, frozen=True):
    """The engines of one pool at one instant, by position."""

    pool: Pool
    rows: list[int]
    addresses: list[str]
    statuses: list[EngineStatus]
    columns: Mapping[str, Sequence[float | None]]


# Its place in the order, its number, which no other has, and where it is.
_Found = tuple[tuple[object, ...], int, _Engines, int]


def console_state(
    core: Core, facts: ConsoleInputs, query: ConsoleQuery, now: float
) -> Generator[None, None, ConsoleState]:
    """Yields where others may have their turn."""
    held = yield from _count_requests(core, now)
    servers: list[ServerView] = []
    found: list[_Found] = []
    for pool in list(core.pools.values()):
        yield
        gate = core.admission.gates.get(pool.name)
        if gate is not None:
            gate.update_saturation(now)
        engines = _engines(pool, now)
        servers.append(_server(engines, held, None if gate is None else gate.saturation, now))
        if query.server in {"", pool.name}:
            is_all = query.matches(pool.name)
            for at, address in enumerate(engines.addresses):
                if at % _AT_ONCE == _AT_ONCE - 1:
                    yield
                if is_all or query.matches(address):
                    found.append((_order_key(query, engines, at), len(found), engines, at))
    yield
    shown = _first(found, query)
    yield
    tenants = yield from _tenants(held, facts.tenant_counts)
    tenants = [one for one in tenants if query.matches(one.name)]
    yield
    routes = [one for one in core.snapshot.routes if _is_shown(one, query)]
    bands = [
        one for one in _bands(core, held) if query.server in {"", one.server} and query.matches(one.server, one.band)
    ]
    listed = [one for one in servers if query.server in {"", one.name} and query.matches(one.name, one.model)]
    return ConsoleState(
        process=facts.process,
        total=_total(servers),
        servers=tuple(nsmallest(MOST_ROWS, listed, key=_server_order)),
        engines=tuple(_engine(engines, at, now) for _, _, engines, at in shown),
        bands=tuple(nsmallest(MOST_ROWS, bands, key=lambda one: (-one.waiting, one.server, -one.priority))),
        tenants=tuple(nsmallest(MOST_ROWS, tenants, key=_tenant_order)),
        routes=tuple(_route(one, facts.cache_lookups) for one in routes[:MOST_ROWS]),
        http_routes=len(core.snapshot.gateway_api_routes),
        buckets=tuple(_buckets(core, now)),
        outcomes=facts.outcomes,
        counts={
            "servers": len(listed),
            "engines": len(found),
            "bands": len(bands),
            "tenants": len(tenants),
            "routes": len(routes),
            "buckets": core.admission.limits.bucket_count,
        },
        config=_config(core, facts.report),
    )


class _Held(msgspec.Struct):
    """Requests of this process. ``oldest_s``: when the first arrived that waits, by server, and by server and band."""

    waiting: Counter[str] = msgspec.field(default_factory=Counter)
    in_flight: Counter[str] = msgspec.field(default_factory=Counter)
    servers: Counter[str] = msgspec.field(default_factory=Counter)
    oldest_s: dict[object, float] = msgspec.field(default_factory=dict)
    now: float = 0.0

    def age_s(self, key: object) -> float | None:
        """Of the first that waits under ``key``."""
        since_s = self.oldest_s.get(key)
        return None if since_s is None else max(0.0, self.now - since_s)


def _count_requests(core: Core, now: float) -> Generator[None, None, _Held]:
    held, gates = _Held(now=now), core.admission.gates
    for number, record in enumerate(core.records()):
        if number % _AT_ONCE == 0:
            yield
        if not record.is_decided_here:
            continue
        if record.state in WAITING and record.arrival is not None:
            arrival = record.arrival
            held.waiting[arrival.tenant] += 1
            name = arrival.pool.name
            held.servers[name] += 1
            keys: list[object] = [name]
            if record.state is RequestState.QUEUED and record.queued is not None and name in gates:
                keys.append((name, gates[name].queue.band_of(record.queued.priority).index))
            for key in keys:
                held.oldest_s[key] = min(record.arrived_at_s, held.oldest_s.get(key, record.arrived_at_s))
        elif record.state in IN_FLIGHT and record.run is not None:
            held.in_flight[record.run.sent.tenant] += 1
    return held


def _engines(pool: Pool, now: float) -> _Engines:
    table, rows = pool.table, pool.table.active_rows
    index = np.array(rows, np.intp)
    has_reported = [table.has_reported(row) for row in rows]
    ages = _known(now - table.reported_at_s[index], has_reported)
    prompt, cached = table.prompt_tokens[index], table.cached_tokens[index]
    health = [table.healths[row] for row in rows]
    columns: dict[str, Sequence[float | None]] = {
        "in_flight": table.in_flight[index].astype(np.int64).tolist(),
        "waiting": _known(table.waiting[index], has_reported),
        "running": _known(table.running[index], has_reported),
        "kv_usage": _known(table.kv_usage[index], has_reported),
        "report_age_s": ages,
        "prompt_tokens": prompt.tolist(),
        "cached_tokens": cached.tolist(),
        "cached_share": _known(cached / np.maximum(prompt, 1), prompt > 0),
        "prefill_tokens_per_s": _known(table.prefill_rate[index], table.rate_samples[index] > 0),
        "ttft_s": _known(table.ttft_s[index], table.ttft_s[index] > 0),
        "tpot_s": _known(table.tpot_s[index], table.tpot_s[index] > 0),
        "failed_share": [one.failed / one.answers if one.answers else None for one in health],
    }
    is_read, late_s = pool.report_interval_s > 0, silent_after_s(pool.report_interval_s)
    trips = table.trips[index].tolist()
    statuses = [
        _status(one, is_avoided=bool(opened), is_silent=is_read and (age is None or age >= late_s))
        for one, opened, age in zip(health, trips, ages, strict=True)
    ]
    return _Engines(pool, rows, table.active_addresses, statuses, columns)


def _known(values: Floats, has: Iterable[object]) -> list[float | None]:
    return [value if one else None for value, one in zip(values.tolist(), has, strict=True)]


def _status(health: EndpointHealth, *, is_avoided: bool, is_silent: bool) -> EngineStatus:
    if is_avoided:
        return "avoided"
    if is_silent:
        return "silent"
    return "no model" if health.lacks_model else "serving"


def _server(engines: _Engines, held: _Held, saturation: float | None, now: float) -> ServerView:
    name, statuses, columns = engines.pool.name, Counter(engines.statuses), engines.columns
    return ServerView(
        name=name,
        model=engines.pool.spec.model or "",
        breaker=engines.pool.breaker.state(now).text,
        engines=len(engines.rows),
        serving=statuses["serving"],
        avoided=statuses["avoided"],
        silent=statuses["silent"],
        no_model=statuses["no model"],
        in_flight=int(_sum(columns["in_flight"])),
        waiting=_sum(columns["waiting"]),
        running=_sum(columns["running"]),
        kv_usage=_mean(columns["kv_usage"]),
        cached_share=_share(_sum(columns["cached_tokens"]), _sum(columns["prompt_tokens"])),
        prefill_tokens_per_s=_mean(columns["prefill_tokens_per_s"]),
        tpot_s=_mean(columns["tpot_s"]),
        held=held.servers[name],
        oldest_s=held.age_s(name),
        saturation=saturation,
    )


def _sum(values: Iterable[float | None]) -> float:
    return sum(filter(None, values))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return sum(known) / len(known) if known else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _total(servers: list[ServerView]) -> ServerView:
    """Means over ModelServers weigh each by its engines; what they cannot have in common is None."""

    def sum_of(name: str) -> int:
        return sum(getattr(one, name) for one in servers)

    ages = [one.oldest_s for one in servers if one.oldest_s is not None]
    kv = [(one.kv_usage, one.engines) for one in servers if one.kv_usage is not None]
    return ServerView(
        name="",
        model="",
        breaker="",
        engines=sum_of("engines"),
        serving=sum_of("serving"),
        avoided=sum_of("avoided"),
        silent=sum_of("silent"),
        no_model=sum_of("no_model"),
        in_flight=sum_of("in_flight"),
        waiting=sum_of("waiting"),
        running=sum_of("running"),
        kv_usage=_share(sum(usage * count for usage, count in kv), sum(count for _, count in kv)),
        cached_share=None,
        prefill_tokens_per_s=None,
        tpot_s=None,
        held=sum_of("held"),
        oldest_s=max(ages, default=None),
        saturation=None,
    )


def _server_order(one: ServerView) -> tuple[float, ...] | tuple[object, ...]:
    """Those that have engines with problems first, then the busiest."""
    return one.serving == one.engines, -one.held, -one.in_flight, one.name


def _order_key(query: ConsoleQuery, engines: _Engines, at: int) -> tuple[object, ...]:
    """By which engines are sorted; unknown values come last in any case."""
    name, sign = query.sort, -1 if query.descending else 1
    address = engines.pool.name, engines.addresses[at]
    if name in {"server", "address"}:
        return address if name == "server" else address[::-1]
    if name == "status":
        return sign * _STATUSES.index(engines.statuses[at]), -(engines.columns["in_flight"][at] or 0), *address
    value = engines.columns[_COLUMN_OF[name]][at]
    return value is None, sign * (value or 0), *address


def _first(found: list[_Found], query: ConsoleQuery) -> list[_Found]:
    is_by_name = query.sort in {"server", "address"}
    return nlargest(query.limit, found) if query.descending and is_by_name else nsmallest(query.limit, found)


def _engine(engines: _Engines, at: int, now: float) -> EngineView:
    pool, row, status, columns = engines.pool, engines.rows[at], engines.statuses[at], engines.columns
    health, loras = pool.table.healths[row], pool.table.loras[row]
    held = loras.active if loras.served is None else loras.served - {pool.spec.model} - loras.base
    adapters = sorted(held if pool.slots is None else pool.slots.adapters_held(row))
    why = ""
    if status == "avoided":
        why = why_avoided(pool, row, now)
    elif status == "silent":
        age = columns["report_age_s"][at]
        why = "it has never reported" if age is None else "it reports no more"
        why += "; see that it runs, and that its metrics page answers"
    elif status == "no model":
        why = f"it lists {quoted_names(loras.base)} and not '{health.lacks_model}', the model of its ModelServer"
    values = {name: columns[name][at] for name in _COLUMN_OF.values()}
    return EngineView(
        server=pool.name,
        address=engines.addresses[at],
        status=status,
        is_draining=pool.table.configs[row].is_draining,
        why=why[:_MOST_TEXT],
        since_s=max(0.0, now - pool.table.breakers[row].since_s) if status == "avoided" else None,
        adapters=_shortened(adapters),
        adapter_count=len(adapters),
        **values,  # type: ignore[arg-type]  # counts are whole, all others may be unknown
    )


def _bands(core: Core, held: _Held) -> Iterator[BandView]:
    for name, gate in core.admission.gates.items():
        queue = gate.queue
        whole = sum(float(band.spec.share) for band in queue.bands)
        for band in queue.bands:
            yield BandView(
                server=name,
                band=band.spec.name,
                priority=band.spec.priority,
                share=float(band.spec.share) / whole,
                waiting=band.request_count,
                oldest_s=held.age_s((name, band.index)),
                bytes=band.bytes,
            )


def _tenants(held: _Held, counts: Iterable[tuple[str, str, float]]) -> Generator[None, None, list[TenantView]]:
    sums: dict[str, Counter[str]] = {name: Counter() for name in (*held.waiting, *held.in_flight)}
    for number, (tenant, name, amount) in enumerate(counts):
        if number % _AT_ONCE == 0:
            yield
        sums.setdefault(tenant, Counter())[name] += amount  # type: ignore[assignment]  # tokens may be estimates
    return [
        TenantView(
            name=tenant,
            waiting=held.waiting[tenant],
            in_flight=held.in_flight[tenant],
            sent=int(one["picked"]),
            refused=int(one["refused"]),
            prompt_tokens=float(one["prompt"]),
            cached_tokens=float(one["cached"]),
            output_tokens=float(one["output"]),
            service=float(one["service"]),
        )
        for tenant, one in sums.items()
    ]


def _tenant_order(one: TenantView) -> tuple[object, ...]:
    """Those with requests now first, then those that have had most."""
    return -(one.waiting + one.in_flight), -one.service, -one.sent, one.name


def _is_shown(route: ModelRoute, query: ConsoleQuery) -> bool:
    targets = route.server_keys
    if query.server and query.server not in targets:
        return False
    return query.matches(route.metadata.key, *route.spec.model_names, *targets)


def _route(route: ModelRoute, cache_lookups: Mapping[str, tuple[int, int]]) -> RouteView:
    names, rules = route.spec.model_names, []
    has_cache = route.spec.cache is not None
    lookups, hits = cache_lookups.get(route.metadata.key, (0, 0))
    for rule in route.spec.rules[:_MOST_RULES]:
        whole = sum(target.weight for target in rule.target_models)
        targets = [TargetView(route.server_key(one), one.weight / whole) for one in rule.target_models]
        rules.append(RuleView(_match(rule.model_match), tuple(targets[:_MOST_RULES]), len(targets)))
    return RouteView(
        name=route.metadata.key,
        models=_shortened(names),
        model_count=len(names),
        rules=tuple(rules),
        rule_count=len(route.spec.rules),
        limits=len(route.spec.rate_limits),
        cache_lookups=lookups if has_cache else None,
        cache_hits=hits if has_cache else None,
    )


def _shortened(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(one[:_MOST_NAME] for one in names[:_MOST_NAMES])


def _match(match: ModelMatch | None) -> str:
    if match is None:
        return ""
    words = [f"{name} {_condition(one)}" for name, one in match.headers.items()]
    words += [] if match.uri is None else [f"path {_condition(match.uri)}"]
    words += [f"{path} {_field_condition(one)}" for path, one in match.body.items()]
    tokens = (("input tokens", match.input_tokens), ("output tokens", match.output_tokens))
    words += [f"{name} {_range(one.at_least, one.at_most)}" for name, one in tokens if one is not None]
    text = " and ".join(words)
    return text if len(text) <= _MOST_TEXT else text[:_MOST_TEXT] + "..."


def _field_condition(one: BodyCondition) -> str:
    if one.exists is not None:
        return "exists" if one.exists else "is absent"
    if one.boolean is not None:
        return f"is {str(one.boolean).lower()}"
    return f"is '{one.text}'" if one.text is not None else _range(one.at_least, one.at_most)


def _range(at_least: float | None, at_most: float | None) -> str:
    ends = (("at least", at_least), ("at most", at_most))
    return " and ".join(f"{words} {end:g}" for words, end in ends if end is not None)


def _condition(match: StringMatch) -> str:
    if match.exact is not None:
        return f"is '{match.exact}'"
    return f"begins with '{match.prefix}'" if match.prefix is not None else f"matches '{match.regex}'"


def _buckets(core: Core, now: float) -> list[BucketView]:
    """The fullest of those that were used last."""
    views = []
    for one in core.admission.limits.recent_levels(now, _BUCKETS_EXAMINED):
        # namespace, name, number of the limit, resource, subject
        parts = one.key.split("/", 4)
        known = len(parts) == 5
        capacity = one.limit.capacity
        views.append(
            BucketView(
                route="/".join(parts[:2]) if known else one.key,
                limit=parts[2] if known else "",
                resource=parts[3] if known else "",
                subject=parts[4] if known else "",
                left=one.level,
                capacity=capacity,
                used_share=1 - one.level / capacity if capacity else 0.0,
            )
        )
    return nlargest(_MOST_BUCKETS, views, key=lambda one: one.used_share)


def _config(core: Core, report: ConfigReport) -> ConfigView:
    return ConfigView(
        version=core.snapshot.version,
        file_count=len(report.files),
        files=dict(islice(sorted(report.files.items()), MOST_ROWS)),
        refused=report.refused[:2_000],
        waiting=report.waiting[:2_000],
        has_nothing=report.has_nothing,
        missing_keys=tuple(one[:_MOST_TEXT] for one in report.missing_keys[:MOST_ROWS]),
        wrong_models={name: text[:_MOST_TEXT] for name, text in islice(report.wrong_models.items(), MOST_ROWS)},
    )

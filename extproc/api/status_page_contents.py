# SPDX-License-Identifier: Apache-2.0
"""Pages of extproc and of the bundle's writer, as JSON, that the controller polls or watches.

``/demand``, for autoscalers: the clients' demand and the state of the engines. With ``?watch`` it is a stream of
objects, a line each: one a second, and one at once when a request begins to wait for a ModelServer without engines, or
when far more requests are unfinished than in the last line. With ``?watch=changes`` lines after the first leave out
ModelServers that have not changed.

``/loads``: what the engines do for one extproc, by which the controller chooses and drains pods.

``/console``: for people; see ``extproc.console``.

``/slo``: how well objectives are kept; a line for each objective.

``/breakers/reset``: a POST closes the breakers of a ModelServer.

``/config``: which files of the configuration directory are in use. The directory's writer reads it there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec
import xxhash

from extproc.api.slo import ObjectiveName

if TYPE_CHECKING:
    from collections.abc import Iterable

DEMAND_PATH: Final = "/demand"
CONSOLE_PATH: Final = "/console"
SLO_PATH: Final = "/slo"
RESET_PATH: Final = "/breakers/reset"
# Upper bounds of the buckets, a fifth of a decade each; the last bucket has no bound.
TTFT_BOUNDS_S: Final = tuple(round(10 ** (power / 5), 4) for power in range(-10, 13))
TPOT_BOUNDS_S: Final = tuple(round(10 ** (power / 10), 5) for power in range(-30, 5))
# A watcher gets a line at once when unfinished requests have grown by this number and by this factor since its last
# line.
_MANY_MORE: Final = 8
_TIMES_AS_MANY: Final = 2
LOADS_PATH: Final = "/loads"
# On pods of gateways: the port that serves this page for all extproc processes of the pod.
LOADS_LABEL: Final = "attache.dev/tells-loads"
REPORT_PATH = "/config"


def unfinished_notify_threshold(known: int) -> int:
    """Number of unfinished requests at which a watcher whose last line had ``known`` gets a new line at once."""
    return max(known + _MANY_MORE, known * _TIMES_AS_MANY)


class SloObjectiveCounts(msgspec.Struct, frozen=True, rename="camel"):
    """One objective of a class ``name``, as one process has seen it. ``target_s``: what requests are to take at most.
    ``share``: of the requests of the last ``window_s`` that are to meet it. ``excluded``: requests that did not count,
    since the process began. ``hours``: with hours since 1970, how many requests met it and missed it.
    """

    route: str
    name: str
    objective: ObjectiveName
    target_s: float
    share: float
    window_s: float
    excluded: int = 0
    hours: list[tuple[int, int, int]] = []


class RequestCounters(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, gc=False):
    """Counts since the process began; they only grow. ``arrivals``: requests that were routed here. ``refused``: those
    that got an error of ours. ``finished``: those whose outcome is known. ``prompt_tokens``: of these, as the engines
    report, or as estimated at arrival where they do not. ``cached_tokens``: those of them that an engine had in its
    cache. ``output_tokens``: written. ``prefill_work``: uncached tokens, those with long contexts weighing more.
    """

    arrivals: int = 0
    refused: int = 0
    finished: int = 0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    output_tokens: float = 0.0
    prefill_work: float = 0.0


class EngineDemand(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, gc=False):
    """One engine. ``role``: ``prefill``, ``decode``, or empty for both. ``in_flight``: requests of this process there.
    ``in_flight_tokens``: of their prompts and, unless they are there for their prefill alone, expected answers.
    ``waiting``, ``running``, ``kv_usage``: as the engine itself reports; None if it did not. ``report_age_s``: since
    then. ``kv_capacity_tokens``: that its cache holds; 0 if unknown. ``prefill_tokens_per_s``, ``step_s``,
    ``step_s_per_token``: its learned speed: of prefill, and of a decode step with no tokens in flight and for each of
    them; None before any was learned.
    """

    role: str = ""
    in_flight: int = 0
    in_flight_tokens: float = 0.0
    waiting: float | None = None
    running: float | None = None
    kv_usage: float | None = None
    report_age_s: float | None = None
    kv_capacity_tokens: float = 0.0
    prefill_tokens_per_s: float | None = None
    step_s: float | None = None
    step_s_per_token: float | None = None


class ServerDemand(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """One ModelServer. ``model``: its base model. ``counted``: by requested model, adapters apart. ``ttft`` and
    ``tpot``: requests by bucket (``TTFT_BOUNDS_S``, ``TPOT_BOUNDS_S``), since the process began; times count from
    arrival, so that waiting here is in them. ``queued``: requests that wait here now. ``queued_tokens``: their uncached
    prompt tokens, as expected. ``oldest_wait_s``: of the first of them. ``at_zero``: those that wait because no engine
    can take them. ``engines``: by address.
    """

    model: str = ""
    counted: dict[str, RequestCounters] = msgspec.field(default_factory=dict)
    ttft: tuple[int, ...] = ()
    tpot: tuple[int, ...] = ()
    queued: int = 0
    queued_tokens: float = 0.0
    oldest_wait_s: float = 0.0
    at_zero: int = 0
    engines: dict[str, EngineDemand] = msgspec.field(default_factory=dict)


class ProcessDemand(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The state of one process. ``instance``: its name, another one after each start. ``sequence``: grows with each
    message. ``age_s``: since the process began. ``servers``: by ``namespace/name``. ``slot``: which of its pod's
    processes it is, the same after each start; empty where there is one. With an empty ``instance``, the pod reports
    that the process in this slot does not answer. ``since``: the number of the message that this one continues:
    ModelServers that it does not name are unchanged since; 0: it names all of them.
    """

    instance: str
    sequence: int
    age_s: float
    servers: dict[str, ServerDemand] = msgspec.field(default_factory=dict)
    slot: str = ""
    since: int = 0


def demand_delta(now: ProcessDemand, before: ProcessDemand) -> ProcessDemand:
    """The message that follows ``before``: servers that are other objects than there, or all if the names differ."""
    if now.instance != before.instance or now.servers.keys() != before.servers.keys():
        return now
    changed = {name: one for name, one in now.servers.items() if one is not before.servers[name]}
    return ProcessDemand(now.instance, now.sequence, now.age_s, changed, now.slot, before.sequence)


def apply_demand_delta(report: ProcessDemand, before: ProcessDemand | None) -> ProcessDemand | None:
    """The whole of a message that may name changed servers alone; None if it does not continue ``before``."""
    if not report.since:
        return report
    if before is None or (before.instance, before.sequence) != (report.instance, report.since):
        return None
    if not report.servers.keys() <= before.servers.keys():
        return None
    return ProcessDemand(
        report.instance, report.sequence, report.age_s, {**before.servers, **report.servers}, report.slot
    )


def bucket_index(value_s: float, bounds: tuple[float, ...]) -> int:
    """The index of the bucket that counts ``value_s``."""
    return bisect_left(bounds, value_s)


def percentile(counts: tuple[int, ...], bounds: tuple[float, ...], percent: float) -> float | None:
    """The value that ``percent`` of those counted do not exceed, by interpolation in its bucket; None without any.

    In the last bucket, which has no bound, it is the bucket's lower bound.
    """
    total = sum(counts)
    if not total:
        return None
    rank, seen = total * percent / 100, 0
    for index, count in enumerate(counts):
        if count and seen + count >= rank:
            low = bounds[index - 1] if index else 0.0
            if index >= len(bounds):
                return low
            return low + (bounds[index] - low) * max(0.0, rank - seen) / count
        seen += count
    return bounds[-1]


class EndpointLoad(msgspec.Struct, frozen=True, rename="camel"):
    """``in_flight``: requests that this process has sent there. ``cached_tokens``: of prompts, in its cache, as this
    process estimates. ``reported``: requests at the engine as it reports itself: including those from other clients,
    and those that Envoy sent to another engine than was decided, because it could not reach that one or did not have it
    yet.
    """

    in_flight: int = 0
    cached_tokens: int = 0
    reported: int = 0

    @property
    def requests_at_engine(self) -> int:
        """Requests at the engine. Dispatches are counted before the engine reports them."""
        return max(self.in_flight, self.reported)


def total_loads(pages: Iterable[Mapping[str, EndpointLoad]]) -> dict[str, EndpointLoad]:
    """Of several processes. Requests are each process's own and add up. Caches and reports are the same, seen by
    all.
    """
    found: dict[str, EndpointLoad] = {}
    for page in pages:
        for address, one in page.items():
            before = found.get(address, EndpointLoad())
            found[address] = EndpointLoad(
                before.in_flight + one.in_flight,
                max(before.cached_tokens, one.cached_tokens),
                max(before.reported, one.reported),
            )
    return found


class ConfigReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """``files``: those in use, by name, as ``content_digest`` has their content. ``refused``: why newer ones are not
    used, empty if they are. ``waiting``: what newer ones wait for, if that is known. ``missing_keys``: files and
    variables with keys that cannot be read, with the reason of each. ``has_nothing``: it serves nothing at all, as
    after a restart with files that it refuses. ``wrong_models``: by ModelServer, what is wrong with its ``model``, as
    the engines list others. ``open_breakers``: by ModelServer, why requests to it are refused for now. ``warming``:
    ModelServers whose engines are all new, and not used before Envoy has one of them.
    """

    files: Mapping[str, str] = {}
    refused: str = ""
    waiting: str = ""
    missing_keys: tuple[str, ...] = ()
    has_nothing: bool = False
    wrong_models: Mapping[str, str] = {}
    open_breakers: Mapping[str, str] = {}
    warming: frozenset[str] = frozenset()


def content_digest(content: bytes) -> str:
    """Of a file; equal for equal content."""
    return xxhash.xxh3_64_hexdigest(content)

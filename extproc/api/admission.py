# SPDX-License-Identifier: Apache-2.0
"""Rate limits, flow control and objectives: who may ask how much, who goes first."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from extproc.api.config_errors import Finding, Path


import math
from typing import Annotated, ClassVar, Literal

import msgspec

from extproc.api.quantities import ByteSize, Duration
from extproc.api.spec import CelRule, DirectoryObject, Name, NonEmpty, Spec, list_map_keys

# As Kubernetes' and InferenceObjective's: higher goes first, below 0 is sheddable.
Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=10**15)]
Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
PositiveWeight = Annotated[float, msgspec.Meta(gt=0, le=1e6)]

Unit = Literal["second", "minute", "hour", "day", "month"]
# A month is 30 days.
UNIT_SECONDS = {"second": 1.0, "minute": 60.0, "hour": 3600.0, "day": 86400.0, "month": 2592000.0}


CallerNames = Annotated[tuple[NonEmpty, ...], msgspec.Meta(max_length=1000)]
OTHERS_NAMED = "is for callers whom no limit names; write others, or tenants, users and apiKeys"
Fairness = Literal["VirtualTokenCounter", "DeficitLocality", "SlidingWindow", "RoundRobin", "GlobalStrict"]
Order = Literal["FirstCome", "Deadline", "ShortestFirst", "SessionBoost", "LeastAttained"]


class RateLimit(Spec, frozen=True):
    """A limit on the use of each tenant, user, API key or value of a header in a unit of time.

    A bucket that fills at the limit's rate: over any period t, at most ``limit * t / unit + burst * limit`` passes.
    At least one of the four limits is set.

    ``tenants``, ``users``, ``api_keys``: the limit applies only to these callers, by verified names; all given fields
    must match. ``others``: it applies to callers that no limit of the route names.

    ``per``: the key by which use is counted; ``Route`` counts all callers together. ``header``: the header's name, with
    ``per: Header``. ``unit``: of time; a month is 30 days. ``requests``: number of requests. ``input_tokens``: tokens
    of prompts. ``output_tokens``: tokens of answers. ``total_tokens``: of both. ``burst``: the bucket's capacity as a
    multiple of the limit.
    """

    CEL: ClassVar = (
        CelRule(
            "has(self.requests) || has(self.inputTokens) || has(self.outputTokens) || has(self.totalTokens)",
            "limits nothing; write requests, inputTokens, outputTokens or totalTokens",
        ),
        CelRule("(self.per == 'Header') == has(self.header)", "per: Header and the field header go together"),
        CelRule("self.scope == 'Global' || self.withoutRedis == 'Local'", "withoutRedis goes with scope: Global"),
        CelRule("!self.others || !(has(self.tenants) || has(self.users) || has(self.apiKeys))", OTHERS_NAMED),
    )

    tenants: CallerNames = ()
    users: CallerNames = ()
    api_keys: Annotated[tuple[Name, ...], msgspec.Meta(max_length=1000)] = ()
    others: bool = False
    per: Literal["Tenant", "User", "ApiKey", "Header", "Route"] = "Tenant"
    header: NonEmpty | None = None
    unit: Unit = "minute"
    requests: Tokens | None = None
    input_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    total_tokens: Tokens | None = None
    burst: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0
    # Local: each machine grants the whole limit. Global: machines that share a Redis grant it together.
    scope: Literal["Local", "Global"] = "Local"
    # While Redis cannot be reached, each process grants its share of what a Global limit had left, or its requests are
    # answered 503.
    without_redis: Literal["Local", "Refuse"] = "Local"

    @property
    def unit_s(self) -> float:
        """The unit in seconds."""
        return UNIT_SECONDS[self.unit]


class KeyRateLimit(Spec, frozen=True):
    """A limit on the use of one API key, over all routes, in a unit of time. At least one of the four limits is set.

    ``unit``: of time; a month is 30 days. ``requests``: number of requests. ``input_tokens``: tokens of prompts.
    ``output_tokens``: tokens of answers. ``total_tokens``: of both. ``burst``: the bucket's capacity as a multiple of
    the limit.
    """

    CEL: ClassVar = (RateLimit.CEL[0],)

    unit: Unit = "minute"
    requests: Tokens | None = None
    input_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    total_tokens: Tokens | None = None
    burst: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 1.0
    # Local: each machine grants the whole limit. Global: machines that share a Redis grant it together.
    scope: Literal["Local", "Global"] = "Local"

    @property
    def unit_s(self) -> float:
        """The unit in seconds."""
        return UNIT_SECONDS[self.unit]

    @property
    def is_empty(self) -> bool:
        """Whether it limits nothing."""
        return all(one is None for one in (self.requests, self.input_tokens, self.output_tokens, self.total_tokens))


class SaturationLimits(msgspec.Struct, frozen=True):
    """Bounds of one engine's load, None without one: from these on it counts as full."""

    queue_depth: float
    kv_usage: float
    max_requests: float
    max_tokens: float
    max_wait_s: float
    headroom: float


def _number(limit: float | None) -> float:
    return math.inf if limit is None else float(limit)


class SaturationSpec(Spec, frozen=True):
    """Limits at which an engine is full. Its fullness is the highest ratio of use to limit; null: no limit.

    ``queue_depth``: requests that wait in the engine, as it reports, plus those sent since. ``kv_usage``: fraction of
    the KV cache in use, likewise. ``max_requests`` and ``max_tokens``: in flight, as extproc counts them. ``max_wait``:
    until the engine begins a new prompt, as extproc estimates it. ``headroom``: how far beyond its queue depth, KV
    usage and wait a full engine may still be chosen for its cached prefix, while another has capacity.
    """

    queue_depth: Annotated[int, msgspec.Meta(ge=1)] | None = 5
    kv_usage: Fraction | None = 0.8
    max_requests: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_tokens: Tokens | None = None
    max_wait: Duration | None = Duration("250ms")
    headroom: Annotated[float, msgspec.Meta(ge=0, le=100)] = 1.0

    def limits(self) -> SaturationLimits:
        """The same in numbers; infinite where nothing is limited."""
        return SaturationLimits(
            queue_depth=_number(self.queue_depth),
            kv_usage=_number(self.kv_usage),
            max_requests=_number(self.max_requests),
            max_tokens=_number(self.max_tokens),
            max_wait_s=_number(self.max_wait),
            headroom=self.headroom,
        )


class PriorityBand(Spec, frozen=True):
    """Requests of a priority and above, up to the next band's.

    ``name``: in metrics. ``priority``: the lowest one of the band. ``share``: of the engines while all bands have
    requests waiting, relative to the others' shares. ``ceiling``: send only while engines are less full than this.
    ``max_requests``: most that may wait. ``max_bytes``: most that their bodies may hold. ``fairness`` and ``order``: if
    not the queue's.
    """

    name: Name
    priority: Priority
    share: PositiveWeight
    ceiling: Fraction = 1.0
    max_requests: Annotated[int, msgspec.Meta(ge=1)] = 5000
    # of the bodies that wait
    max_bytes: ByteSize = ByteSize("1Gi")
    fairness: Fairness | None = None
    order: Order | None = None


BANDS = (
    PriorityBand(name="critical", priority=10, share=80),
    PriorityBand(name="high", priority=1, share=15),
    PriorityBand(name="standard", priority=0, share=4),
    PriorityBand(name="best-effort", priority=-(2**31), share=1),
)


class FlowControl(Spec, frozen=True):
    """Hold requests while engines are full; release them band by band, and within a band flow by flow.

    ``saturation``: when engines are full. ``timeout``: longest wait while all engines are full.
    ``no_endpoint_timeout``: longest wait for a first engine. ``max_requests``: most that may wait, over all bands.
    ``max_bytes``: most that their bodies may hold. ``bands``: by priority. ``sharing``: whether bands have shares of
    the engines, or higher ones are served first. ``fairness``: between flows of a band. ``order``: inside a flow.
    ``ageing``: a request is never overtaken by one that arrived more than this later. ``flow_by``: what is treated
    fairly. ``session_header``: names a session or program, for ``flow_by`` and ``order``. ``flow_headers``: with
    ``flowBy: Tenant``, the first of these headers that a request has makes it part of a flow of its tenant's own,
    unless it has a fairness ID. ``ceilings``: the bands' own, or ones that slow lower bands down as engines fill.
    ``weights``: by tenant, or by the header's value. ``input_weight`` and ``output_weight``: what a token costs a flow.
    ``window``: of SlidingWindow. ``quantum``: tokens of DeficitLocality. ``shed_from``: from this fullness on (1:
    engines full, 2: the queue, too) requests of negative priority are refused at random.
    """

    CEL: ClassVar = (
        CelRule(
            "self.bands.all(one, self.bands.exists_one(other, other.priority == one.priority))",
            "two bands have one priority; give each its own",
        ),
    )

    saturation: SaturationSpec = SaturationSpec()
    timeout: Duration = Duration("60s")
    no_endpoint_timeout: Duration = Duration("60s")
    max_requests: Annotated[int, msgspec.Meta(ge=1)] = 20_000
    # of the bodies that wait in all bands
    max_bytes: ByteSize = ByteSize("2Gi")
    bands: Annotated[
        tuple[PriorityBand, ...], msgspec.Meta(min_length=1, max_length=16, extra_json_schema=list_map_keys("name"))
    ] = BANDS
    sharing: Literal["Guaranteed", "Strict"] = "Guaranteed"
    fairness: Fairness = "VirtualTokenCounter"
    order: Order = "FirstCome"
    ageing: Duration = Duration("30s")
    flow_by: Literal["TenantAndModel", "Tenant", "User", "Header"] = "TenantAndModel"
    session_header: NonEmpty = "x-session-id"
    flow_headers: Annotated[tuple[NonEmpty, ...], msgspec.Meta(max_length=16)] = ()
    ceilings: Literal["Fixed", "SoftReflective"] = "Fixed"
    weights: dict[str, PositiveWeight] = msgspec.field(default_factory=dict)
    input_weight: PositiveWeight = 1.0
    # a token found in the cache costs the engine almost nothing
    cached_weight: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.1
    output_weight: PositiveWeight = 2.0
    window: Duration = Duration("1m")
    quantum: Tokens = 60_000
    shed_from: Annotated[float, msgspec.Meta(ge=0, lt=2)] = 1.0

    @property
    def max_hold_s(self) -> float:
        """The longest time for which a request may be held."""
        return max(self.timeout, self.no_endpoint_timeout)


class ObjectiveSpec(Spec, frozen=True):
    """An objective holds for every ModelServer of its namespace.

    ``priority``: higher ones are served first; requests below 0 may be refused under load. ``pool_ref``: read and not
    used.
    """

    priority: Priority = 0
    pool_ref: dict[str, str] = msgspec.field(default_factory=dict)


class InferenceObjective(DirectoryObject, frozen=True, kw_only=True):
    """A document of the Gateway API Inference Extension, or llm-d's of the same form: a priority with a name."""

    spec: ObjectiveSpec = ObjectiveSpec()


def check_limits(limits: Sequence[RateLimit]) -> Iterator[Finding]:
    """Each limits something; the field 'header' goes with ``per: Header``."""
    for index, limit in enumerate(limits):
        path: Path = ("spec", "rateLimits", index)
        if not any((limit.requests, limit.input_tokens, limit.output_tokens, limit.total_tokens)):
            yield path, "limits nothing; write requests, inputTokens, outputTokens or totalTokens"
        if (limit.per == "Header") != (limit.header is not None):
            yield path, "per: Header and the field 'header' go together; write both or neither"
        if limit.others and (limit.tenants or limit.users or limit.api_keys):
            yield (*path, "others"), OTHERS_NAMED
        if limit.scope == "Local" and limit.without_redis == "Refuse":
            yield (*path, "withoutRedis"), "has no effect on a Local limit; write scope: Global, or leave it out"


def check_flow_control(control: FlowControl) -> Iterator[Finding]:
    """Bands differ in name and priority, and the limits let requests through."""
    path: Path = ("spec", "flowControl")
    if control.saturation.limits().max_wait_s == 0:
        yield (*path, "saturation", "maxWait"), "nothing could ever go; write a longer time, or null"
    names: set[str] = set()
    priorities: set[int] = set()
    for index, band in enumerate(control.bands):
        if band.name in names or band.priority in priorities:
            yield (*path, "bands", index), "another band has this name or priority; give each its own"
        names.add(band.name)
        priorities.add(band.priority)

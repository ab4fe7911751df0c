# SPDX-License-Identifier: Apache-2.0
"""Flow control of llm-d's EndpointPickerConfig as our FlowControl: its section, and its usage limit policies.

A usage limit policy gives each priority a ceiling: its requests are sent only while engines are less full.
"""

from __future__ import annotations

import itertools
import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Final, Literal, Protocol

import msgspec

from extproc.api.admission import FlowControl, PriorityBand, SaturationSpec
from extproc.api.picker_config import BandSection, EndpointPickerConfig, FlowControlSection
from extproc.api.quantities import ByteSize, Duration
from extproc.api.schema_validation import check_shape, suggest_similar
from extproc.api.spec import NonEmpty

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from extproc.api.admission import Fairness, Order
    from extproc.api.config_errors import Finding
    from extproc.api.picker_config import PluginSpec

FEATURE_GATE: Final = "flowControl"
DEFAULT_DETECTOR: Final = "utilization-detector"
_LOWEST: Final = -(2**31)
# A wait without an end there ends here all the same: Envoy waits for an hour at most.
LONGEST_WAIT: Final = Duration("59m")
# What stands for no limit over all bands.
MOST_REQUESTS: Final = 1_000_000
MOST_BYTES: Final = ByteSize("64Gi")
# A fullness that is only reached when the queue is full, and refuses everybody.
_NEVER_SHED: Final = 1.999
# A band's own limits where the file has none, as in llm-d.
_BAND_REQUESTS: Final = 5000
_BAND_BYTES: Final = ByteSize("1G")
# Gates of releases of llm-d and of the Inference Extension: what they switched is always on here, or has no meaning.
_OTHER_GATES: Final = frozenset(
    {"dataLayer", "enableLegacyMetrics", "haPopulateNonLeaderDatastore", "prepareDataPlugins"}
)
_GATE_VALUES: Final[Mapping[str, bool]] = MappingProxyType(
    {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}
)
# Least service within the last minute stands for llm-d's service with a half-life of one.
FAIRNESS: Final[Mapping[str, Fairness]] = MappingProxyType(
    {
        "round-robin-fairness-policy": "RoundRobin",
        "global-strict-fairness-policy": "GlobalStrict",
        "program-aware-fairness": "SlidingWindow",
        # its name before llm-d-router 0.9
        "program-aware-fairness-policy": "SlidingWindow",
        # which also holds sessions back until there is room for their KV caches
        "thunder-agent": "SlidingWindow",
    }
)
ORDERS: Final[Mapping[str, Order]] = MappingProxyType(
    {
        "fcfs-ordering-policy": "FirstCome",
        "edf-ordering-policy": "Deadline",
        "slo-deadline-ordering-policy": "Deadline",
    }
)
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
# Headers in which agents name their sessions: Claude Code, OpenCode, Codex, older Codex.
SESSION_HEADERS: Final = ("x-claude-code-session-id", "x-session-affinity", "session-id", "session_id")
_HIGHEST: Final = 2**31 - 1
AGENT_IDENTITY: Final = "agent-identity"


class UtilizationParameters(msgspec.Struct, frozen=True, rename="camel"):
    """Of ``utilization-detector``: engines are full by what they report."""

    queue_depth_threshold: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    kv_cache_util_threshold: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.8
    headroom: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.0


class ConcurrencyParameters(msgspec.Struct, frozen=True, rename="camel"):
    """Of ``concurrency-detector``: engines are full by what was sent to them."""

    concurrency_mode: Literal["requests", "tokens", "hybrid"] = "requests"
    max_concurrency: Annotated[int, msgspec.Meta(ge=1)] = 100
    max_token_concurrency: Annotated[int, msgspec.Meta(ge=1)] = 1_000_000
    headroom: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.0


def feature_gates(config: EndpointPickerConfig) -> Mapping[str, bool]:
    """Feature gates by name: ``flowControl`` and ``flowControl=true`` switch one on, ``flowControl=false`` off."""
    found = {}
    for gate in config.feature_gates:
        name, has_value, value = gate.partition("=")
        found[name.strip()] = _GATE_VALUES.get(value.strip().lower(), False) if has_value else True
    return found


def check_flow_control_section(config: EndpointPickerConfig) -> Iterator[Finding]:
    """Feature gates can be read, bands differ in priority, and the saturation detector's parameters have their
    shape.
    """
    yield from _check_gates(config)
    section = config.flow_control or FlowControlSection()
    seen: set[int] = set()
    for index, band in enumerate(section.priority_bands):
        if band.priority in seen:
            place = ("flowControl", "priorityBands", index, "priority")
            yield place, f"a second band of priority {band.priority}; write each priority once"
        seen.add(band.priority)
    plugins = _Plugins(config)
    index, plugin = plugins.detector
    if plugin is not None and plugin.parameters and plugins.has_flow_control:
        for path, message in check_shape(plugin.parameters, plugins.detector_parameters):
            yield ("plugins", index, "parameters", *path), message


def _check_gates(config: EndpointPickerConfig) -> Iterator[Finding]:
    for index, gate in enumerate(config.feature_gates):
        name, has_value, value = gate.partition("=")
        if has_value and value.strip().lower() not in _GATE_VALUES:
            yield ("featureGates", index), f"'{value}' is neither true nor false; write {name}=true or {name}=false"
        # llm-d refuses it, too
        if name.strip() not in {FEATURE_GATE, *_OTHER_GATES}:
            advice = suggest_similar(name.strip(), {FEATURE_GATE, *_OTHER_GATES})
            yield ("featureGates", index), f"there is no gate '{name}'; {advice}"


def saturation_detector_name(config: EndpointPickerConfig) -> str:
    """The name of the plugin that measures how full engines are: ``flowControl``'s before the older top-level one's."""
    section = config.flow_control
    named = (section.saturation_detector if section else None) or config.saturation_detector
    return (named.plugin_ref if named else "") or DEFAULT_DETECTOR


def to_flow_control(config: EndpointPickerConfig) -> FlowControl | None:
    """None without the feature gate. Expects a config in which ``check_flow_control_section`` finds nothing."""
    plugins = _Plugins(config)
    if not plugins.has_flow_control:
        return None
    section = config.flow_control or FlowControlSection()
    ttl = section.default_request_ttl
    return FlowControl(
        saturation=_saturation(config, plugins),
        timeout=_bounded(ttl),
        no_endpoint_timeout=_bounded(
            ttl if section.no_endpoint_request_ttl is None else section.no_endpoint_request_ttl
        ),
        # in llm-d, each band is bounded, and their sum only if it is configured
        max_requests=int(section.max_requests or MOST_REQUESTS),
        max_bytes=ByteSize(int(section.max_bytes)) if section.max_bytes else MOST_BYTES,
        bands=tuple(_band(priority, band, plugins) for priority, band in _bands(section).items()),
        sharing="Strict",
        flow_by="Tenant",
        # in llm-d, requests of negative priority wait like all others
        shed_from=_NEVER_SHED,
    )


def _bands(section: FlowControlSection) -> Mapping[int, BandSection]:
    """By the lowest priority of each. A named band is of one priority only: right above it the usual one goes on."""
    usual = section.default_priority_band or BandSection()
    negative = section.default_negative_priority_band or usual
    named = {band.priority: band for band in section.priority_bands}
    bands = {_LOWEST: negative, 0: usual, **named}
    for priority in named:
        above = min(priority + 1, 2**31 - 1)
        bands.setdefault(above, negative if above < 0 else usual)
    return dict(sorted(bands.items()))


def _bounded(ttl: Duration | None) -> Duration:
    return min(ttl or LONGEST_WAIT, LONGEST_WAIT)


class _Plugins:
    """Plugins by the names that references use; a name that no plugin has is a type with its defaults."""

    def __init__(self, config: EndpointPickerConfig) -> None:
        self._places = {one.effective_name: (index, one) for index, one in enumerate(config.plugins)}
        self.has_flow_control = feature_gates(config).get(FEATURE_GATE, False)
        self._detector = saturation_detector_name(config)

    def type_of(self, name: str) -> str:
        """The type of the plugin called ``name``."""
        return self._places[name][1].type if name in self._places else name

    @property
    def detector(self) -> tuple[int, PluginSpec | None]:
        """The plugin that measures how full engines are, and its index among all."""
        return self._places.get(self._detector, (-1, None))

    @property
    def detector_parameters(self) -> type[UtilizationParameters | ConcurrencyParameters]:
        """What that plugin takes."""
        is_concurrency = self.type_of(self._detector) == "concurrency-detector"
        return ConcurrencyParameters if is_concurrency else UtilizationParameters


def _band(priority: int, band: BandSection, plugins: _Plugins) -> PriorityBand:
    own = re.sub(r"[^a-z0-9]+", "-", band.priority_name.lower()).strip("-") if band.priority == priority else ""
    name = own or ("negative" if priority == _LOWEST else f"priority-{priority}")
    return PriorityBand(
        name=name,
        priority=priority,
        share=1.0,
        max_requests=int(band.max_requests or _BAND_REQUESTS),
        max_bytes=ByteSize(int(band.max_bytes)) if band.max_bytes else _BAND_BYTES,
        fairness=FAIRNESS.get(plugins.type_of(band.fairness_policy_ref), "GlobalStrict"),
        order=ORDERS.get(plugins.type_of(band.ordering_policy_ref), "FirstCome"),
    )


def _saturation(config: EndpointPickerConfig, plugins: _Plugins) -> SaturationSpec:
    _, plugin = plugins.detector
    given = (plugin and plugin.parameters) or {}
    parameters = msgspec.convert(given, plugins.detector_parameters)
    if isinstance(parameters, ConcurrencyParameters):
        mode = parameters.concurrency_mode
        return SaturationSpec(
            queue_depth=None,
            kv_usage=None,
            max_wait=None,
            max_requests=parameters.max_concurrency if mode != "tokens" else None,
            max_tokens=parameters.max_token_concurrency if mode != "requests" else None,
            headroom=parameters.headroom,
        )
    older = config.saturation_detector
    depth, usage = parameters.queue_depth_threshold, parameters.kv_cache_util_threshold
    if older is not None and plugin is None:
        depth, usage = older.queue_depth_threshold or depth, older.kv_cache_util_threshold or usage
    return SaturationSpec(queue_depth=max(1, round(depth)), kv_usage=usage, max_wait=None, headroom=parameters.headroom)


class UsageLimitPolicy(Protocol):
    """Changes flow control to have the ceilings of a policy."""

    def with_ceilings(self, control: FlowControl, priorities: Collection[int]) -> FlowControl:
        """``priorities``: those that requests are known to have."""
        ...


class StaticUsageLimit(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``static-usage-limit-policy``: one ceiling for all priorities.

    A threshold above 1 means the same as 1: beyond that no engine has capacity.
    """

    threshold: Annotated[float, msgspec.Meta(ge=0)] = 1.0

    def with_ceilings(self, control: FlowControl, priorities: Collection[int]) -> FlowControl:
        """Every band has the ceiling."""
        ceiling = min(1.0, self.threshold)
        return _with_ceilings(control, dict.fromkeys(priorities, ceiling), below=ceiling)


class PriorityHoldback(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``priority-holdback-policy``: lower priorities stop at lower ceilings, so that capacity is left for
    higher ones.

    The highest of N priorities has the ceiling ``maxCeiling``, the lowest ``minCeiling``. Between them, domain ``rank``
    goes down in equal steps, ``c_i = max - i * (max - min) / (N - 1)``; domain ``value`` follows the numbers, ``c =
    min + (p - lowest) / (highest - lowest) * (max - min)``. With domain ``explicit``, ``ceilings`` has them, and a
    priority that it does not name is never sent. The priorities are 0, those of ``priorityBands`` and those of
    InferenceObjectives; one of its own has ``maxCeiling``.
    """

    shape: Literal["linear"] | None = None
    domain: Literal["rank", "value", "explicit"] = "rank"
    min_ceiling: Annotated[float, msgspec.Meta(ge=0, lt=1)] | None = None
    max_ceiling: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    ceilings: dict[int, Share] = {}

    def __post_init__(self) -> None:
        """Raises ValueError where fields contradict each other."""
        if self.domain == "explicit":
            self._check_explicit()
            return
        if self.ceilings:
            raise ValueError("ceilings go with domain: explicit; remove them, or set that domain")
        if self.min_ceiling is None:
            raise ValueError("minCeiling is missing; write the ceiling of the lowest priority, such as 0.5")
        if self.min_ceiling >= self._highest:
            raise ValueError(f"minCeiling {self.min_ceiling:g} is not below maxCeiling {self._highest:g}")

    def _check_explicit(self) -> None:
        for name in ("shape", "min_ceiling", "max_ceiling"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name.replace('_c', 'C')} has no meaning with domain: explicit; remove it")
        if not self.ceilings:
            raise ValueError("ceilings are missing; domain: explicit needs one for each priority")
        ordered = sorted(self.ceilings.items(), reverse=True)
        for (higher, above), (lower, below) in itertools.pairwise(ordered):
            if below > above:
                raise ValueError(f"priority {lower} has a higher ceiling than priority {higher}; lower it")

    @property
    def _highest(self) -> float:
        return 1.0 if self.max_ceiling is None else self.max_ceiling

    def ceilings_of(self, priorities: Collection[int]) -> Mapping[int, float]:
        """The ceiling of each of ``priorities``."""
        if self.domain == "explicit":
            return {one: self.ceilings.get(one, 0.0) for one in priorities}
        ordered = sorted(priorities, reverse=True)
        top, spread = self._highest, self._highest - (self.min_ceiling or 0.0)
        if len(ordered) == 1:
            return {ordered[0]: top}
        if self.domain == "rank":
            return {one: top - index * spread / (len(ordered) - 1) for index, one in enumerate(ordered)}
        scale = ordered[0] - ordered[-1]
        return {one: top - (ordered[0] - one) / scale * spread for one in ordered}

    def with_ceilings(self, control: FlowControl, priorities: Collection[int]) -> FlowControl:
        """Bands below all known priorities have the lowest ceiling."""
        found = self.ceilings_of(priorities)
        return _with_ceilings(control, found, below=0.0 if self.domain == "explicit" else min(found.values()))


class SoftReflectiveCeiling(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``soft-reflective-ceiling-policy``: lower priorities slow down as engines fill, the highest never.

    The band of rank i of N (0: the highest; those that requests have come to) has the ceiling
    ``1 - i * saturation / (N - 1)``. At or above it, the band sends one request every
    ``round(saturation / (1 - saturation))`` ms, and none once all engines are full. The same as
    ``ceilings: SoftReflective`` in a ModelServer's ``flowControl``.
    """

    def with_ceilings(self, control: FlowControl, priorities: Collection[int]) -> FlowControl:
        """The bands' own ceilings stay at 1."""
        del priorities
        return msgspec.structs.replace(control, ceilings="SoftReflective")


class AgentSessionHeaders(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``agent-identity``: each session of an agent is a flow of its own in ``flowControl``.

    The first of these headers that a request has names its session: ``additionalSessionHeaders``,
    ``x-claude-code-session-id``, ``x-session-affinity``, ``session-id``, ``session_id``. A fairness ID takes
    precedence. Clients choose these names, so sessions divide the share of their tenant, and requests without a tenant
    count as one tenant.
    """

    additional_session_headers: tuple[NonEmpty, ...] = ()

    @property
    def headers(self) -> tuple[str, ...]:
        """All of them in order, in lower case."""
        return tuple(name.lower() for name in (*self.additional_session_headers, *SESSION_HEADERS))


POLICIES: Final[Mapping[str, type[StaticUsageLimit | PriorityHoldback | SoftReflectiveCeiling]]] = MappingProxyType(
    {
        "static-usage-limit-policy": StaticUsageLimit,
        "priority-holdback-policy": PriorityHoldback,
        "soft-reflective-ceiling-policy": SoftReflectiveCeiling,
    }
)


def check_usage_limits(config: EndpointPickerConfig) -> Iterator[Finding]:
    """The parameters of these plugins have the right shape, and the policy that is named is one."""
    for index, spec in enumerate(config.plugins):
        cls = AgentSessionHeaders if spec.type == AGENT_IDENTITY else POLICIES.get(spec.type)
        if cls is not None:
            for place, message in check_shape(spec.parameters or {}, cls):
                yield ("plugins", index, "parameters", *place), message
    section = config.flow_control
    name = "" if section is None else section.usage_limit_policy_plugin_ref or ""
    types = {spec.effective_name: spec.type for spec in config.plugins}
    if name and types.get(name, name) not in POLICIES:
        message = f"'{name}' is no usage limit policy; name a plugin of one of the types {', '.join(POLICIES)}"
        yield ("flowControl", "usageLimitPolicyPluginRef"), message


def with_usage_limits(
    control: FlowControl | None, config: EndpointPickerConfig, objectives: Collection[int] = ()
) -> FlowControl | None:
    """``control`` with the settings of these plugins. Expects a config in which ``check_usage_limits`` finds nothing.

    ``objectives``: the priorities of the InferenceObjectives that its requests may name. Each is a band of its own, as
    in llm-d, with the settings of the band that it would be in.
    """
    if control is None:
        return None
    for spec in config.plugins:
        if spec.type == AGENT_IDENTITY:
            control = msgspec.structs.replace(
                control, flow_headers=msgspec.convert(spec.parameters or {}, AgentSessionHeaders).headers
            )
    control = _with_bands(control, objectives)
    section = config.flow_control
    name = "" if section is None else section.usage_limit_policy_plugin_ref or ""
    if not name:
        return control
    # a name that no plugin has is a type with its defaults
    type_, parameters = next(
        ((one.type, one.parameters) for one in config.plugins if one.effective_name == name), (name, None)
    )
    policy: UsageLimitPolicy = msgspec.convert(
        # in JSON, priorities are text
        parameters or {},
        POLICIES[type_],
        str_keys=True,
    )
    named = () if section is None else (band.priority for band in section.priority_bands)
    return policy.with_ceilings(control, {0, *objectives, *named})


def _with_bands(control: FlowControl, objectives: Collection[int]) -> FlowControl:
    bands = {band.priority: band for band in control.bands}
    ranges = sorted(control.bands, key=lambda band: band.priority, reverse=True)
    for priority in sorted(set(objectives) - bands.keys()):
        like = next((band for band in ranges if band.priority <= priority), ranges[-1])
        bands[priority] = msgspec.structs.replace(like, name=f"priority-{priority}", priority=priority)
        # the band ends right above
        if priority < _HIGHEST and priority + 1 not in bands and priority + 1 not in objectives:
            rest = msgspec.structs.replace(like, name=f"priority-{priority + 1}", priority=priority + 1)
            bands[priority + 1] = rest
    if len(bands) == len(control.bands):
        return control
    return msgspec.structs.replace(control, bands=tuple(bands[priority] for priority in sorted(bands)))


def _with_ceilings(control: FlowControl, ceilings: Mapping[int, float], *, below: float) -> FlowControl:
    """A band whose lowest priority is not known has the ceiling of the next known one under it, or ``below``."""
    known = sorted(ceilings, reverse=True)

    def ceiling(priority: int) -> float:
        return next((ceilings[one] for one in known if one <= priority), below)

    bands = tuple(msgspec.structs.replace(band, ceiling=ceiling(band.priority)) for band in control.bands)
    return msgspec.structs.replace(control, bands=bands)

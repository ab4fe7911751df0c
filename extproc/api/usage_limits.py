# SPDX-License-Identifier: Apache-2.0
"""llm-d's flow control plugins that our FlowControl has as settings: usage limit policies, and agents' flows.

A usage limit policy gives each priority a ceiling: its requests are sent only while engines are less full.
"""

from __future__ import annotations

import itertools
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Final, Literal, Protocol

import msgspec

from extproc.api.schema import check_shape
from extproc.api.spec import NonEmpty

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from extproc.api.admission import FlowControl
    from extproc.api.errors import Finding
    from extproc.api.picker_config import EndpointPickerConfig

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]

# Headers in which agents name their sessions: Claude Code, OpenCode, Codex, older Codex.
SESSION_HEADERS: Final = ("x-claude-code-session-id", "x-session-affinity", "session-id", "session_id")
_HIGHEST: Final = 2**31 - 1


class UsageLimitPolicy(Protocol):
    """Changes flow control to have the ceilings of a policy."""

    def applied(self, control: FlowControl, priorities: Collection[int]) -> FlowControl:
        """``priorities``: those that requests are known to have."""
        ...


class StaticUsageLimit(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``static-usage-limit-policy``: one ceiling for all priorities.

    A threshold above 1 means the same as 1: beyond that no engine has room.
    """

    threshold: Annotated[float, msgspec.Meta(ge=0)] = 1.0

    def applied(self, control: FlowControl, priorities: Collection[int]) -> FlowControl:
        """Every band has the ceiling."""
        ceiling = min(1.0, self.threshold)
        return _with_ceilings(control, dict.fromkeys(priorities, ceiling), below=ceiling)


class PriorityHoldback(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``priority-holdback-policy``: lower priorities stop at lower ceilings, so that room is left for higher
    ones.

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

    def applied(self, control: FlowControl, priorities: Collection[int]) -> FlowControl:
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

    def applied(self, control: FlowControl, priorities: Collection[int]) -> FlowControl:
        """The bands' own ceilings stay at 1."""
        del priorities
        return msgspec.structs.replace(control, ceilings="SoftReflective")


class AgentIdentity(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``agent-identity``: each session of an agent is a flow of its own in ``flowControl``.

    The first of these headers that a request has names its session: ``additionalSessionHeaders``,
    ``x-claude-code-session-id``, ``x-session-affinity``, ``session-id``, ``session_id``. A fairness ID goes before it.
    Clients choose these names, so sessions divide the share of their tenant, and what does not name a tenant is one.
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
AGENT_IDENTITY: Final = "agent-identity"


def check_usage_limits(config: EndpointPickerConfig) -> Iterator[Finding]:
    """The parameters of these plugins have the right shape, and the policy that is named is one."""
    for index, spec in enumerate(config.plugins):
        cls = AgentIdentity if spec.type == AGENT_IDENTITY else POLICIES.get(spec.type)
        if cls is not None:
            for place, message in check_shape(spec.parameters or {}, cls):
                yield ("plugins", index, "parameters", *place), message
    section = config.flow_control
    name = "" if section is None else section.usage_limit_policy_plugin_ref or ""
    types = {spec.called: spec.type for spec in config.plugins}
    if name and types.get(name, name) not in POLICIES:
        message = f"'{name}' is no usage limit policy; name a plugin of one of the types {', '.join(POLICIES)}"
        yield ("flowControl", "usageLimitPolicyPluginRef"), message


def with_usage_limits(
    control: FlowControl | None, config: EndpointPickerConfig, objectives: Collection[int] = ()
) -> FlowControl | None:
    """``control`` with what these plugins say. Expects a config in which ``check_usage_limits`` finds nothing.

    ``objectives``: the priorities of the InferenceObjectives that its requests may name. Each is a band of its own, as
    in llm-d, with the settings of the band that it would be in.
    """
    if control is None:
        return None
    for spec in config.plugins:
        if spec.type == AGENT_IDENTITY:
            control = msgspec.structs.replace(
                control, flow_headers=msgspec.convert(spec.parameters or {}, AgentIdentity).headers
            )
    control = _with_bands(control, objectives)
    section = config.flow_control
    name = "" if section is None else section.usage_limit_policy_plugin_ref or ""
    if not name:
        return control
    # a name that no plugin has is a type with its defaults
    type_, parameters = next(((one.type, one.parameters) for one in config.plugins if one.called == name), (name, None))
    policy: UsageLimitPolicy = msgspec.convert(
        # in JSON, priorities are text
        parameters or {},
        POLICIES[type_],
        str_keys=True,
    )
    named = () if section is None else (band.priority for band in section.priority_bands)
    return policy.applied(control, {0, *objectives, *named})


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

# SPDX-License-Identifier: Apache-2.0
"""AutoscalingPolicy: how to scale, by strategies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

import msgspec

from controller.api.autoscaling import (
    Behavior,
    LatencyObjective,
    MetricTarget,
    Panic,
    ScaleToZero,
    Schedule,
    StalenessLimits,
)
from controller.api.statuses import AutoscalingPolicyStatus
from controller.api.strategies import StrategyType, installed_strategies
from extproc.api.quantities import Duration
from extproc.api.spec import CelRule, Metadata, Spec, list_map_keys

STRATEGIES: Final = installed_strategies()
"""By name, in the order of documents."""


def _field(name: str) -> str:
    """The field of ``Strategy`` that has the parameters of a strategy: ``spare_capacity`` for SpareCapacity."""
    return "".join(f"_{one.lower()}" if one.isupper() else one for one in name).lstrip("_")


class _Named(Spec, frozen=True):
    if TYPE_CHECKING:
        name: str

        def __init__(self, *, name: str, **parameters: Spec | None) -> None: ...

    @property
    def type(self) -> StrategyType:
        """The strategy's registered type."""
        return STRATEGIES[self.name]

    @property
    def parameters(self) -> Any:  # noqa: ANN401 - each strategy has its own
        """As they are written, or the defaults; None where it has none."""
        return getattr(self, _field(self.name), None) or self.type.defaults


def _strategy() -> type[_Named]:
    """A field for the parameters of each strategy."""
    with_parameters = {name: one for name, one in STRATEGIES.items() if one.defaults is not None}
    fields: list[Any] = [("name", Literal[tuple(STRATEGIES)])]
    fields += [(_field(name), type(one.defaults) | None, None) for name, one in with_parameters.items()]
    clauses = [f"``{_field(name)}``: {one.summary}." for name, one in with_parameters.items()]
    without = [f"``{name}`` {one.summary}." for name, one in STRATEGIES.items() if one.defaults is None]
    text = "One strategy. ``name``: which. The field of the same name has its parameters; left out, they have their"
    rules = tuple(
        CelRule(
            f"!has(self.{field}) || self.name == '{name}'",
            f"the field {field} has the parameters of the strategy {name}, not of another",
        )
        for name in with_parameters
        for field in (name[0].lower() + name[1:],)
    )
    namespace = {"CEL": rules, "__doc__": " ".join([text, "defaults.", *clauses, *without])}
    made = msgspec.defstruct(
        "Strategy", fields, bases=(_Named,), namespace=namespace, module=__name__, frozen=True, kw_only=True
    )
    assert issubclass(made, _Named)  # noqa: S101 - it is its base
    return made


if TYPE_CHECKING:
    Strategy = _Named
else:
    Strategy = _strategy()


class AutoscalingPolicySpec(Spec, frozen=True):
    """How to scale; one policy serves many bindings.

    ``strategies``: the largest recommendation scales out; replicas are removed only if all strategies agree.
    ``period``: time between two decisions; requests that wait for an engine cause a decision at once. ``metrics``:
    targets of the strategy ``Target``. ``objective``: latency objectives. ``behavior``: how fast replicas change.
    ``panic``: for steep rises. ``scale_to_zero``: whether and when the last replica is removed. ``schedules``: bounds
    by time. ``staleness``: maximum age of data. ``manual_hold``: how long replicas that another writer has set are left
    unchanged. ``drain``: how long engines of Deployments, StatefulSets and LeaderWorkerSets may finish running requests
    before replicas are removed; a ModelInfer has its own ``drainTimeout``. ``mode``: what is done with decisions: Auto
    writes replicas, ScaleUpOnly writes only increases, Recommend reports them in status and metrics, Export serves them
    to an HPA or KEDA, Paused makes none.
    """

    strategies: Annotated[
        tuple[Strategy, ...], msgspec.Meta(min_length=1, max_length=8, extra_json_schema=list_map_keys("name"))
    ] = (Strategy(name="Work"),)
    metrics: Annotated[
        tuple[MetricTarget, ...], msgspec.Meta(max_length=16, extra_json_schema=list_map_keys("name"))
    ] = ()
    objective: LatencyObjective | None = None
    behavior: Behavior = Behavior()
    panic: Panic | None = None
    scale_to_zero: ScaleToZero | None = None
    schedules: Annotated[tuple[Schedule, ...], msgspec.Meta(max_length=16)] = ()
    staleness: StalenessLimits = StalenessLimits()
    period: Duration = Duration("5s")
    manual_hold: Duration = Duration("10m")
    drain: Duration = Duration("5m")
    mode: Literal["Auto", "Recommend", "Export", "Paused", "ScaleUpOnly"] = "Auto"

    CEL: ClassVar = tuple(
        CelRule(
            f"!has(self.strategies) || !self.strategies.exists(one, one.name == '{name}') || has(self.{type_.needs})",
            f"the strategy {name} needs {'an ' if type_.needs == 'objective' else ''}{type_.needs}",
        )
        for name, type_ in STRATEGIES.items()
        if type_.needs
    )


class AutoscalingPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """An AutoscalingPolicy object."""

    metadata: Metadata
    spec: AutoscalingPolicySpec = AutoscalingPolicySpec()
    status: AutoscalingPolicyStatus = AutoscalingPolicyStatus()

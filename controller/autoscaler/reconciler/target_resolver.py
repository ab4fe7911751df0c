# SPDX-License-Identifier: Apache-2.0
"""The targets of a binding: their objects, pods and ModelServers, or what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from controller.api.autoscaling_binding import ScaleTarget
from controller.autoscaler.reconciler.bindings import ScalableRef, other_annotated_owner, prior_claimant
from controller.autoscaler.reconciler.informers import is_foreign_kind
from controller.autoscaler.reconciler.scalables import Scalable, ScalableKind
from controller.kube.api_resources import parse_selector
from controller.kube.pod_views import PodView

if TYPE_CHECKING:
    from collections.abc import Iterable

    from controller.autoscaler.reconciler.bindings import BindingView
    from controller.autoscaler.reconciler.informers import ScalingInformers

# Reasons of conditions, the gravest first.
PROBLEMS: Final = (
    "Conflict",
    "WrongMetricTarget",
    "OtherAutoscaler",
    "UnknownKind",
    "TargetForbidden",
    "TargetNotFound",
    "SelectorUnknown",
    "ServerNotFound",
)


class TargetProblem(msgspec.Struct, frozen=True):
    """``reason``: one of ``PROBLEMS``. ``message``: for people. ``forbids``: the replicas must not be written."""

    reason: str
    message: str
    forbids: bool = True


class ResolvedTarget(msgspec.Struct, frozen=True, kw_only=True):
    """One target. ``found`` and ``kind``: None if the object does not exist or is unknown. ``server``: the key of its
    ModelServer; empty if unknown. ``twins``: the keys of those of the same pods at other ports, such as that of gRPC.
    """

    spec: ScaleTarget
    place: ScalableRef
    kind: ScalableKind | None = None
    found: Scalable | None = None
    pods: Sequence[PodView] = ()
    server: str = ""
    twins: tuple[str, ...] = ()
    problem: TargetProblem | None = None

    @property
    def may_write(self) -> bool:
        """Whether its replicas may be written."""
        return self.found is not None and (self.problem is None or not self.problem.forbids)


def server_keys(targets: Iterable[ResolvedTarget]) -> list[str]:
    """The keys of all ModelServers whose demand is theirs."""
    return sorted({key for one in targets if one.server for key in (one.server, *one.twins)})


class ResolvedTargets(NamedTuple):
    """The targets of a binding, in their order, and the inputs of their resolution, which is deterministic."""

    view: BindingView
    versions: tuple[int, ...]
    targets: tuple[ResolvedTarget, ...]


class TargetResolver:
    """Finds what a binding's targets refer to."""

    def __init__(self, informers: ScalingInformers) -> None:
        self._informers = informers
        self._version = -1
        # by target: the labels of its pods, and the ModelServers that select them
        self._servers: dict[ScalableRef, tuple[Mapping[str, str], tuple[str, ...]]] = {}

    def resolve_targets(self, view: BindingView, before: ResolvedTargets | None) -> ResolvedTargets:
        """All targets of a binding without mistakes. ``before``: what this returned last."""
        versions = self._informers.target_change_token()
        if before is not None and before.view is view and before.versions == versions:
            return before
        specs = () if view.binding is None else view.binding.spec.targets
        targets = tuple(self._one(view, spec, place) for spec, place in zip(specs, view.places, strict=True))
        return ResolvedTargets(view, versions, targets)

    def _one(self, view: BindingView, spec: ScaleTarget, place: ScalableRef) -> ResolvedTarget:
        if is_foreign_kind(place):
            read = self._informers.other_kinds.last_read(place)
            if read.kind is None or read.found is None:
                problem = None if read.lacks is None else TargetProblem(*read.lacks)
                return ResolvedTarget(spec=spec, place=place, kind=read.kind, problem=problem)
            return self._found(view, spec, place, read.kind, read.found)
        kind = self._informers.scalable_kind(place)
        if kind is None:
            message = f"{spec.ref.api_version} {spec.ref.kind} cannot be scaled here"
            return ResolvedTarget(spec=spec, place=place, problem=TargetProblem("UnknownKind", message))
        found = self._informers.scalable(kind, place)
        if found is None or found.is_going:
            message = f"there is no {place[2]} {place[3]}"
            if spec.role is not None:
                message += f": the ModelInfer {spec.ref.name} needs a role {spec.role} with scalable: true"
            return ResolvedTarget(spec=spec, place=place, kind=kind, problem=TargetProblem("TargetNotFound", message))
        return self._found(view, spec, place, kind, found)

    def _found(
        self, view: BindingView, spec: ScaleTarget, place: ScalableRef, kind: ScalableKind, found: Scalable
    ) -> ResolvedTarget:
        pods = _selected(self._informers.pods.index.find_pods(view.namespace, found.selector), found)
        server, *twins = self._of_pods(view.namespace, spec, place, found) or ("",)
        return ResolvedTarget(
            spec=spec,
            place=place,
            kind=kind,
            found=found,
            pods=pods,
            server=server,
            twins=tuple(twins),
            problem=self._problem(view, place, found, server),
        )

    def _problem(self, view: BindingView, place: ScalableRef, found: Scalable, server: str) -> TargetProblem | None:
        name = f"{place[2]} {place[3]}"
        others = [one for one in self._informers.target_claims(place) if one != view.claim]
        first = prior_claimant(view.claim, others) or (
            "" if others else other_annotated_owner(found, view.claim, self._informers.claim_exists)
        )
        if first:
            return TargetProblem(
                "Conflict", f"{name} is scaled by the AutoscalingPolicyBinding {first}, which is older"
            )
        wrong = self._informers.hpa_misusing_metric(place)
        if wrong:
            message = (
                f"the HorizontalPodAutoscaler {wrong} scales {name} by our metric with a target of type Value, and so "
                "without end; write AverageValue 1"
            )
            return TargetProblem("WrongMetricTarget", message)
        other = self._informers.other_autoscaler(place)
        if other:
            return TargetProblem(
                "OtherAutoscaler", f"{name} is scaled by the {other}; delete one, or use the mode Export"
            )
        if server and not self._informers.has_server(server):
            message = f"there is no ModelServer {server.partition('/')[2]}, which the field server of the target names"
            return TargetProblem("ServerNotFound", message, forbids=False)
        if not server:
            message = f"no ModelServer selects the pods of {name}; name one in the target's field server"
            return TargetProblem("ServerNotFound", message, forbids=False)
        return None

    def _of_pods(self, namespace: str, spec: ScaleTarget, place: ScalableRef, found: Scalable) -> tuple[str, ...]:
        """The ModelServer of the target, then its twins; empty if none is known."""
        if spec.server is not None:
            return (f"{namespace}/{spec.server}",)
        if self._version != self._informers.servers_version:
            self._servers.clear()
            self._version = self._informers.servers_version
        known = self._servers.get(place)
        if known is None or known[0] != found.template:
            templates = [one for one in (found.template, *found.roles.values()) if one]
            known = found.template, selecting_servers(self._informers, namespace, templates)
            self._servers[place] = known
        return known[1]


def selecting_servers(
    informers: ScalingInformers, namespace: str, templates: Iterable[Mapping[str, str]]
) -> tuple[str, ...]:
    """The ModelServer with the most labels among those that select pods with the labels of ``templates``; the first by
    name among equals. Then those with the same labels at other ports. Empty if there is none.
    """
    fitting = {
        key: selector for labels in templates for key, selector in informers.servers_selecting(namespace, labels)
    }
    if not fitting:
        return ()
    server = min(fitting, key=lambda key: (-len(fitting[key]), key))
    same = (key for key, selector in fitting.items() if selector == fitting[server])
    return server, *sorted(key for key in same if informers.port_of_server(key) != informers.port_of_server(server))


def _selected(pods: Sequence[PodView], found: Scalable) -> Sequence[PodView]:
    """Those that the whole selector matches."""
    if not found.selects:
        return pods
    matches = parse_selector(found.selects)
    return [one for one in pods if matches(one.labels)]

# SPDX-License-Identifier: Apache-2.0
"""Desired replicas of bindings, from their statuses, which every replica of the manager follows."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.kube.api_resources import MODEL_INFERS, Object, key_of
from controller.models.model_infer.names import role_scale_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

DESIRED: Final = "wva_desired_replicas"
CURRENT: Final = "wva_current_replicas"
RATIO: Final = "wva_desired_ratio"
METRICS: Final = (DESIRED, CURRENT, RATIO)


class ExportedTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A target. ``variant``: the name of the object that is scaled. ``desired``: replicas that it should have;
    ``current``: that it has.
    """

    namespace: str
    binding: str
    target: str
    variant: str
    accelerator: str
    desired: int
    current: int

    @property
    def labels(self) -> Mapping[str, str]:
        """Labels of the gauges that identify the source: all but the model's name."""
        return {
            "variant_name": self.variant,
            "namespace": self.namespace,
            "accelerator_type": self.accelerator,
            "binding": self.binding,
            "target": self.target,
        }

    def value(self, metric: str) -> float:
        """Of one of ``METRICS``."""
        if metric == RATIO:
            return self.desired / self.current if self.current else float(self.desired)
        return float(self.desired if metric == DESIRED else self.current)


def exported_targets(binding: Object) -> Iterator[ExportedTarget]:
    """Targets about which something was decided."""
    namespace, _, name = key_of(binding).partition("/")
    targets = {one.get("name"): one for one in (binding.get("status") or {}).get("targets") or ()}
    for index, target in enumerate((binding.get("spec") or {}).get("targets") or ()):
        reference: Mapping[str, Any] = target.get("ref") or {}
        key = target.get("name") or reference.get("name") or str(index)
        status = targets.get(key) or {}
        if status.get("desired") is None:
            continue
        yield ExportedTarget(
            namespace=namespace,
            binding=name,
            target=key,
            variant=_variant(reference, target.get("role")),
            accelerator=target.get("accelerator") or "",
            desired=int(status["desired"]),
            current=int(status.get("current") or 0),
        )


class ExportedTargets:
    """Exported metrics of all bindings. Values that a binding's status lacks for a while, as after a restart of the
    manager, are kept: other autoscalers see no gap. ``changed``: called with a binding's key and its targets, none once
    it is gone.
    """

    def __init__(self, changed: Callable[[str, tuple[ExportedTarget, ...] | None], None] = lambda _, __: None) -> None:
        self._by_binding: dict[str, dict[str, ExportedTarget]] = {}
        self._changed = changed

    def set_binding(self, key: str, binding: Object | None) -> None:
        """Add or replace a binding; None removes it."""
        if binding is None:
            self._by_binding.pop(key, None)
            self._changed(key, None)
            return
        known = self._by_binding.get(key, {})
        names = {target.get("name") for target in (binding.get("spec") or {}).get("targets") or ()}
        kept = {name: one for name, one in known.items() if name in names}
        now = kept | {one.target: one for one in exported_targets(binding)}
        if now != known:
            self._by_binding[key] = now
            self._changed(key, tuple(now.values()))

    def in_namespace(self, namespace: str) -> Iterable[ExportedTarget]:
        """Those of a namespace."""
        return [
            one
            for key, several in self._by_binding.items()
            if key.partition("/")[0] == namespace
            for one in several.values()
        ]


def _variant(reference: Mapping[str, Any], role: str | None) -> str:
    """The name of the object with the replicas: a role of a ModelInfer has one of its own."""
    name = str(reference.get("name", ""))
    return role_scale_name(name, role) if role and reference.get("kind") == MODEL_INFERS.kind else name


class DesiredReplicas(msgspec.Struct, frozen=True):
    """``desired``: replicas of the target. ``is_active``: whether there should be any at all: with False KEDA goes to
    zero after its ``cooldownPeriod``.
    """

    desired: int
    is_active: bool


class DecisionMissing(Exception):
    """There is no such binding or target, or no decision about it yet; the message has which."""


def desired_by_target(desired: Mapping[str, int | None]) -> dict[str, DesiredReplicas]:
    """By target, as far as it was decided how many replicas each should have."""
    return {name: DesiredReplicas(one, is_active=one > 0) for name, one in desired.items() if one is not None}


class DesiredReplicasStore:
    """Desired replicas by binding, set from the bindings' statuses and read by KEDA's streams."""

    def __init__(self) -> None:
        self._by_binding: dict[str, Mapping[str, DesiredReplicas]] = {}
        # readers that wait for a change, by binding
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}

    def set_desired(self, binding: str, targets: Mapping[str, DesiredReplicas]) -> None:
        """What was decided about a binding, by target."""
        if self._by_binding.get(binding) != targets:
            self._by_binding[binding] = dict(targets)
            self._wake(binding)

    def forget(self, binding: str) -> None:
        """The binding is gone, or no longer ours to decide about."""
        if self._by_binding.pop(binding, None) is not None:
            self._wake(binding)

    def clear(self) -> None:
        """This replica does not lead any more."""
        self._by_binding.clear()
        for binding in list(self._waiting):
            self._wake(binding)

    def last_decision(self, binding: str, target: str) -> DesiredReplicas:
        """The last decision; ``target`` may be empty if there is only one. Raises Unknown."""
        targets = self._by_binding.get(binding)
        if targets is None:
            raise DecisionMissing(f"there is no AutoscalingPolicyBinding {binding}, or nothing is decided about it yet")
        if not target and len(targets) > 1:
            raise DecisionMissing(
                f"{binding} has the targets {', '.join(sorted(targets))}; write one as 'target' into the metadata"
            )
        name = target or next(iter(targets), "")
        if name not in targets:
            raise DecisionMissing(f"{binding} has no target {target}, or nothing is decided about it yet")
        return targets[name]

    async def wait_for_change(self, last: DesiredReplicas | None, binding: str, target: str) -> DesiredReplicas | None:
        """Wait until the desired replicas differ from ``last``, and return them; None: there is no decision."""
        while True:
            try:
                found = self.last_decision(binding, target)
            except DecisionMissing:
                found = None
            if found != last:
                return found
            await self._news(binding)

    async def _news(self, binding: str) -> None:
        """Wait for the next change of a binding; changes of others do not wake it."""
        changed = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(binding, set()).add(changed)
        try:
            await changed
        finally:
            waiting = self._waiting.get(binding, set())
            waiting.discard(changed)
            if not waiting:
                self._waiting.pop(binding, None)

    def _wake(self, binding: str) -> None:
        for changed in self._waiting.pop(binding, ()):
            if not changed.done():
                changed.set_result(None)

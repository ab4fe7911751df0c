# SPDX-License-Identifier: Apache-2.0
"""Desired replicas of bindings, from their statuses, which every replica of the manager follows."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.kube.resources import MODEL_INFERS, Object, key_of
from controller.models.model_infer.names import role_scale_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

DESIRED: Final = "wva_desired_replicas"
CURRENT: Final = "wva_current_replicas"
RATIO: Final = "wva_desired_ratio"
METRICS: Final = (DESIRED, CURRENT, RATIO)


class Exported(msgspec.Struct, frozen=True, kw_only=True):
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
        """Those of the gauges, but for the model's name, and those that say where it comes from."""
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


def exported_of(binding: Object) -> Iterator[Exported]:
    """Targets about which something was decided."""
    namespace, _, name = key_of(binding).partition("/")
    said = {one.get("name"): one for one in (binding.get("status") or {}).get("targets") or ()}
    for index, target in enumerate((binding.get("spec") or {}).get("targets") or ()):
        reference: Mapping[str, Any] = target.get("ref") or {}
        key = target.get("name") or reference.get("name") or str(index)
        status = said.get(key) or {}
        if status.get("desired") is None:
            continue
        yield Exported(
            namespace=namespace,
            binding=name,
            target=key,
            variant=_variant(reference, target.get("role")),
            accelerator=target.get("accelerator") or "",
            desired=int(status["desired"]),
            current=int(status.get("current") or 0),
        )


class Exports:
    """All of them. What a binding does not say for a while, as after a restart of the manager, stays what it was: other
    autoscalers see no gap. ``changed``: called with a binding's key and its targets, none once it is gone.
    """

    def __init__(self, changed: Callable[[str, tuple[Exported, ...] | None], None] = lambda _, __: None) -> None:
        self._by_binding: dict[str, dict[str, Exported]] = {}
        self._changed = changed

    def put(self, key: str, binding: Object | None) -> None:
        """A binding as last heard; None once it is gone."""
        if binding is None:
            self._by_binding.pop(key, None)
            self._changed(key, None)
            return
        known = self._by_binding.get(key, {})
        names = {target.get("name") for target in (binding.get("spec") or {}).get("targets") or ()}
        kept = {name: one for name, one in known.items() if name in names}
        now = kept | {one.target: one for one in exported_of(binding)}
        if now != known:
            self._by_binding[key] = now
            self._changed(key, tuple(now.values()))

    def of(self, namespace: str) -> Iterable[Exported]:
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


class Wanted(msgspec.Struct, frozen=True):
    """``desired``: replicas of the target. ``is_active``: whether there should be any at all: with False KEDA goes to
    zero after its ``cooldownPeriod``.
    """

    desired: int
    is_active: bool


class Unknown(Exception):
    """There is no such binding or target, or no decision about it yet; the message says which."""


def wanted_of(desired: Mapping[str, int | None]) -> dict[str, Wanted]:
    """By target, as far as it was decided how many replicas each should have."""
    return {name: Wanted(one, is_active=one > 0) for name, one in desired.items() if one is not None}


class Decisions:
    """Told by what follows the bindings' statuses, asked by KEDA's streams; as many as there are bindings, and
    forgotten with them.
    """

    def __init__(self) -> None:
        self._by_binding: dict[str, Mapping[str, Wanted]] = {}
        # those who wait for news, by binding
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}

    def tell(self, binding: str, targets: Mapping[str, Wanted]) -> None:
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

    def wanted(self, binding: str, target: str) -> Wanted:
        """The last decision; ``target`` may be empty if there is only one. Raises Unknown."""
        targets = self._by_binding.get(binding)
        if targets is None:
            raise Unknown(f"there is no AutoscalingPolicyBinding {binding}, or nothing is decided about it yet")
        if not target and len(targets) > 1:
            raise Unknown(
                f"{binding} has the targets {', '.join(sorted(targets))}; write one as 'target' into the metadata"
            )
        name = target or next(iter(targets), "")
        if name not in targets:
            raise Unknown(f"{binding} has no target {target}, or nothing is decided about it yet")
        return targets[name]

    async def other_than(self, last: Wanted | None, binding: str, target: str) -> Wanted | None:
        """Until what is known differs from ``last``: what it is then; None: nothing is known."""
        while True:
            try:
                found = self.wanted(binding, target)
            except Unknown:
                found = None
            if found != last:
                return found
            await self._news(binding)

    async def _news(self, binding: str) -> None:
        """Until something is told of a binding: news of another one wake nobody."""
        told = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(binding, set()).add(told)
        try:
            await told
        finally:
            waiting = self._waiting.get(binding, set())
            waiting.discard(told)
            if not waiting:
                self._waiting.pop(binding, None)

    def _wake(self, binding: str) -> None:
        for told in self._waiting.pop(binding, ()):
            if not told.done():
                told.set_result(None)

# SPDX-License-Identifier: Apache-2.0
"""What bindings say that their targets should have: their statuses, which every replica of the manager hears."""

from __future__ import annotations

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

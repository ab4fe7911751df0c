# SPDX-License-Identifier: Apache-2.0
"""What a schema cannot say of our kinds: mistakes are refused, and what another object may still mend is warned of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.api.autoscaling_binding import AutoscalingPolicyBinding
from controller.api.autoscaling_mistakes import schedule_mistakes
from controller.api.autoscaling_policy import AutoscalingPolicy, AutoscalingPolicySpec
from controller.api.model import Model, ModelTemplate
from controller.api.model_infer import ModelInfer
from controller.api.model_infer_mistakes import mistakes as model_infer_mistakes
from controller.api.serving_runtime import ServingRuntime, ServingRuntimeSpec
from controller.gateway.compile.pools import PREFIX
from controller.gateway.compile.servers import picker_of
from controller.gateway.compile.sources import source_of
from controller.models.runtimes.mistakes import mistakes as model_mistakes
from controller.models.runtimes.settings import NAMES, unknown_settings
from controller.webhooks.admission.metrics import metric_warnings
from controller.webhooks.admission.references import (
    budget_warnings,
    picker_warnings,
    policy_warnings,
    route_warnings,
    users_of,
    without_policy,
)
from controller.webhooks.admission.reviews import Object, Review, Verdict
from extproc.api.quantities import decode_quantity

if TYPE_CHECKING:
    from controller.webhooks.admission.references import Known
    from extproc.api.picker_config import PickerCheck

_DOCUMENTS: Final = frozenset({"GatewayConfig", "ModelServer", "ModelRoute", "ModelAccessPolicy"})
_OTHERS: Final[Mapping[str, type]] = MappingProxyType(
    {
        "AutoscalingPolicy": AutoscalingPolicy,
        "AutoscalingPolicyBinding": AutoscalingPolicyBinding,
        "ClusterServingRuntime": ServingRuntime,
        "Model": Model,
        "ModelInfer": ModelInfer,
        "ModelTemplate": ModelTemplate,
        "ServingRuntime": ServingRuntime,
    }
)
# Fields that say what an object asks for; all else, such as labels and finalizers, may change in spite of mistakes.
_ASKING: Final = ("spec", "data")


def counted_as(kind: str) -> str:
    """``kind`` in metrics. Whoever reaches the server may write anything: unknown kinds share one name."""
    return kind if kind in _DOCUMENTS or kind in _OTHERS or kind == "ConfigMap" else "other"


def judge(review: Review, known: Known, check_picker: PickerCheck) -> Verdict:
    """``known``: the objects of the cluster, by kind and key, as they were last heard."""
    if review.new is None:
        return Verdict(warnings=tuple(users_of(review.kind.kind, review.key, known)))
    mistakes = list(_mistakes(review, review.new, known, check_picker))
    warnings = list(_warnings(review.kind.kind, review.key, review.new, known, check_picker))
    if mistakes and _asks_for_something_new(review):
        return Verdict(refused="; ".join(mistakes), warnings=tuple(warnings))
    return Verdict(warnings=(*mistakes, *warnings))


def _asks_for_something_new(review: Review) -> bool:
    """Whoever only labels an object, or takes off a finalizer, must be able to, whatever is wrong with the rest."""
    old, new = review.old or {}, review.new or {}
    if (new.get("metadata") or {}).get("deletionTimestamp"):
        return False
    return review.operation == "CREATE" or any(old.get(field) != new.get(field) for field in _ASKING)


def _mistakes(review: Review, thing: Object, known: Known, check_picker: PickerCheck) -> Iterator[str]:
    kind = review.kind.kind
    if kind in _DOCUMENTS:
        # a name that the server is still to make is not there yet
        named = {**thing, "metadata": {"name": "generated", "namespace": review.namespace, **thing["metadata"]}}
        yield from (one for one in [source_of(named).complaint()] if one)
    elif kind in _OTHERS:
        yield from _wrong(kind, review.name or "generated", thing)
    elif kind == "ConfigMap":
        yield from (one for one in [picker_of(review.key, thing, check_picker).problem] if one)
    if kind == "ModelServer" and review.name.startswith(PREFIX):
        yield f"names that begin with '{PREFIX}' stand for InferencePools; use another name"
    if kind == "ModelRoute":
        yield from _repeated_names(thing)
    if kind == "AutoscalingPolicyBinding":
        yield from _second_owners(review.key, review.namespace, thing, known)


def _wrong(kind: str, name: str, thing: Object) -> Iterator[str]:
    """The first difference in shape, in the decoder's words: the schema has found most of them before; or what it
    means.
    """
    try:
        # conditions of the status have times of their own form
        made: Any = msgspec.convert(
            {"metadata": {"name": name}, "spec": thing.get("spec") or {}}, _OTHERS[kind], dec_hook=decode_quantity
        )
    except (msgspec.ValidationError, ValueError) as error:
        yield f"the object has a mistake: {error}"
        return
    if kind == "Model" and not made.spec.base_refs:
        # what stands in base references may mend or make mistakes: the Model's status tells those
        yield from model_mistakes(name, made.spec)
    elif kind == "ModelInfer":
        yield from model_infer_mistakes(made)
    elif isinstance(made.spec, AutoscalingPolicySpec):
        yield from schedule_mistakes(made.spec.schedules)
    elif isinstance(made.spec, ServingRuntimeSpec):
        for one in unknown_settings(made.spec.arguments):
            yield f"'{one}' in arguments is no setting; there are: {', '.join(sorted(NAMES))}"


def _repeated_names(route: Object) -> Iterator[str]:
    names = names_of(route)
    for name in sorted({one for one in names if names.count(one) > 1}):
        yield f"'{name}' is there twice among modelName and loraAdapters; write it once"


def names_of(route: Object) -> list[str]:
    """What clients may ask for of a ModelRoute."""
    spec = route.get("spec") or {}
    own = [spec["modelName"]] if isinstance(spec.get("modelName"), str) else []
    return [*own, *(one for one in spec.get("loraAdapters") or () if isinstance(one, str))]


def _second_owners(key: str, namespace: str, binding: Object, known: Known) -> Iterator[str]:
    """Two that set the replicas of one thing would take turns for ever."""
    owners: dict[tuple[Any, ...], str] = {}
    for other, thing in known.get("AutoscalingPolicyBinding", {}).items():
        if other != key and (thing["metadata"].get("namespace") or "") == namespace:
            owners.update(dict.fromkeys((_scaled(one) for one in _targets(thing)), f"AutoscalingPolicyBinding {other}"))
    for target in _targets(binding):
        what = _scaled(target)
        if what in owners:
            name = " ".join(str(one) for one in what[1:] if one)
            yield f"{name} is scaled by {owners[what]} already; one thing has one owner"
        owners.setdefault(what, "another target of this object")


def _targets(binding: Object) -> list[Mapping[str, Any]]:
    targets = (binding.get("spec") or {}).get("targets") or ()
    return [one for one in targets if isinstance(one, Mapping) and isinstance(one.get("ref"), Mapping)]


def _scaled(target: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a target scales, of its namespace: API group, kind, name and, of a ModelInfer, role."""
    ref = target["ref"]
    group = str(ref.get("apiVersion", "attache.dev/v1alpha1")).rpartition("/")[0]
    return group, ref.get("kind"), ref.get("name"), target.get("role")


def _warnings(kind: str, key: str, thing: Object, known: Known, check_picker: PickerCheck) -> Iterator[str]:
    namespace = key.partition("/")[0]
    checks: Mapping[str, Callable[[], Iterator[str]]] = {
        "ModelRoute": lambda: route_warnings(key, thing, known, names_of),
        "ModelServer": lambda: picker_warnings(namespace, thing, known, check_picker),
        "ModelAccessPolicy": lambda: policy_warnings(namespace, thing, known),
        "AutoscalingPolicy": lambda: metric_warnings(thing.get("spec") or {}),
        "AutoscalingPolicyBinding": lambda: _binding_warnings(namespace, thing, known),
        "Model": lambda: without_policy(
            namespace, ((thing.get("spec") or {}).get("autoscaling") or {}).get("policyRef"), known
        ),
    }
    if kind in checks:
        yield from checks[kind]()


def _binding_warnings(namespace: str, binding: Object, known: Known) -> Iterator[str]:
    yield from without_policy(namespace, (binding.get("spec") or {}).get("policyRef"), known)
    yield from budget_warnings(binding)

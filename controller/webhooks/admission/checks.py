# SPDX-License-Identifier: Apache-2.0
"""Checks of objects as they are applied: mistakes are refused; those that another object may fix cause warnings.

Source of AdmissionReview: ``admission.k8s.io/v1`` in ``k8s.io/api/admission/v1/types.go``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from controller.api.autoscaling import GATEWAY_METRICS, schedule_mistakes
from controller.api.autoscaling_policy import STRATEGIES, AutoscalingPolicySpec
from controller.api.model_infer import validation_errors as model_infer_mistakes
from controller.api.serving_runtime import ServingRuntimeSpec
from controller.api.shared_types import matches_accelerator
from controller.gateway.compile.inference_pools import PREFIX
from controller.gateway.compile.model_servers import LABEL, compile_picker
from controller.gateway.compile.source_objects import decode_source
from controller.kube.custom_resources import GATEWAY_KINDS, KINDS
from controller.models.runtimes.engine_settings import NAMES, unknown_settings
from controller.models.runtimes.validation import validation_errors as model_mistakes
from extproc.api.quantities import decode_quantity
from extproc.api.spec import namespace_of, object_key

if TYPE_CHECKING:
    from extproc.api.picker_config import PickerConfigChecker

API_VERSION: Final = "admission.k8s.io/v1"
# An API server cuts warnings at 256 characters, and all of them together at 4,096.
_LONGEST_WARNING: Final = 256
_MOST_WARNINGS: Final = 12
Operation = Literal["CREATE", "UPDATE", "DELETE", "CONNECT"]
Object = Mapping[str, Any]
# Objects by kind and key.
Known = Mapping[str, Mapping[str, Mapping[str, Any]]]
_POLICY_TARGETS: Final = frozenset({"GatewayConfig", "ModelRoute", "ModelServer"})
_DOCUMENTS: Final = frozenset(kind.name for kind in GATEWAY_KINDS)
_OTHERS: Final[Mapping[str, type]] = MappingProxyType(
    {kind.name: kind.document for kind in KINDS if kind.is_reviewed and kind not in GATEWAY_KINDS}
)
# Fields with an object's desired state; other fields, such as labels and finalizers, may change in spite of mistakes.
_ASKING: Final = ("spec", "data")


class _Kind(msgspec.Struct, frozen=True):
    kind: str


class AdmissionRequest(msgspec.Struct, frozen=True, rename="camel"):
    """The admission request. ``new`` and ``old``: the object after and before; None if there is none."""

    uid: str
    kind: _Kind
    operation: Operation
    name: str = ""
    namespace: str = ""
    new: Object | None = msgspec.field(default=None, name="object")
    old: Object | None = msgspec.field(default=None, name="oldObject")

    @property
    def key(self) -> str:
        """``namespace/name``; the name is missing before the server has generated it."""
        return f"{self.namespace}/{self.name}"


class AdmissionVerdict(msgspec.Struct, frozen=True):
    """``refused``: why the object is refused, empty if it is admitted. ``warnings``: shown to the user."""

    refused: str = ""
    warnings: tuple[str, ...] = ()


class _AdmissionReview(msgspec.Struct, frozen=True):
    request: AdmissionRequest


_DECODER: Final = msgspec.json.Decoder(_AdmissionReview)


def read_review(body: bytes) -> AdmissionRequest:
    """Raises msgspec.DecodeError if ``body`` is no AdmissionReview."""
    return _DECODER.decode(body).request


def admission_response(review: AdmissionRequest, verdict: AdmissionVerdict) -> bytes:
    """The body of the answer."""
    response: dict[str, Any] = {"uid": review.uid, "allowed": not verdict.refused}
    if verdict.refused:
        response["status"] = {"code": 422, "reason": "Invalid", "message": verdict.refused}
    if verdict.warnings:
        response["warnings"] = [_cut(one) for one in verdict.warnings[:_MOST_WARNINGS]]
    return msgspec.json.encode({"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response})


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_WARNING else f"{text[: _LONGEST_WARNING - 3]}..."


def route_warnings(key: str, route: Object, known: Known) -> Iterator[str]:
    """ModelServers that are not there, names that another route has, and rules that are never reached."""
    servers = known.get("ModelServer", {})
    for name in dict.fromkeys(_servers_of(route)):
        if object_key(namespace_of(key), name) not in servers:
            yield (
                f"there is no ModelServer '{name}' in this namespace yet; its requests are answered 503 until there is"
            )
    yield from _contested(key, route, known)
    yield from _unreached(_rules(route))


def _rules(route: Object) -> list[Mapping[str, Any]]:
    rules = (route.get("spec") or {}).get("rules") or ()
    return [one for one in rules if isinstance(one, Mapping)]


def _servers_of(route: Object) -> Iterator[str]:
    for rule in _rules(route):
        for target in rule.get("targetModels") or ():
            if isinstance(target, Mapping) and isinstance(target.get("modelServerName"), str):
                yield target["modelServerName"]


def _contested(key: str, route: Object, known: Known) -> Iterator[str]:
    names = set(route_model_names(route))
    for other, thing in known.get("ModelRoute", {}).items():
        shared = sorted(names & set(route_model_names(thing)))
        if other == key or not shared:
            continue
        quoted = ", ".join(f"'{name}'" for name in shared)
        if _age(thing) < _age(route):
            yield f"{quoted} belongs to ModelRoute {other}, which is older; a gateway of both does not serve this route"
        else:
            yield f"a gateway that serves ModelRoute {other}, which is younger, too will serve that no more: {quoted}"


def _age(route: Object) -> tuple[str, str]:
    """Age as the gateway role compares it; an object that is only being created is the youngest."""
    metadata = route.get("metadata") or {}
    return metadata.get("creationTimestamp") or "9", f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"


def _unreached(rules: list[Mapping[str, Any]]) -> Iterator[str]:
    """Rules after one without a match are a mistake, and refused."""
    matches = [rule.get("modelMatch") for rule in rules]
    for number, match in enumerate(matches):
        if match and match in matches[:number]:
            yield f"spec.rules[{number}] is never reached: spec.rules[{matches.index(match)}] has the same match"


def picker_warnings(namespace: str, server: Object, known: Known, check_picker: PickerConfigChecker) -> Iterator[str]:
    """The ConfigMap of a ModelServer's EndpointPickerConfig: it may be missing or wrong."""
    name = (server.get("spec") or {}).get("pickerConfig")
    if not isinstance(name, str):
        return
    key = object_key(namespace, name)
    thing = known.get("ConfigMap", {}).get(key)
    if thing is None:
        yield (
            f"this namespace has no ConfigMap '{name}' with the label {LABEL} yet; the default picker is used until"
            " then"
        )
    elif problem := compile_picker(key, thing, check_picker).problem:
        yield f"the ConfigMap '{name}' cannot be used, so the default picker is: {problem}"


def access_policy_warnings(namespace: str, policy: Object, known: Known) -> Iterator[str]:
    """Targets of a ModelAccessPolicy that are not there."""
    for target in (policy.get("spec") or {}).get("targetRefs") or ():
        kind, name = target.get("kind"), target.get("name")
        if kind in _POLICY_TARGETS and object_key(namespace, str(name)) not in known.get(kind, {}):
            yield f"there is no {kind} '{name}' in this namespace yet; the policy has no effect on it until there is"


def autoscaling_policy_warnings(namespace: str, name: object, known: Known) -> Iterator[str]:
    """An AutoscalingPolicy that is not there."""
    if isinstance(name, str) and object_key(namespace, name) not in known.get("AutoscalingPolicy", {}):
        yield f"there is no AutoscalingPolicy '{name}' in this namespace yet; nothing is scaled until there is"


def accelerator_budget_warnings(binding: Object) -> Iterator[str]:
    """Kinds of a binding's budget that no target has, or that a target may have, by the names alone."""
    spec = binding.get("spec") or {}
    targets = [one for one in spec.get("targets") or () if isinstance(one, Mapping)]
    kinds = {str(one.get("name")): one["accelerator"] for one in targets if isinstance(one.get("accelerator"), str)}
    budget = spec.get("budget")
    limits = budget.get("accelerators") if isinstance(budget, Mapping) else None
    for limited in limits if isinstance(limits, Mapping) else ():
        vague = [
            name
            for name, kind in kinds.items()
            if matches_accelerator(limited, kind) and not matches_accelerator(kind, limited)
        ]
        for name in vague:
            yield (
                f"the budget for '{limited}' does not count target '{name}', whose accelerator is '{kinds[name]}';"
                f" write '{limited}' there if it is one"
            )
        if not vague and not any(matches_accelerator(kind, limited) for kind in kinds.values()):
            named = ", ".join(f"'{one}'" for one in sorted(set(kinds.values()))) or "none"
            yield f"the budget for '{limited}' limits nothing: no target is of that kind (they name {named})"


def referring_objects(kind: str, key: str, known: Known) -> Iterator[str]:
    """Objects that still refer to the object to be deleted."""
    namespace, _, name = key.partition("/")
    if kind == "ModelServer":
        for other, route in known.get("ModelRoute", {}).items():
            if namespace_of(other) == namespace and name in _servers_of(route):
                yield f"ModelRoute {other} still names it; requests that have no other target are answered 503"
    elif kind == "AutoscalingPolicy":
        for other, binding in known.get("AutoscalingPolicyBinding", {}).items():
            if namespace_of(other) == namespace and (binding.get("spec") or {}).get("policyRef") == name:
                yield f"AutoscalingPolicyBinding {other} still names it; its targets are not scaled any more"


def kind_metric_label(kind: str) -> str:
    """``kind`` in metrics. Requests may contain any kind: unknown kinds share one name."""
    return kind if kind in _DOCUMENTS or kind in _OTHERS or kind == "ConfigMap" else "other"


def review_object(review: AdmissionRequest, known: Known, check_picker: PickerConfigChecker) -> AdmissionVerdict:
    """``known``: the informers' copies of the cluster's objects, by kind and key."""
    if review.new is None:
        return AdmissionVerdict(warnings=tuple(referring_objects(review.kind.kind, review.key, known)))
    mistakes = list(_mistakes(review, review.new, known, check_picker))
    warnings = list(_warnings(review.kind.kind, review.key, review.new, known, check_picker))
    if mistakes and _asks_for_something_new(review):
        return AdmissionVerdict(refused="; ".join(mistakes), warnings=tuple(warnings))
    return AdmissionVerdict(warnings=(*mistakes, *warnings))


def _asks_for_something_new(review: AdmissionRequest) -> bool:
    """A change of only labels or finalizers must be allowed, even for an object with mistakes."""
    old, new = review.old or {}, review.new or {}
    if (new.get("metadata") or {}).get("deletionTimestamp"):
        return False
    return review.operation == "CREATE" or any(old.get(field) != new.get(field) for field in _ASKING)


def _mistakes(
    review: AdmissionRequest, thing: Object, known: Known, check_picker: PickerConfigChecker
) -> Iterator[str]:
    kind = review.kind.kind
    if kind in _DOCUMENTS:
        # a name from ``generateName`` does not exist yet
        named = {**thing, "metadata": {"name": "generated", "namespace": review.namespace, **thing["metadata"]}}
        yield from (one for one in [decode_source(named).mistakes_text()] if one)
    elif kind in _OTHERS:
        yield from _wrong(kind, review.name or "generated", thing)
    elif kind == "ConfigMap":
        yield from (one for one in [compile_picker(review.key, thing, check_picker).problem] if one)
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
        # templates of base references may fix or cause mistakes: the Model's status reports those
        yield from model_mistakes(name, made.spec)
    elif kind == "ModelInfer":
        yield from model_infer_mistakes(made)
    elif isinstance(made.spec, AutoscalingPolicySpec):
        yield from schedule_mistakes(made.spec.schedules)
    elif isinstance(made.spec, ServingRuntimeSpec):
        for one in unknown_settings(made.spec.arguments):
            yield f"'{one}' in arguments is no setting; there are: {', '.join(sorted(NAMES))}"


def _repeated_names(route: Object) -> Iterator[str]:
    names = route_model_names(route)
    for name in sorted({one for one in names if names.count(one) > 1}):
        yield f"'{name}' is there twice among modelName and loraAdapters; write it once"


def route_model_names(route: Object) -> list[str]:
    """The model names of a ModelRoute."""
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


def _warnings(kind: str, key: str, thing: Object, known: Known, check_picker: PickerConfigChecker) -> Iterator[str]:
    namespace = key.partition("/")[0]
    checks: Mapping[str, Callable[[], Iterator[str]]] = {
        "ModelRoute": lambda: route_warnings(key, thing, known),
        "ModelServer": lambda: picker_warnings(namespace, thing, known, check_picker),
        "ModelAccessPolicy": lambda: access_policy_warnings(namespace, thing, known),
        "AutoscalingPolicy": lambda: metric_warnings(thing.get("spec") or {}),
        "AutoscalingPolicyBinding": lambda: _binding_warnings(namespace, thing, known),
        "Model": lambda: autoscaling_policy_warnings(
            namespace, ((thing.get("spec") or {}).get("autoscaling") or {}).get("policyRef"), known
        ),
    }
    if kind in checks:
        yield from checks[kind]()


def _binding_warnings(namespace: str, binding: Object, known: Known) -> Iterator[str]:
    yield from autoscaling_policy_warnings(namespace, (binding.get("spec") or {}).get("policyRef"), known)
    yield from accelerator_budget_warnings(binding)


def metric_warnings(spec: Mapping[str, Any]) -> Iterator[str]:
    """About the metrics of a policy without mistakes."""
    metrics = spec.get("metrics") or ()
    users = [name for name, one in STRATEGIES.items() if one.needs == "metrics"]
    if metrics and all(one.get("name") not in users for one in spec.get("strategies") or ()):
        yield f"metrics are for the strategy {' or '.join(users)}, which the policy does not name; they have no effect"
    for one in metrics:
        name, source = one.get("name"), one.get("prometheus") or {}
        if one.get("source", "Gateway") == "Gateway" and name not in GATEWAY_METRICS:
            yield f"the gateway has no metric {name}; it has {', '.join(GATEWAY_METRICS)}"
        if one.get("source") == "Resource" and name == "memory":
            yield (
                "engines take their memory when they start, whatever their load: the metric memory scales nothing well"
            )
        if one.get("source") == "Resource" and name not in {"cpu", "memory"}:
            yield f"there is no resource metric {name}; there are cpu and memory"
        if source.get("secretRef") and str(source.get("address", "")).startswith("http:"):
            yield f"the metric {name} has no value: credentials are sent with https alone"

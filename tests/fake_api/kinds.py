# SPDX-License-Identifier: Apache-2.0
"""The kinds of the fake API server: built in or from CRDs, with structural schemas (no CEL) and scale subresources."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.kube import api_resources as known
from controller.kube.api_resources import ApiResource
from tests.fake_api.patches import BUILT_IN_KEYS, keys_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Schema = Mapping[str, Any]
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}
_ROOT: Final = frozenset({"apiVersion", "kind", "metadata"})
_RBAC: Final = "rbac.authorization.k8s.io"
_VERBS: Final = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]


def with_defaults(value: Any, schema: Schema) -> Any:  # noqa: ANN401 - JSON
    """``value`` with the schema's defaults where a field is missing."""
    if isinstance(value, dict):
        result = dict(value)
        for name, below in (schema.get("properties") or {}).items():
            if name not in result and "default" in below:
                result[name] = copy.deepcopy(below["default"])
            if name in result:
                result[name] = with_defaults(result[name], below)
        more = schema.get("additionalProperties")
        if isinstance(more, Mapping):
            known = schema.get("properties") or {}
            result = {name: one if name in known else with_defaults(one, more) for name, one in result.items()}
        return result
    if isinstance(value, list):
        return [with_defaults(item, schema.get("items") or {}) for item in value]
    return value


def unknown_fields(value: object, schema: Schema, path: str = "") -> list[str]:
    """The fields that the schema lacks, which a server prunes, or refuses with strict field validation."""
    if schema.get("x-kubernetes-preserve-unknown-fields") or schema.get("x-kubernetes-embedded-resource"):
        return []
    if isinstance(value, list):
        below = schema.get("items") or {}
        return [one for number, item in enumerate(value) for one in unknown_fields(item, below, f"{path}[{number}]")]
    if not isinstance(value, dict) or schema.get("type") != "object":
        return []
    properties, more = schema.get("properties") or {}, schema.get("additionalProperties")
    found: list[str] = []
    for name, item in value.items():
        place = f"{path}.{name}".lstrip(".")
        if not path and name in _ROOT:
            continue
        if name in properties:
            found += unknown_fields(item, properties[name], place)
        elif isinstance(more, Mapping):
            found += unknown_fields(item, more, place)
        elif not more:
            found.append(place)
    return found


def without_fields(value: dict[str, Any], unknown: list[str]) -> dict[str, Any]:
    """``value`` without these fields."""
    result = copy.deepcopy(value)
    for place in unknown:
        *above, last = re.split(r"\.(?![^\[]*\])", place)
        holder: Any = result
        for name in above:
            first, *numbers = re.split(r"[\[\]]+", name.rstrip("]"))
            holder = holder[first]
            for number in numbers:
                holder = holder[int(number)]
        holder.pop(last, None)
    return result


def faults_in(value: object, schema: Schema, path: str = "") -> list[str]:
    """What breaks the schema, one sentence a field, as ``spec.replicas: Invalid value``."""
    if schema.get("x-kubernetes-int-or-string"):
        return [] if isinstance(value, int | str) else [f"{path}: Invalid value: must be an integer or a string"]
    if value is None:
        return [] if schema.get("nullable") else [f"{path}: Invalid value: null"]
    kind = schema.get("type")
    if kind and not _is_a(value, kind):
        return [f"{path}: Invalid value: must be of type {kind}"]
    found = [f"{path}: {why}" for check in _CHECKS for why in check(value, schema)]
    if isinstance(value, dict):
        properties, more = schema.get("properties") or {}, schema.get("additionalProperties")
        found += [
            f"{path}.{name}".lstrip(".") + ": Required value"
            for name in schema.get("required") or ()
            if name not in value
        ]
        for name, item in value.items():
            below = properties.get(name, more if isinstance(more, Mapping) else None)
            if below is not None and not (not path and name in _ROOT):
                found += faults_in(item, below, f"{path}.{name}".lstrip("."))
    if isinstance(value, list):
        for number, item in enumerate(value):
            found += faults_in(item, schema.get("items") or {}, f"{path}[{number}]")
    return found


def _is_a(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _TYPES[kind])


def _enum(value: object, schema: Schema) -> list[str]:
    allowed = schema.get("enum")
    return [f"Unsupported value: {value!r}"] if allowed is not None and value not in allowed else []


def _range(value: object, schema: Schema) -> list[str]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return []
    found = []
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is not None and (value < least or (schema.get("exclusiveMinimum") and value == least)):
        found.append(f"Invalid value: {value}: must be at least {least}")
    if most is not None and (value > most or (schema.get("exclusiveMaximum") and value == most)):
        found.append(f"Invalid value: {value}: must be at most {most}")
    return found


def _length(value: object, schema: Schema) -> list[str]:
    if isinstance(value, str):
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        pattern = schema.get("pattern")
        if pattern and not re.search(pattern, value):
            return [f"Invalid value: {value!r}: must match {pattern}"]
    elif isinstance(value, list):
        least, most = schema.get("minItems", 0), schema.get("maxItems")
    elif isinstance(value, dict):
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
    else:
        return []
    if len(value) < least:
        return [f"Invalid value: must have at least {least}"]
    return [f"Too many: must have at most {most}"] if most is not None and len(value) > most else []


def _keys(value: object, schema: Schema) -> list[str]:
    keys = schema.get("x-kubernetes-list-map-keys")
    if not keys or not isinstance(value, list):
        return []
    seen = [tuple(item.get(key) for key in keys) for item in value if isinstance(item, dict)]
    return [f"Duplicate value: {dict(zip(keys, one, strict=True))}" for at, one in enumerate(seen) if one in seen[:at]]


_CHECKS: Final[tuple[Callable[[object, Schema], list[str]], ...]] = (_enum, _range, _length, _keys)


class ScalePaths(msgspec.Struct, frozen=True):
    """Each a path of dots, such as ``.spec.replicas``. ``selector``: empty if the definition names none."""

    replicas: str
    status: str
    selector: str = ""


def paths_of(version: Mapping[str, Any]) -> ScalePaths | None:
    """Of a version of a CustomResourceDefinition; None if it has no scale."""
    said = (version.get("subresources") or {}).get("scale")
    if not said:
        return None
    return ScalePaths(said["specReplicasPath"], said["statusReplicasPath"], said.get("labelSelectorPath", ""))


def scale_of(thing: Mapping[str, Any], paths: ScalePaths) -> dict[str, Any]:
    """The scale of an object."""
    kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    status: dict[str, Any] = {"replicas": _at(thing, paths.status) or 0}
    if paths.selector:
        status["selector"] = _at(thing, paths.selector) or ""
    return {
        "apiVersion": "autoscaling/v1",
        "kind": "Scale",
        "metadata": {name: thing["metadata"][name] for name in kept if name in thing["metadata"]},
        "spec": {"replicas": _at(thing, paths.replicas) or 0},
        "status": status,
    }


def scaling(patch: Mapping[str, Any], paths: ScalePaths) -> dict[str, Any]:
    """A merge patch of the object that is equivalent to a merge patch of its scale."""
    value: Any = (patch.get("spec") or {}).get("replicas")
    for name in reversed(paths.replicas.strip(".").split(".")):
        value = {name: value}
    return {"metadata": patch.get("metadata") or {}, **value}


def _at(thing: Any, path: str) -> Any:  # noqa: ANN401 - JSON
    for name in path.strip(".").split("."):
        thing = thing.get(name) if isinstance(thing, dict) else None
    return thing


class ServedKind(msgspec.Struct, frozen=True):
    """A kind and how its objects are treated. ``schema``: OpenAPI of a custom resource, empty for built-in kinds.
    ``scale``: of a custom resource that has one; the scales of built-in kinds are the objects themselves.
    """

    resource: ApiResource
    has_status: bool = False
    counts_generations: bool = True
    schema: dict[str, Any] = {}
    scale: ScalePaths | None = None
    short_names: tuple[str, ...] = ()
    list_keys: dict[str, tuple[str, ...]] = msgspec.field(default_factory=lambda: dict(BUILT_IN_KEYS))


_BUILT_IN: Final = (
    ServedKind(known.NAMESPACES, has_status=True, counts_generations=False, short_names=("ns",)),
    ServedKind(known.PODS, has_status=True, counts_generations=True, short_names=("po",)),
    ServedKind(known.NODES, has_status=True, counts_generations=False, short_names=("no",)),
    ServedKind(known.SERVICES, has_status=True, counts_generations=False, short_names=("svc",)),
    ServedKind(known.CONFIG_MAPS, counts_generations=False, short_names=("cm",)),
    ServedKind(known.SECRETS, counts_generations=False),
    ServedKind(known.SERVICE_ACCOUNTS, counts_generations=False, short_names=("sa",)),
    ServedKind(known.EVENTS, counts_generations=False, short_names=("ev",)),
    ServedKind(known.CONTROLLER_REVISIONS, counts_generations=False),
    ServedKind(known.DEPLOYMENTS, has_status=True, short_names=("deploy",)),
    ServedKind(known.ENDPOINT_SLICES),
    ServedKind(known.LEASES, counts_generations=False),
    ServedKind(known.CRDS, has_status=True, short_names=("crd", "crds")),
    ServedKind(
        ApiResource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim"), has_status=True, short_names=("pvc",)
    ),
    ServedKind(ApiResource("apps", "v1", "replicasets", "ReplicaSet"), has_status=True, short_names=("rs",)),
    ServedKind(ApiResource("apps", "v1", "statefulsets", "StatefulSet"), has_status=True, short_names=("sts",)),
    ServedKind(ApiResource("apps", "v1", "daemonsets", "DaemonSet"), has_status=True, short_names=("ds",)),
    ServedKind(
        ApiResource("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler"),
        has_status=True,
        short_names=("hpa",),
    ),
    ServedKind(ApiResource("batch", "v1", "jobs", "Job"), has_status=True),
    ServedKind(
        ApiResource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget"),
        has_status=True,
        short_names=("pdb",),
    ),
    ServedKind(ApiResource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"), short_names=("netpol",)),
    ServedKind(ApiResource(_RBAC, "v1", "roles", "Role"), counts_generations=False),
    ServedKind(ApiResource(_RBAC, "v1", "rolebindings", "RoleBinding"), counts_generations=False),
    ServedKind(ApiResource(_RBAC, "v1", "clusterroles", "ClusterRole", namespaced=False), counts_generations=False),
    ServedKind(
        ApiResource(_RBAC, "v1", "clusterrolebindings", "ClusterRoleBinding", namespaced=False),
        counts_generations=False,
    ),
)


class Kinds:
    """All kinds by group, version and plural."""

    def __init__(self) -> None:
        self._kinds = {_place(one.resource): one for one in _BUILT_IN}

    def find(self, group: str, version: str, plural: str) -> ServedKind | None:
        """The kind served there."""
        return self._kinds.get((group, version, plural))

    def all(self) -> Iterable[ServedKind]:
        """Every kind."""
        return self._kinds.values()

    def define(self, crd: Mapping[str, Any]) -> list[ServedKind]:
        """Serve what a CustomResourceDefinition describes; the kinds of its served versions."""
        made = list(kinds_of(crd))
        self._kinds.update({_place(one.resource): one for one in made})
        return made

    def forget(self, crd: Mapping[str, Any]) -> None:
        """Serve it no longer."""
        for one in kinds_of(crd):
            self._kinds.pop(_place(one.resource), None)

    def discovery(self, path: str) -> dict[str, Any] | None:
        """What a discovery path answers; None if it is none."""
        match [part for part in path.split("/") if part]:
            case ["api"]:
                return {"kind": "APIVersions", "versions": ["v1"]}
            case ["apis"]:
                return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [*self._groups()]}
            case ["apis", group]:
                return next((one for one in self._groups() if one["name"] == group), None)
            case ["api", version]:
                return self._resources("", version)
            case ["apis", group, version]:
                return self._resources(group, version)
        return None

    def _resources(self, group: str, version: str) -> dict[str, Any] | None:
        listed: list[dict[str, Any]] = []
        for kind in self._kinds.values():
            one = kind.resource
            if (one.group, one.version) != (group, version):
                continue
            entry = {"singularName": one.kind.lower(), "namespaced": one.namespaced, "kind": one.kind}
            listed.append({**entry, "name": one.plural, "verbs": _VERBS, "shortNames": list(kind.short_names)})
            if kind.has_status:
                listed.append({**entry, "name": f"{one.plural}/status", "verbs": ["get", "patch", "update"]})
            if kind.scale is not None:
                listed.append({**entry, "name": f"{one.plural}/scale", "kind": "Scale", "verbs": ["get", "patch"]})
        name = f"{group}/{version}" if group else version
        return (
            {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": name, "resources": listed}
            if listed
            else None
        )

    def _groups(self) -> Iterable[dict[str, Any]]:
        groups: dict[str, set[str]] = {}
        for kind in self._kinds.values():
            if kind.resource.group:
                groups.setdefault(kind.resource.group, set()).add(kind.resource.version)
        return (_group(name, sorted(versions)) for name, versions in sorted(groups.items()))


def kinds_of(crd: Mapping[str, Any]) -> Iterable[ServedKind]:
    """The kinds that a CustomResourceDefinition makes, one for each served version."""
    spec = crd["spec"]
    names = spec["names"]
    for version in spec["versions"]:
        if not version.get("served", True):
            continue
        resource = ApiResource(
            spec["group"], version["name"], names["plural"], names["kind"], namespaced=spec["scope"] == "Namespaced"
        )
        schema = (version.get("schema") or {}).get("openAPIV3Schema") or {}
        yield ServedKind(
            resource,
            has_status="status" in (version.get("subresources") or {}),
            schema=schema,
            scale=paths_of(version),
            list_keys=keys_in(schema),
            short_names=tuple(names.get("shortNames") or ()),
        )


def _place(resource: ApiResource) -> tuple[str, str, str]:
    return resource.group, resource.version, resource.plural


def _group(name: str, versions: list[str]) -> dict[str, Any]:
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"kind": "APIGroup", "apiVersion": "v1", "name": name, "versions": listed, "preferredVersion": listed[-1]}

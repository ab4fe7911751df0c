# SPDX-License-Identifier: Apache-2.0
"""The kinds that the fake server knows: some of Kubernetes' own, and those of CustomResourceDefinitions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from bench.cluster.fake.applying import BUILT_IN_KEYS, keys_in
from bench.cluster.fake.scales import ScalePaths, paths_of
from controller.kube import resources as known
from controller.kube.resources import Resource

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_RBAC: Final = "rbac.authorization.k8s.io"
_VERBS: Final = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]


class Kind(msgspec.Struct, frozen=True):
    """A kind and how its objects are treated. ``schema``: OpenAPI of a custom resource, empty for built-in kinds.
    ``scale``: of a custom resource that has one; the scales of built-in kinds are the objects themselves.
    """

    resource: Resource
    has_status: bool = False
    counts_generations: bool = True
    schema: dict[str, Any] = {}
    scale: ScalePaths | None = None
    short_names: tuple[str, ...] = ()
    list_keys: dict[str, tuple[str, ...]] = msgspec.field(default_factory=lambda: dict(BUILT_IN_KEYS))


_BUILT_IN: Final = (
    Kind(known.NAMESPACES, has_status=True, counts_generations=False, short_names=("ns",)),
    Kind(known.PODS, has_status=True, counts_generations=True, short_names=("po",)),
    Kind(known.NODES, has_status=True, counts_generations=False, short_names=("no",)),
    Kind(known.SERVICES, has_status=True, counts_generations=False, short_names=("svc",)),
    Kind(known.CONFIG_MAPS, counts_generations=False, short_names=("cm",)),
    Kind(known.SECRETS, counts_generations=False),
    Kind(known.SERVICE_ACCOUNTS, counts_generations=False, short_names=("sa",)),
    Kind(known.EVENTS, counts_generations=False, short_names=("ev",)),
    Kind(known.CONTROLLER_REVISIONS, counts_generations=False),
    Kind(known.DEPLOYMENTS, has_status=True, short_names=("deploy",)),
    Kind(known.ENDPOINT_SLICES),
    Kind(known.LEASES, counts_generations=False),
    Kind(known.CRDS, has_status=True, short_names=("crd", "crds")),
    Kind(Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim"), has_status=True, short_names=("pvc",)),
    Kind(Resource("apps", "v1", "replicasets", "ReplicaSet"), has_status=True, short_names=("rs",)),
    Kind(Resource("apps", "v1", "statefulsets", "StatefulSet"), has_status=True, short_names=("sts",)),
    Kind(Resource("apps", "v1", "daemonsets", "DaemonSet"), has_status=True, short_names=("ds",)),
    Kind(
        Resource("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler"),
        has_status=True,
        short_names=("hpa",),
    ),
    Kind(Resource("batch", "v1", "jobs", "Job"), has_status=True),
    Kind(
        Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget"), has_status=True, short_names=("pdb",)
    ),
    Kind(Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"), short_names=("netpol",)),
    Kind(Resource(_RBAC, "v1", "roles", "Role"), counts_generations=False),
    Kind(Resource(_RBAC, "v1", "rolebindings", "RoleBinding"), counts_generations=False),
    Kind(Resource(_RBAC, "v1", "clusterroles", "ClusterRole", namespaced=False), counts_generations=False),
    Kind(
        Resource(_RBAC, "v1", "clusterrolebindings", "ClusterRoleBinding", namespaced=False), counts_generations=False
    ),
)


class Kinds:
    """All kinds by group, version and plural."""

    def __init__(self) -> None:
        self._kinds = {_place(one.resource): one for one in _BUILT_IN}

    def find(self, group: str, version: str, plural: str) -> Kind | None:
        """The kind served there."""
        return self._kinds.get((group, version, plural))

    def all(self) -> Iterable[Kind]:
        """Every kind."""
        return self._kinds.values()

    def define(self, crd: Mapping[str, Any]) -> list[Kind]:
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


def kinds_of(crd: Mapping[str, Any]) -> Iterable[Kind]:
    """The kinds that a CustomResourceDefinition makes, one for each served version."""
    spec = crd["spec"]
    names = spec["names"]
    for version in spec["versions"]:
        if not version.get("served", True):
            continue
        resource = Resource(
            spec["group"], version["name"], names["plural"], names["kind"], namespaced=spec["scope"] == "Namespaced"
        )
        schema = (version.get("schema") or {}).get("openAPIV3Schema") or {}
        yield Kind(
            resource,
            has_status="status" in (version.get("subresources") or {}),
            schema=schema,
            scale=paths_of(version),
            list_keys=keys_in(schema),
            short_names=tuple(names.get("shortNames") or ()),
        )


def _place(resource: Resource) -> tuple[str, str, str]:
    return resource.group, resource.version, resource.plural


def _group(name: str, versions: list[str]) -> dict[str, Any]:
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"kind": "APIGroup", "apiVersion": "v1", "name": name, "versions": listed, "preferredVersion": listed[-1]}

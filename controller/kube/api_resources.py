# SPDX-License-Identifier: Apache-2.0
"""Kinds of objects and where the API serves them; keys of objects, their times, and label selectors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import msgspec

from extproc.api.spec import API_VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

Object = dict[str, Any]
"""A Kubernetes object as JSON has it. What comes out of a cache must not be changed."""
# Readers of a path resolve these; escaped they are the same.
_DOTS: Final = frozenset({"", ".", ".."})
_TERM: Final = re.compile(
    r"\s*(?:(?P<key>[\w./-]+)\s*(?P<sign>==|=|!=)\s*(?P<value>[\w./-]*)"
    r"|(?P<of>[\w./-]+)\s+(?P<set>in|notin)\s*\((?P<values>[^()]*)\)"
    r"|(?P<absent>!\s*)?(?P<has>[\w./-]+))\s*(?:,|$)"
)
_LONGEST: Final = 4096
Matches = Callable[[Mapping[str, str]], bool]


class ApiResource(msgspec.Struct, frozen=True):
    """A kind of objects. ``group`` is empty for the core API."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """As objects have it: ``v1``, ``apps/v1``."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def group_path(self) -> str:
        """Where the server lists the kinds of this group and version; raises ValueError as ``path`` does."""
        return _joined(["apis", self.group, self.version] if self.group else ["api", self.version])

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """The path on the server of an object, or of a collection without ``name``.

        No namespace means all of them for a collection, and is a ValueError for one object of a namespaced kind. So is
        what would lead to another path.
        """
        if name is not None and self.namespaced and not namespace:
            raise ValueError(f"{self.kind} {name} needs a namespace")
        parts = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts += [part for part in (self.plural, name, subresource) if part]
        return _joined(parts)


def _joined(parts: Sequence[str]) -> str:
    wrong = [part for part in parts if part in _DOTS]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is no part of a path")
    return "/" + "/".join(quote(part, safe="") for part in parts)


def key_of(thing: Mapping[str, Any]) -> str:
    """``namespace/name``, or ``name`` of what has no namespace."""
    metadata = thing["metadata"]
    namespace = metadata.get("namespace")
    return f"{namespace}/{metadata['name']}" if namespace else str(metadata["name"])


def partial_metadata(thing: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata that an informer needs of an object: name, namespace, uid and version."""
    metadata = thing["metadata"]
    return {name: metadata[name] for name in ("name", "namespace", "uid", "resourceVersion") if name in metadata}


def split_key(key: str) -> tuple[str | None, str]:
    """The namespace (None if there is none) and name in a key."""
    namespace, slash, name = key.rpartition("/")
    return (namespace if slash else None), name


def parse_timestamp(text: object) -> float | None:
    """Seconds since the epoch of an RFC 3339 instant; None of anything else."""
    if not isinstance(text, str):
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found.timestamp() if found.tzinfo else found.replace(tzinfo=UTC).timestamp()


def timestamp_of(at_s: float) -> str:
    """RFC 3339 with whole seconds, as Kubernetes writes it."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def is_older(version: str, than: str) -> bool:
    """Of two resource versions of an object. They are comparable as numbers since Kubernetes 1.35; of those that are no
    numbers none is known to be older.
    """
    return version.isdecimal() and than.isdecimal() and int(version) < int(than)


def our_resource(plural: str, kind: str, *, namespaced: bool = True) -> ApiResource:
    """A kind that we define."""
    group, _, version = API_VERSION.partition("/")
    return ApiResource(group, version, plural, kind, namespaced)


PODS: Final = ApiResource("", "v1", "pods", "Pod")
NODES: Final = ApiResource("", "v1", "nodes", "Node", namespaced=False)
NAMESPACES: Final = ApiResource("", "v1", "namespaces", "Namespace", namespaced=False)
SERVICES: Final = ApiResource("", "v1", "services", "Service")
CONFIG_MAPS: Final = ApiResource("", "v1", "configmaps", "ConfigMap")
SECRETS: Final = ApiResource("", "v1", "secrets", "Secret")
SERVICE_ACCOUNTS: Final = ApiResource("", "v1", "serviceaccounts", "ServiceAccount")
EVENTS: Final = ApiResource("", "v1", "events", "Event")
CONTROLLER_REVISIONS: Final = ApiResource("apps", "v1", "controllerrevisions", "ControllerRevision")
DEPLOYMENTS: Final = ApiResource("apps", "v1", "deployments", "Deployment")
ENDPOINT_SLICES: Final = ApiResource("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice")
LEASES: Final = ApiResource("coordination.k8s.io", "v1", "leases", "Lease")
CRDS: Final = ApiResource(
    "apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False
)
MODEL_SERVERS: Final = our_resource("modelservers", "ModelServer")
MODEL_ROUTES: Final = our_resource("modelroutes", "ModelRoute")
MODEL_ACCESS_POLICIES: Final = our_resource("modelaccesspolicies", "ModelAccessPolicy")
GATEWAY_CONFIGS: Final = our_resource("gatewayconfigs", "GatewayConfig")
INFERENCE_OBJECTIVES: Final = ApiResource(
    "inference.networking.x-k8s.io", "v1alpha2", "inferenceobjectives", "InferenceObjective"
)
# llm-d's own copy of the kind.
LLM_D_OBJECTIVES: Final = ApiResource("llm-d.ai", "v1alpha2", "inferenceobjectives", "InferenceObjective")
MODEL_REWRITES: Final = ApiResource(
    "inference.networking.x-k8s.io", "v1alpha2", "inferencemodelrewrites", "InferenceModelRewrite"
)
LLM_D_MODEL_REWRITES: Final = ApiResource("llm-d.ai", "v1alpha2", "inferencemodelrewrites", "InferenceModelRewrite")
INFERENCE_POOLS: Final = ApiResource("inference.networking.k8s.io", "v1", "inferencepools", "InferencePool")
GATEWAY_CLASSES: Final = ApiResource(
    "gateway.networking.k8s.io", "v1", "gatewayclasses", "GatewayClass", namespaced=False
)
GATEWAYS: Final = ApiResource("gateway.networking.k8s.io", "v1", "gateways", "Gateway")
HTTP_ROUTES: Final = ApiResource("gateway.networking.k8s.io", "v1", "httproutes", "HTTPRoute")
GRPC_ROUTES: Final = ApiResource("gateway.networking.k8s.io", "v1", "grpcroutes", "GRPCRoute")
# v1 came with release 1.5 of the Gateway API; every release serves v1beta1
REFERENCE_GRANTS: Final = ApiResource("gateway.networking.k8s.io", "v1beta1", "referencegrants", "ReferenceGrant")
ALPHA_INFERENCE_POOLS: Final = ApiResource(
    "inference.networking.x-k8s.io", "v1alpha2", "inferencepools", "InferencePool"
)
AUTOSCALING_POLICIES: Final = our_resource("autoscalingpolicies", "AutoscalingPolicy")
AUTOSCALING_POLICY_BINDINGS: Final = our_resource("autoscalingpolicybindings", "AutoscalingPolicyBinding")
MODELS: Final = our_resource("models", "Model")
MODEL_INFERS: Final = our_resource("modelinfers", "ModelInfer")
MODEL_INFER_ROLES: Final = our_resource("modelinferroles", "ModelInferRole")
VOLCANO_POD_GROUPS: Final = ApiResource("scheduling.volcano.sh", "v1beta1", "podgroups", "PodGroup")
# of the scheduler-plugins' coscheduling
SCHEDULER_POD_GROUPS: Final = ApiResource("scheduling.x-k8s.io", "v1alpha1", "podgroups", "PodGroup")
SERVING_RUNTIMES: Final = our_resource("servingruntimes", "ServingRuntime")
CLUSTER_SERVING_RUNTIMES: Final = our_resource("clusterservingruntimes", "ClusterServingRuntime", namespaced=False)
MODEL_TEMPLATES: Final = our_resource("modeltemplates", "ModelTemplate")
DAEMON_SETS: Final = ApiResource("apps", "v1", "daemonsets", "DaemonSet")
JOBS: Final = ApiResource("batch", "v1", "jobs", "Job")


def parse_selector(text: str) -> Matches:
    """Whether labels match all terms of it; raises ValueError."""
    terms = [_term(one) for one in _terms(text)]
    return lambda labels: all(term(labels) for term in terms)


def required_labels(text: str) -> dict[str, str]:
    """The labels of which a selector allows one value only: its objects can be indexed by these.

    Raises ValueError.
    """
    found: dict[str, str] = {}
    for one in _terms(text):
        values: list[str] = one["values"].split(",") if one["set"] == "in" else []
        if one["sign"] in ("=", "=="):
            found[one["key"]] = one["value"]
        elif len(values) == 1:
            found[one["of"]] = values[0].strip()
    return found


def _terms(text: str) -> Iterator[re.Match[str]]:
    end, at = len(text.strip()), 0
    while at < end:
        found = _TERM.match(text, at) if len(text) <= _LONGEST else None
        if found is None:
            raise ValueError(f"unable to parse the label selector {text[:100]!r}")
        yield found
        at = found.end()


def _term(found: re.Match[str]) -> Matches:
    if found["key"] is not None:
        key, value = found["key"], found["value"]
        if found["sign"] == "!=":
            return lambda labels: labels.get(key) != value
        return lambda labels: labels.get(key) == value
    if found["set"] is not None:
        of, values = found["of"], {one.strip() for one in found["values"].split(",")}
        if found["set"] == "notin":
            return lambda labels: labels.get(of) not in values
        return lambda labels: labels.get(of) in values
    has, is_absent = found["has"], found["absent"] is not None
    return lambda labels: (has in labels) != is_absent

# SPDX-License-Identifier: Apache-2.0
"""Input of a ModelInfer's decision: the object, what it owns, and reports of others about its pods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from controller.kube.api_resources import Object


class PodLoad(msgspec.Struct, frozen=True):
    """Gateways' counts of an engine. ``in_flight``: its requests. ``cached_tokens``: of prompts in its cache."""

    in_flight: int
    cached_tokens: int


class NodeCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """A node that takes pods. ``free``: allocatable minus the requests of its pods, by resource, in base units (cores,
    bytes, pieces; ``pods`` too). ``labels`` and ``taints``: as the node has them.
    """

    name: str
    free: Mapping[str, float]
    labels: Mapping[str, str] = {}
    taints: Sequence[Object] = ()


class GangSchedulingApis(msgspec.Struct, frozen=True, kw_only=True):
    """Which kinds of gang scheduling the cluster has: the API server serves these PodGroups, or Kueue's Workloads."""

    volcano: bool = False
    scheduler_plugins: bool = False
    kueue: bool = False


class ModelInferState(msgspec.Struct, frozen=True, kw_only=True):
    """``thing``: the ModelInfer as the API server has it. ``pods``, ``services``, ``revisions`` (ControllerRevisions),
    ``pod_groups``, ``role_scales`` (ModelInferRoles): what it owns. ``lost_nodes``: nodes of its pods that are gone or
    not ready, with the instant since when. ``node_capacities``: nodes with their free resources; None: not read, and
    then no pod waits for capacity. ``loads``: by pod's key, of recent answers of gateways. ``loads_asked_of``: pods
    whose loads were requested for this reconcile, answered or not; a choice by load waits for one request.
    ``log_tails``: the last lines of crashed containers' logs, by pod's key. ``gang``: gang schedulers of the cluster.
    """

    thing: Object
    pods: Sequence[Object] = ()
    services: Sequence[Object] = ()
    revisions: Sequence[Object] = ()
    pod_groups: Sequence[Object] = ()
    role_scales: Sequence[Object] = ()
    lost_nodes: Mapping[str, float] = {}
    node_capacities: Sequence[NodeCapacity] | None = None
    loads: Mapping[str, PodLoad] = {}
    loads_asked_of: frozenset[str] = frozenset()
    log_tails: Mapping[str, str] = {}
    gang: GangSchedulingApis = GangSchedulingApis()

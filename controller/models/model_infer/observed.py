# SPDX-License-Identifier: Apache-2.0
"""What a ModelInfer is decided from: the object, what it owns, and what others say of its pods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from controller.kube.resources import Object


class Load(msgspec.Struct, frozen=True):
    """What gateways say of an engine. ``in_flight``: requests that it has. ``cached_tokens``: of prompts that it
    remembers.
    """

    in_flight: int
    cached_tokens: int


class NodeRoom(msgspec.Struct, frozen=True, kw_only=True):
    """A node that takes pods. ``free``: allocatable less what its pods ask for, by resource, in base units (cores,
    bytes, pieces; ``pods`` too). ``labels`` and ``taints``: as the node has them.
    """

    name: str
    free: Mapping[str, float]
    labels: Mapping[str, str] = {}
    taints: Sequence[Object] = ()


class PodGroups(msgspec.Struct, frozen=True, kw_only=True):
    """Which kinds of gang scheduling the cluster has: the API server serves these PodGroups, or Kueue's Workloads."""

    volcano: bool = False
    scheduler_plugins: bool = False
    kueue: bool = False


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """``thing``: the ModelInfer as the API server has it. ``pods``, ``services``, ``revisions`` (ControllerRevisions),
    ``pod_groups``, ``role_scales`` (ModelInferRoles): what it owns. ``lost_nodes``: nodes of its pods that are gone or
    not ready, with the instant since when. ``room``: nodes with what is free on them; None where nobody looked, and
    nothing waits for room then. ``loads``: by pod's key, as far as gateways have answered lately. ``loads_asked_of``:
    pods that gateways were asked about for this look, whether they answered or not; a choice by load waits until it
    was asked for once. ``log_tails``: the last lines of crashed containers' logs, by pod's key. ``gang``: what the
    cluster can schedule together.
    """

    thing: Object
    pods: Sequence[Object] = ()
    services: Sequence[Object] = ()
    revisions: Sequence[Object] = ()
    pod_groups: Sequence[Object] = ()
    role_scales: Sequence[Object] = ()
    lost_nodes: Mapping[str, float] = {}
    room: Sequence[NodeRoom] | None = None
    loads: Mapping[str, Load] = {}
    loads_asked_of: frozenset[str] = frozenset()
    log_tails: Mapping[str, str] = {}
    gang: PodGroups = PodGroups()

# SPDX-License-Identifier: Apache-2.0
"""What a Model is decided from: the object, presets, templates, and what was made of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from controller.kube.resources import (
    AUTOSCALING_POLICIES,
    AUTOSCALING_POLICY_BINDINGS,
    CONFIG_MAPS,
    DAEMON_SETS,
    JOBS,
    MODEL_INFERS,
    MODEL_ROUTES,
    MODEL_SERVERS,
    Object,
    Resource,
)
from controller.models.runtimes.mistakes import FILE_PATHS

# In the order in which they are applied; what is no longer wanted is deleted in the opposite one.
CHILDREN: Final[tuple[Resource, ...]] = (
    CONFIG_MAPS,
    DAEMON_SETS,
    JOBS,
    MODEL_INFERS,
    MODEL_SERVERS,
    MODEL_ROUTES,
    AUTOSCALING_POLICIES,
    AUTOSCALING_POLICY_BINDINGS,
)
# The label of everything that is made for a Model, its pods too: the Model's name.
MODEL: Final = "attache.dev/model"
BACKEND: Final = "attache.dev/backend"
# On pods that serve nothing: ``warm`` on those that fetch weights ahead.
PURPOSE: Final = "attache.dev/purpose"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the manager decides for all Models. ``image``: ours, for downloads and the sidecar. ``file_paths``:
    directories of nodes that ``file://`` may name.
    """

    image: str = "attache"
    file_paths: tuple[str, ...] = FILE_PATHS


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """``thing``: the Model as the API server has it. ``runtimes`` and ``cluster_runtimes``: all ServingRuntimes of its
    namespace, and all ClusterServingRuntimes. ``templates`` and ``shared_templates``: ModelTemplates of its namespace,
    and of the manager's. ``children``: objects of the kinds ``CHILDREN`` in its namespace that the Model owns, or that
    have the label ``MODEL`` or a name that begins with the Model's. ``pods``: with the label ``MODEL`` of this Model.
    ``gateways``: Services of gateways that serve this namespace, the best to tell people first. ``policies``: all
    AutoscalingPolicies of its namespace.
    """

    thing: Object
    runtimes: Sequence[Object] = ()
    cluster_runtimes: Sequence[Object] = ()
    templates: Sequence[Object] = ()
    shared_templates: Sequence[Object] = ()
    children: Sequence[Object] = ()
    pods: Sequence[Object] = ()
    gateways: Sequence[Object] = ()
    policies: Sequence[Object] = ()
    settings: Settings = Settings()

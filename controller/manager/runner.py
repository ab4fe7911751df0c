# SPDX-License-Identifier: Apache-2.0
"""The manager role: webhooks, which every replica serves, and the controllers of Models, ModelInfers and bindings."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from controller.kube.api_resources import (
    CLUSTER_SERVING_RUNTIMES,
    MODEL_INFER_ROLES,
    MODEL_INFERS,
    MODEL_TEMPLATES,
    MODELS,
    PODS,
    SERVING_RUNTIMES,
)
from controller.kube.errors import ClusterError, Forbidden
from controller.kube.kopf_thread import KopfOperator
from controller.kube.shared_informers import SharedInformers
from controller.models.controller import ModelController
from controller.models.model_status_metrics import ModelMetrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from controller.autoscaler.export.server import ExportServer
    from controller.autoscaler.reconciler.controller import Scaling
    from controller.kube.client import Client
    from controller.kube.leader_election import LeaderElection
    from controller.kube.manager_metrics import ManagerMetrics
    from controller.models.controller import DecisionFunctions, ModelControllerSettings, Source
    from controller.models.kind_reconciler import LoadSource
    from controller.models.model_status_metrics import Objects
    from controller.webhooks.server import WebhookServer

DEFAULT: Final = "attache"
_CONTAINER: Final = "manager"
_PAUSE_S: Final = 2.0
log = logging.getLogger(__name__)
CONTROLLER: Final = "attache-manager"
# What kopf follows: the kinds that people and other controllers write.
FOLLOWED: Final = (
    MODEL_INFERS,
    MODEL_INFER_ROLES,
    MODELS,
    SERVING_RUNTIMES,
    CLUSTER_SERVING_RUNTIMES,
    MODEL_TEMPLATES,
)


async def find_own_image(client: Client, pod: str) -> str:
    """``pod``: the name of the pod that this may be, which is its host name. Waits for an API server that is away."""
    while True:
        try:
            found = await client.get_or_none(PODS, pod, client.access.namespace)
        except Forbidden as error:
            log.warning("the image of this pod may not be read, so engines get '%s'; set --image: %s", DEFAULT, error)
            return DEFAULT
        except ClusterError as error:
            log.warning("the image of this pod is not known yet: %s", error)
            await asyncio.sleep(_PAUSE_S)
            continue
        containers = [] if found is None else found["spec"]["containers"]
        return next((str(one["image"]) for one in containers if one["name"] == _CONTAINER), DEFAULT)


class LeaderControllers:
    """``run`` waits for the Lease, and then runs the controllers. Each term begins without state: caches, queues and
    written values belong to one term. ``scaling``: runs the scaling of a term; None: no scaling.
    """

    def __init__(
        self,
        client: Client,
        settings: ModelControllerSettings,
        metrics: ManagerMetrics,
        election: LeaderElection,
        *,
        decisions: DecisionFunctions,
        source: Source | None,
        loads: LoadSource | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        self._client = client
        self._settings = settings
        self._metrics = metrics
        self._election = election
        self._decisions = decisions
        self._source = source
        self._loads = loads
        self._scaling = scaling
        self._models = ModelMetrics(metrics.registry)
        metrics.leader.set_function(lambda: float(election.is_leader))

    def leads(self) -> bool:
        """Whether this replica does the work now."""
        return self._election.is_leader

    def objects(self) -> Objects:
        """Models and ModelInfers, as the present term knows them."""
        return self._models.objects()

    async def run(self) -> None:
        """Run until cancelled; raises what ends the work by itself, such as the end of kopf's thread."""
        await self._election.run(self._lead)

    async def _lead(self) -> None:
        shared = SharedInformers(self._client, self._settings.informers, self._settings.probe_s)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(shared.run(), name="informers")
            tasks.create_task(self._work(shared), name="work")
            if self._scaling is not None:
                tasks.create_task(self._scaling(self._client, shared), name="scaling")

    async def _work(self, shared: SharedInformers) -> None:
        controller = ModelController(
            self._client,
            self._settings,
            self._metrics,
            decisions=self._decisions,
            source=self._source,
            loads=self._loads,
            shared=shared,
        )
        self._models.set_objects_source(controller.objects)
        try:
            await controller.run()
        finally:
            self._models.set_objects_source()


class ManagerRunner:
    """``run`` does all of it. Either part may be left to other processes."""

    def __init__(
        self, webhooks: WebhookServer | None, leader: LeaderControllers | None, exports: ExportServer | None = None
    ) -> None:
        self._webhooks = webhooks
        self._leader = leader
        self._exports = exports

    def is_ready(self) -> bool:
        """Whether webhooks and exports are served. Leadership does not count."""
        if self._exports is not None and not self._exports.is_ready():
            return False
        return self._webhooks is None or self._webhooks.ready.is_set()

    async def run(self) -> None:
        """Run until cancelled; raises OSError if the address is taken."""
        async with asyncio.TaskGroup() as tasks:
            if self._webhooks is not None:
                tasks.create_task(self._webhooks.run(), name="webhooks")
            if self._exports is not None:
                tasks.create_task(self._exports.run(), name="exports")
            if self._leader is not None:
                tasks.create_task(self._leader.run(), name="leader")


def kopf_source(client: Client, namespace: str | None) -> Source:
    """Events of our kinds from kopf."""

    async def source(enqueue: Callable[[str, str], None]) -> None:
        await KopfOperator(client.access, FOLLOWED, enqueue, namespace=namespace).run()

    return source

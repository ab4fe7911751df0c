# SPDX-License-Identifier: Apache-2.0
"""The admission webhooks of the manager role, which every replica serves."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from controller.gateway.compile.servers import LABEL
from controller.kube.informer import Informer, InformerTiming, Selection
from controller.kube.resources import (
    AUTOSCALING_POLICIES,
    AUTOSCALING_POLICY_BINDINGS,
    CONFIG_MAPS,
    GATEWAY_CONFIGS,
    MODEL_ROUTES,
    MODEL_SERVERS,
)
from controller.webhooks.admission.checks import counted_as, judge
from controller.webhooks.material import utc_now
from controller.webhooks.rotation import Rotation, RotationSettings
from controller.webhooks.server import ServerTls, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime

    from controller.kube.client import Client
    from controller.kube.metrics import ManagerMetrics
    from controller.webhooks.admission.reviews import Review, Verdict
    from controller.webhooks.rotation import Shows
    from extproc.api.picker_config import PickerCheck


class WebhookSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``listen``: where the webhooks are served. ``rotation``: of their certificates."""

    listen: str
    rotation: RotationSettings


class WebhookRole:
    """``run`` does all of it; ``ready`` once it can be asked. Objects that it has not heard of yet cost warnings alone.
    ``others``: servers that show the same certificate.
    """

    def __init__(
        self,
        client: Client,
        settings: WebhookSettings,
        metrics: ManagerMetrics,
        *,
        check_picker: PickerCheck,
        clock: Callable[[], datetime] = utc_now,
        timing: InformerTiming = InformerTiming(),  # noqa: B008 - frozen
        others: Sequence[Shows] = (),
    ) -> None:
        resources = (
            GATEWAY_CONFIGS,
            MODEL_ROUTES,
            MODEL_SERVERS,
            AUTOSCALING_POLICIES,
            AUTOSCALING_POLICY_BINDINGS,
        )
        informers = [Informer(client, one, timing=timing) for one in resources]
        informers.append(Informer(client, CONFIG_MAPS, Selection(labels=LABEL), timing=timing))
        self._informers: Mapping[str, Informer] = {one.resource.kind: one for one in informers}
        self._tls = ServerTls()
        self._rotation = Rotation(client, settings.rotation, [self._tls, *others], clock)
        self._settings = settings
        self._metrics = metrics
        self._check_picker = check_picker
        self.ready = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled; raises OSError if the address is taken."""
        async with asyncio.TaskGroup() as tasks:
            for kind, informer in self._informers.items():
                tasks.create_task(informer.run(), name=f"informer of {kind}")
            tasks.create_task(self._rotation.run(), name="certificates")
            tasks.create_task(self._serve(), name="webhooks")

    async def _serve(self) -> None:
        await self._rotation.ready.wait()
        self._metrics.certificate_ends_at_s.set_function(self._ends_at_s)
        for informer in self._informers.values():
            await informer.synced.wait()
        async with serving(self._settings.listen, self._tls, self._judge, self._count):
            self.ready.set()
            await asyncio.Event().wait()

    def _judge(self, review: Review) -> Verdict:
        known = {kind: informer.objects for kind, informer in self._informers.items()}
        return judge(review, known, self._check_picker)

    def _count(self, kind: str, outcome: str) -> None:
        self._metrics.reviews.labels(counted_as(kind), outcome).inc()

    def _ends_at_s(self) -> float:
        material = self._rotation.material
        return 0.0 if material is None else material.server.ends_at.timestamp()

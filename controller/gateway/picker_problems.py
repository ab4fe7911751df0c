# SPDX-License-Identifier: Apache-2.0
"""Reports what is wrong with an InferencePool: in the log, as metrics, and as Events of the pool.

The pool's ``status.parents`` belongs to gateways and is left alone.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal

from controller.kube.errors import ClusterError
from controller.kube.recorder import event_of
from controller.kube.resources import EVENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from controller.gateway.compile.picker_mode import Problem
    from controller.gateway.metrics import PickerMetrics
    from controller.kube.client import Client
    from controller.kube.resources import Object

log = logging.getLogger(__name__)


class PickerProblems:
    """``report`` reports what is wrong, once for each change. ``pool``: the object as last heard, None if it is not
    there.
    """

    def __init__(
        self, client: Client, metrics: PickerMetrics, pool: Callable[[], Object | None], component: str
    ) -> None:
        self._client = client
        self._metrics = metrics
        self._pool = pool
        self._component = component
        self._told: dict[str, str] = {}

    async def report(self, problems: Sequence[Problem]) -> None:
        """``problems`` are all that there are now."""
        wrong = {one.reason: one.message for one in problems}
        told, self._told = self._told, wrong
        self._metrics.wrong(wrong, told.keys() - wrong.keys())
        for reason, message in wrong.items():
            if told.get(reason) != message:
                log.warning("%s: %s", reason, message)
                await self._create_event(reason, message, "Warning")
        if told and not wrong:
            message = f"no longer: {', '.join(sorted(told))}"
            log.info("%s", message)
            await self._create_event("PoolServed", message, "Normal")

    async def _create_event(self, reason: str, message: str, type_: Literal["Normal", "Warning"]) -> None:
        """An Event is a courtesy: one that cannot be written is logged, and that is all."""
        pool = self._pool()
        if pool is None:
            return
        event = event_of(pool, type_, reason=reason, message=message, component=self._component)
        try:
            await self._client.create(EVENTS, event)
        except ClusterError as error:
            log.warning("an Event cannot be written: %s", error)

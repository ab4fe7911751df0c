# SPDX-License-Identifier: Apache-2.0
"""What AutoscalingPolicies say: whether they can be used, and by how many bindings they are."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

from controller.api.autoscaling_mistakes import schedule_mistakes
from controller.kube.errors import ClusterError
from controller.kube.recorder import write_status
from controller.kube.resources import AUTOSCALING_POLICIES

if TYPE_CHECKING:
    from controller.autoscaler.reconciler.bindings import PolicyView
    from controller.autoscaler.reconciler.followed import Followed
    from controller.kube.client import Client
    from controller.kube.executor import Counted

log = logging.getLogger(__name__)

_EACH_S: Final = 2.0


class PolicyStatuses:
    """Looks at policies that changed, or whose number of bindings did, every two seconds."""

    def __init__(self, client: Client, followed: Followed, counted: Counted) -> None:
        self._client = client
        self._followed = followed
        self._counted = counted
        self._said: dict[str, tuple[str, int]] = {}

    async def run(self) -> None:
        """Until cancelled. A write that fails is tried again."""
        while True:
            keys = self._followed.policies()
            for key in keys:
                policy = self._followed.policy(key)
                if policy is not None:
                    await self._look(key, policy)
            self._said = {key: said for key, said in self._said.items() if key in keys}
            await asyncio.sleep(_EACH_S)

    async def _look(self, key: str, policy: PolicyView) -> None:
        now = policy.thing["metadata"].get("resourceVersion", ""), self._followed.users_of(key)
        if self._said.get(key) == now:
            return
        try:
            await write_status(
                self._client, AUTOSCALING_POLICIES, policy.thing, policy_status(policy, now[1]), self._counted
            )
        except ClusterError as error:
            log.warning("the status of the AutoscalingPolicy %s cannot be written, tried again: %s", key, error)
            return
        self._said[key] = now


def policy_status(policy: PolicyView, bindings: int) -> dict[str, Any]:
    """Without times."""
    accepted = {"type": "Accepted", "status": "True", "reason": "Accepted", "message": "it has no mistake"}
    if policy.problem:
        accepted |= {"status": "False", "reason": "Invalid", "message": policy.problem[:1000]}
    elif policy.policy is not None and (found := list(schedule_mistakes(policy.policy.spec.schedules))):
        said = f"{'; '.join(found)}; all else of the policy holds"
        accepted |= {"status": "False", "reason": "ScheduleInvalid", "message": said[:1000]}
    return {"bindings": bindings, "conditions": [accepted]}

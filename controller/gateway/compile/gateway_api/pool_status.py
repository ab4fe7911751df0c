# SPDX-License-Identifier: Apache-2.0
"""What an InferencePool says of each Gateway whose routes refer to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.gateway.compile.gateway_api.gateway_spec import GROUP
from controller.gateway.compile.gateway_api.objects import CONTROLLER_NAME
from controller.kube.conditions import WantedEntry, WantedList, WantedStatus, fails, holds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from controller.gateway.compile.gateway_api.attachment import ParentResult
    from controller.gateway.compile.gateway_api.objects import Pool


def pool_status(
    pool: Pool, parents: Iterable[ParentResult], *, problem: str, picker_problem: str, gateway: str | None
) -> WantedStatus:
    """``parents``: of the routes that refer to it. ``problem``: why it cannot be used. ``picker_problem``: why its
    endpointPickerRef does not resolve. ``gateway``: the one Gateway that is served, None if all of our classes are.
    """
    accepted: dict[str, bool] = {}
    for one in parents:
        accepted[one.gateway] = accepted.get(one.gateway, False) or one.accepted.status == "True"
    resolved = fails("ResolvedRefs", "InvalidExtensionRef", picker_problem) if picker_problem else holds("ResolvedRefs")
    entries = []
    for key in sorted(accepted):
        namespace, _, name = key.partition("/")
        refused = fails("Accepted", "HTTPRouteNotAccepted", "the Gateway accepts no HTTPRoute that refers to it")
        if problem:
            refused = fails("Accepted", "NotSupportedByParent", problem)
        is_accepted = accepted[key] and not problem
        reference = {"group": GROUP, "kind": "Gateway", "name": name, "namespace": namespace}
        entries.append(
            WantedEntry(
                identity={"parentRef": reference, "controllerName": CONTROLLER_NAME},
                conditions=(holds("Accepted") if is_accepted else refused, resolved),
            )
        )
    identity = pool.identity
    return WantedStatus(
        kind="InferencePool",
        key=identity.key,
        generation=identity.generation,
        conditions=(),
        lists=(WantedList(name="parents", entries=tuple(entries), controller=CONTROLLER_NAME, gateway=gateway or ""),),
        is_plain=True,
    )

# SPDX-License-Identifier: Apache-2.0
"""The status of many models: how many servers have each, and why loads have failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from controller.kube.api_resources import key_of
from controller.models.model.model_state import PURPOSE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controller.kube.api_resources import Object
    from controller.models.model.model_state import ModelState, ReportedModel, ResolvedModel

# Between two reads of the agents' lists.
ASK_EACH_S: Final = 10.0
_HELD: Final = frozenset({"loaded", "unloading"})
# Of a load's message, which may repeat an artefact's text.
_LONGEST: Final = 300
# In the message of the condition.
_MOST_NAMED: Final = 5


def pods_hosting_models(model: ResolvedModel, pods: Sequence[Object]) -> frozenset[str]:
    """The running engines' pods, by key; none if the Model has one model."""
    if not model.spec.models:
        return frozenset()
    running = [one for one in pods if (one.get("status") or {}).get("phase") == "Running"]
    return frozenset(key_of(one) for one in running if PURPOSE not in (one["metadata"].get("labels") or {}))


def hosted_models_status(model: ResolvedModel, observed: ModelState) -> list[dict[str, Any]]:
    """As ``status.models`` has it. While there are agents and none has answered, the last status stays."""
    before = {one["name"]: one for one in (observed.thing.get("status") or {}).get("models") or ()}
    if not pods_hosting_models(model, observed.pods):
        before = {}
    lists = [{one.id: one for one in each} for each in observed.lists.values()]
    found = []
    for one in model.spec.models:
        told = [each[one.name] for each in lists if one.name in each]
        if lists or not before:
            found.append(_of_model(one.name, told))
        elif one.name in before:
            found.append(dict(before[one.name]))
    return found


def _of_model(name: str, told: Sequence[ReportedModel]) -> dict[str, Any]:
    states = [one.state for one in told]
    servers = sum(state in _HELD for state in states)
    failures = [one.message for one in told if one.state == "failed"]
    if servers:
        state = "Loaded"
    elif "loading" in states:
        state = "Loading"
    else:
        state = "Failed" if failures else "NotLoaded"
    line: dict[str, Any] = {"name": name, "state": state, "servers": servers}
    return {**line, "message": min(failures)[:_LONGEST]} if failures else line


def failed_models(hosted: Sequence[Mapping[str, Any]]) -> str:
    """The message of the condition; empty if none has failed."""
    failed = [one for one in hosted if one["state"] == "Failed"]
    shown = "; ".join(str(one["message"]) for one in failed[:_MOST_NAMED])
    more = f"; and {len(failed) - _MOST_NAMED} more, see status.models" if len(failed) > _MOST_NAMED else ""
    return shown + more

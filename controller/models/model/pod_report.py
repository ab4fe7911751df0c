# SPDX-License-Identifier: Apache-2.0
"""What a Model's pods tell: how far they are, why they fail, and what their start took."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.kube.resources import key_of
from controller.models.model.observed import BACKEND, PURPOSE
from controller.models.model.pods import DOWNLOAD, ENGINE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from controller.kube.resources import Object

# Why a container waits, where waiting alone does not help.
_STUCK: Final = frozenset(
    {
        *("CrashLoopBackOff", "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError"),
        *("CreateContainerError", "RunContainerError"),
    }
)


class PodFailure(msgspec.Struct, frozen=True):
    """``reason``: ModelLoadFailed or RuntimeUnhealthy, as KServe has them. ``message``: which pod and why."""

    reason: str
    message: str


def of_backend(pods: Iterable[Object], backend: str) -> list[Object]:
    """The engine pods of one backend that are not being deleted, by name."""
    found = []
    for one in pods:
        labels = one["metadata"].get("labels") or {}
        if labels.get(BACKEND) == backend and PURPOSE not in labels and "deletionTimestamp" not in one["metadata"]:
            found.append(one)
    return sorted(found, key=key_of)


def failure_of(pods: Sequence[Object]) -> PodFailure | None:
    """Of the first pod that cannot go on by itself."""
    return next((found for pod in pods for found in _failures(pod)), None)


def _failures(pod: Object) -> Iterator[PodFailure]:
    status = pod.get("status") or {}
    for one in (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())):
        waiting = (one.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in _STUCK:
            continue
        ended = (one.get("lastState") or {}).get("terminated") or {}
        details = [str(waiting["reason"])]
        if "exitCode" in ended:
            details.append(f"exit status {ended['exitCode']}")
        details += [str(text).strip() for text in (ended.get("message") or waiting.get("message"),) if text]
        reason = "ModelLoadFailed" if one.get("name") == DOWNLOAD else "RuntimeUnhealthy"
        yield PodFailure(reason, f"pod {pod['metadata']['name']}, container {one.get('name')}: {', '.join(details)}")


def is_scheduled(pods: Iterable[Object]) -> bool:
    """Whether any pod has a node."""
    return any(_condition(one, "PodScheduled").get("status") == "True" for one in pods)


def start_times(pods: Iterable[Object]) -> Mapping[str, float] | None:
    """As the status has them, of the pod that became ready last; None while none is."""
    ready = [one for one in pods if _condition(one, "Ready").get("status") == "True"]
    if not ready:
        return None
    pod = max(ready, key=lambda one: (_condition(one, "Ready").get("lastTransitionTime") or "", key_of(one)))
    download = ((_container(pod, "initContainerStatuses", DOWNLOAD).get("state") or {}).get("terminated")) or {}
    engine = (_container(pod, "containerStatuses", ENGINE).get("state") or {}).get("running") or {}
    spans = {
        "schedulingSeconds": (
            pod["metadata"].get("creationTimestamp"),
            _condition(pod, "PodScheduled").get("lastTransitionTime"),
        ),
        "downloadSeconds": (download.get("startedAt"), download.get("finishedAt")),
        "loadSeconds": (engine.get("startedAt"), _condition(pod, "Ready").get("lastTransitionTime")),
    }
    return {name: seconds for name, (start, end) in spans.items() if (seconds := _between(start, end)) is not None}


def _condition(pod: Object, type_: str) -> Mapping[str, Any]:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return next((one for one in conditions if one.get("type") == type_), {})


def _container(pod: Object, field: str, name: str) -> Mapping[str, Any]:
    return next((one for one in (pod.get("status") or {}).get(field) or () if one.get("name") == name), {})


def _between(start: str | None, end: str | None) -> float | None:
    if not start or not end:
        return None
    return max((datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds(), 0.0)

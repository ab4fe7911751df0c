# SPDX-License-Identifier: Apache-2.0
"""Weights on nodes ahead of pods: a DaemonSet where nodes keep them, a Job where a claim does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.kube.resources import DAEMON_SETS, JOBS, Resource
from controller.models.model.names import digest
from controller.models.model.observed import BACKEND, MODEL, PURPOSE
from controller.models.model.pods import download, template
from controller.models.runtimes.weights import WEIGHTS, cache_volume

if TYPE_CHECKING:
    from collections.abc import Iterator

    from controller.models.model.observed import Settings
    from controller.models.model.resolved import Resolved

# What decides on which nodes a pod may run.
_PLACEMENT: Final = (
    "nodeSelector",
    "affinity",
    "tolerations",
    "runtimeClassName",
    "imagePullSecrets",
    "serviceAccountName",
)
_WARM: Final = "warm"
_METRICS_PORT: Final = 9006
# It stays, so that the weights are in use and nobody evicts them.
_HOLD: Final = ("--hold", f"--metrics=0.0.0.0:{_METRICS_PORT}")


def cannot_warm(model: Resolved) -> str:
    """Why ``warm`` has no effect; empty if it has, or is not asked for."""
    if not model.spec.warm:
        return ""
    if not model.weights.is_downloaded:
        return "the weights are mounted where they are, so there is nothing to fetch ahead"
    if model.spec.cache.claim is None and model.spec.cache.host_path is None:
        return "each pod has its own copy of the weights; write cache.hostPath or cache.claim to fetch them ahead"
    return ""


def warmers(model: Resolved, settings: Settings) -> Iterator[tuple[Resource, str, dict[str, Any]]]:
    """The kind, name and spec of what fetches the weights ahead."""
    if not model.spec.warm or cannot_warm(model):
        return
    if model.spec.cache.claim is not None:
        pod = {**_pod(model, settings), "restartPolicy": "OnFailure"}
        # a Job's template cannot change: another one has another name
        name = f"{model.name}-{_WARM}-{digest(msgspec.json.encode(pod, order='sorted').decode())}"
        yield JOBS, name, {"backoffLimit": 6, "template": {"metadata": {"labels": {MODEL: model.name}}, "spec": pod}}
        return
    seen: list[object] = []
    for made in model.backends:
        spec = template(model, made, made.roles[0], "entry", settings)["spec"]
        placement = {name: spec[name] for name in _PLACEMENT if name in spec}
        if placement in seen:
            continue
        seen.append(placement)
        labels = {MODEL: model.name, BACKEND: made.backend.name, PURPOSE: _WARM}
        pod = {"metadata": {"labels": labels}, "spec": {**_pod(model, settings, *_HOLD), **placement}}
        pod["spec"]["containers"][0]["readinessProbe"] = {"httpGet": {"path": "/readyz", "port": _METRICS_PORT}}
        name = f"{model.child(made.backend)}-{_WARM}"
        yield DAEMON_SETS, name, {"selector": {"matchLabels": labels}, "template": pod}


def _pod(model: Resolved, settings: Settings, *more: str) -> dict[str, Any]:
    """Without a link: nothing here reads the weights."""
    fetching = download(model, settings)
    args = [one for one in fetching["args"] if not one.startswith("--link=")]
    mounts = [one for one in fetching["volumeMounts"] if one["name"] == WEIGHTS]
    return {
        "containers": [{**fetching, "args": [*args, *more], "volumeMounts": mounts}],
        "volumes": [cache_volume(model.spec.cache)],
    }

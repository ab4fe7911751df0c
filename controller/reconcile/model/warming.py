# SPDX-License-Identifier: Apache-2.0
"""Weights on nodes ahead of pods: a DaemonSet where nodes keep them, a Job where a claim does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from controller.cluster.resources import DAEMON_SETS, JOBS, Resource
from controller.reconcile.model.names import digest
from controller.reconcile.model.observed import BACKEND, MODEL
from controller.reconcile.model.pods import DOWNLOAD, download, template
from controller.runtimes.weights import WEIGHTS, cache_volume

if TYPE_CHECKING:
    from collections.abc import Iterator

    from controller.reconcile.model.observed import Settings
    from controller.reconcile.model.resolved import Resolved

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
        pod["containers"] = pod.pop("initContainers")
        # a Job's template cannot change: another URI has another Job
        yield JOBS, f"{model.name}-{_WARM}-{digest(model.spec.uri)}", {"backoffLimit": 6, "template": {"spec": pod}}
        return
    seen: list[object] = []
    for made in model.backends:
        spec = template(model, made, made.roles[0], "entry", settings)["spec"]
        placement = {name: spec[name] for name in _PLACEMENT if name in spec}
        if placement in seen:
            continue
        seen.append(placement)
        labels = {MODEL: model.name, BACKEND: made.backend.name, "attache.dev/purpose": _WARM}
        pod = {**_pod(model, settings), **placement}
        pod["containers"] = [{"name": "done", "image": settings.pause_image}]
        yield (
            DAEMON_SETS,
            f"{model.child(made.backend)}-{_WARM}",
            {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": pod}},
        )


def _pod(model: Resolved, settings: Settings) -> dict[str, Any]:
    """Without a link: nothing here reads the weights."""
    fetching = download(model, settings)
    return {
        "initContainers": [
            {
                **fetching,
                "name": DOWNLOAD,
                "args": [one for one in fetching["args"] if not one.startswith("--link=")],
                "volumeMounts": [one for one in fetching["volumeMounts"] if one["name"] == WEIGHTS],
            }
        ],
        "volumes": [cache_volume(model.spec.cache)],
    }

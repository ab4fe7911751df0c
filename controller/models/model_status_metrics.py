# SPDX-License-Identifier: Apache-2.0
"""Metrics of Models: their phases and replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, get_args, get_type_hints

from prometheus_client.registry import Collector

from controller.api.statuses import ModelStatus
from controller.kube.api_resources import MODELS
from controller.kube.informer import owner_key
from controller.kube.metrics_and_health import MetricFamily, encode_labels

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

    from controller.kube.api_resources import Object

_MODEL: Final = ("namespace", "model")
_PHASES: Final[tuple[str, ...]] = tuple(
    name for one in get_args(get_type_hints(ModelStatus)["phase"]) for name in get_args(one)
)
Objects = tuple["Collection[Object]", "Collection[Object]"]
"""Models, and ModelInfers."""
_NONE: Final[Objects] = ((), ())


class ModelMetrics(Collector):
    """In a manager's registry. Series come from what ``follow`` was given at the scrape, so they end with their
    Model.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.objects: Callable[[], Objects] = lambda: _NONE
        registry.register(self)

    def set_objects_source(self, objects: Callable[[], Objects] = lambda: _NONE) -> None:
        """Those of the present term; without an argument: none, as another replica leads."""
        self.objects = objects

    def collect(self) -> Iterator[Metric]:
        """Called in the thread of a scrape."""
        models, infers = self.objects()
        # by the key of the Model
        wanted: dict[str, int] = {}
        for one in list(infers):
            kind, _, owner = owner_key(one).partition("/")
            if kind == MODELS.kind:
                wanted[owner] = wanted.get(owner, 0) + int(one["spec"].get("replicas", 1))
        keys = {_key(one): one.get("status") or {} for one in list(models)}
        labels = {key: encode_labels(_MODEL, key) for key in keys}
        yield MetricFamily(
            "attache_model_phase",
            "1 for the phase of the Model, 0 for the others; no series before it has one",
            "gauge",
            [
                (encode_labels((*_MODEL, "phase"), (*key, phase)), float(phase == status["phase"]))
                for key, status in keys.items()
                if "phase" in status
                for phase in _PHASES
            ],
        )
        yield MetricFamily(
            "attache_model_ready",
            "1 while the Model's condition Ready is True",
            "gauge",
            [(labels[key], float(_is_ready(status))) for key, status in keys.items()],
        )
        yield MetricFamily(
            "attache_model_wanted_replicas",
            "Replicas that its ModelInfers are to have",
            "gauge",
            [(labels[key], wanted.get("/".join(key), 0)) for key in keys],
        )
        yield MetricFamily(
            "attache_model_ready_replicas",
            "Replicas of all its backends that serve",
            "gauge",
            [(labels[key], int(status.get("readyReplicas") or 0)) for key, status in keys.items()],
        )

    def describe(self) -> Iterator[Metric]:
        """Nothing: what is collected depends on the Models."""
        return iter(())


def _key(model: Object) -> tuple[str, str]:
    return str(model["metadata"]["namespace"]), str(model["metadata"]["name"])


def _is_ready(status: Object) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions") or ())

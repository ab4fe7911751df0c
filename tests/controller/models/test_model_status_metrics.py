# SPDX-License-Identifier: Apache-2.0
"""Series of Models."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry

from controller.models.model_status_metrics import ModelMetrics


def model(name: str, **status: object) -> dict[str, Any]:
    return {"metadata": {"namespace": "team", "name": name}, "spec": {}, **({"status": status} if status else {})}


def infer(name: str, of: str | None, **spec: int) -> dict[str, Any]:
    owners = {} if of is None else {"ownerReferences": [{"kind": "Model", "name": of, "controller": True}]}
    return {"metadata": {"namespace": "team", "name": name, **owners}, "spec": spec}


def test_a_model_has_its_phase_whether_it_is_ready_and_its_replicas_until_it_leaves() -> None:
    registry = CollectorRegistry()
    metrics = ModelMetrics(registry)

    def sample(what: str, name: str, **more: str) -> float | None:
        return registry.get_sample_value(f"attache_model_{what}", {"namespace": "team", "model": name, **more})

    assert sample("ready", "llama") is None
    ready = [{"type": "Ready", "status": "True"}, {"type": "ServersCreated", "status": "False"}]
    models = [model("llama", phase="Loaded", readyReplicas=3, replicas=4, conditions=ready), model("new")]
    infers = [infer("llama-a", "llama", replicas=4), infer("llama-b", "llama"), infer("own", None, replicas=7)]
    metrics.set_objects_source(lambda: (models, infers))
    found = {
        phase: sample("phase", "llama", phase=phase)
        for phase in ("Pending", "Standby", "Loading", "Loaded", "FailedToLoad")
    }
    assert found == {"Pending": 0, "Standby": 0, "Loading": 0, "Loaded": 1, "FailedToLoad": 0}
    assert [sample(one, "llama") for one in ("ready", "wanted_replicas", "ready_replicas")] == [1, 5, 3]
    # the manager has not looked at it yet
    assert sample("phase", "new", phase="Pending") is None
    assert [sample(one, "new") for one in ("ready", "wanted_replicas", "ready_replicas")] == [0, 0, 0]
    models.pop(0)
    assert sample("ready", "llama") is None
    metrics.set_objects_source()
    assert sample("ready", "new") is None

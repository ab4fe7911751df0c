# SPDX-License-Identifier: Apache-2.0
"""ModelServers and ModelRoutes of a Model: which engines answer for which names, in which shares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from controller.api.crds.schema import to_plain
from controller.models.model.activation import activation_spec
from controller.models.model.names import digest
from controller.models.model.pods import AGENT_PORT
from controller.models.model_infer.labels import ENTRY, GROUP, MODEL_INFER, ROLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from controller.models.model.resolved import Resolved, ResolvedBackend

# As the presets' flags have it.
_KV_EVENTS: Final = {"port": 5557, "replayPort": 5657, "topic": "kv-events"}


def server_spec(model: Resolved, made: ResolvedBackend, start_times: Mapping[str, str]) -> dict[str, Any]:
    """The engines of one backend. ``start_times``: what their starts take, by backend, where that is known."""
    preset, config = made.preset.spec, made.roles[0].engine.config
    spec: dict[str, Any] = {
        "model": model.served_name,
        "workloadSelector": {"matchLabels": {MODEL_INFER: model.child(made.backend), ENTRY: "true"}},
        "workloadPort": {"port": preset.port},
    }
    if preset.metrics is not None:
        spec["engine"] = preset.metrics
    else:
        spec["scrapeInterval"] = "0s"
    if made.backend.disaggregation is not None:
        spec["pdGroup"] = {
            "prefillLabels": {ROLE: "prefill"},
            "decodeLabels": {ROLE: "decode"},
            "groupKey": GROUP,
        }
    if config.kv_events:
        ranks = {"dataParallelSize": config.parallelism.data} if config.parallelism.data > 1 else {}
        spec["kvEvents"] = {**_KV_EVENTS, **ranks}
    asked_for = [one for one in model.spec.adapters if not one.pinned]
    if asked_for and preset.agent.enabled:
        spec["adapterLoading"] = {
            "port": AGENT_PORT,
            "adapters": [{"name": one.name, "source": one.uri} for one in asked_for],
        }
        if config.lora.max_loaded is not None:
            spec["adapterLoading"]["slots"] = config.lora.max_loaded
    activation = activation_spec(model, made, start_times)
    if activation is not None:
        spec["activation"] = activation
    return spec


def shares(model: Resolved, ready: Mapping[str, int]) -> dict[str, int]:
    """Weights by backend. ``ready``: replicas that serve, by backend.

    A backend without a ready replica gets no requests while another has one: a canary that does not start harms nobody.
    Without any, all keep theirs, so that a request can start one that is scaled to zero.
    """
    written = {one.backend.name: one.backend.weight for one in model.backends}
    serving = {name: weight for name, weight in written.items() if ready.get(name, 0) > 0 and weight > 0}
    return {name: serving.get(name, 0) for name in written} if serving else written


def routes(model: Resolved, weights: Mapping[str, int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """ModelRoutes by name: one for the served name and the adapters, and one for each alias."""
    rule = {
        "targetModels": [
            {"modelServerName": model.child(one.backend), "weight": weights[one.backend.name]} for one in model.backends
        ]
    }
    shared: dict[str, Any] = {"rules": [rule]}
    if model.spec.parent_refs:
        shared["parentRefs"] = [to_plain(one) for one in model.spec.parent_refs]
    adapters = [one.name for one in model.spec.adapters]
    own = {"modelName": model.served_name, **shared}
    yield model.name, {**own, "loraAdapters": adapters} if adapters else own
    for alias in model.spec.aliases:
        yield alias_route(model.name, alias), {"modelName": alias, **shared}


def alias_route(model: str, alias: str) -> str:
    """Aliases may have characters that names of objects must not."""
    return f"{model}-alias-{digest(alias)}"

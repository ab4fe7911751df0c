# SPDX-License-Identifier: Apache-2.0
"""Transformers and explainers of Models, as KServe has them: what runs them, and how requests pass them.

One with pods of its own is run as a backend is: a ModelInfer and a ModelServer. It calls the predictor through the
gateway, at the listener of steps, so the engines are picked, counted and limited as for any request.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace

from controller.api.model import Backend
from controller.api.pod_spec_checks import resources_type_errors
from controller.api.serving_runtime import ConditionalArguments, EngineConfig, RuntimeAgent, ServingRuntimeSpec
from controller.api.transformers_and_explainers import Transformer
from controller.models.runtimes.engine_settings import AGENT_PORT, BATCHED_PORT, EngineSettings
from controller.models.runtimes.presets import Preset, PresetScope
from extproc.wire_names import EXPLAIN_VERB, MODELS_PATH

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from controller.api.model import ModelSpec
    from controller.api.transformers_and_explainers import Step
    from extproc.api.model_server import ServingProtocol

# Names of backends that steps are like, and of their ModelServers' ends.
TRANSFORMER: Final = "transformer"
EXPLAINER: Final = "explainer"
# In an engine's pod; as KServe calls it.
COLOCATED: Final = "transformer-container"
# Explainers are asked by V1 alone.
EXPLAIN_MATCH: Final = {"uri": {"regex": f"{MODELS_PATH}/.*{EXPLAIN_VERB}"}}
# As KServe's SDK calls the protocols in which a step can call a predictor.
_PROTOCOLS: Final[Mapping[str, str]] = {"V1": "v1", "V2": "v2"}


def step_validation_errors(spec: ModelSpec) -> Iterator[str]:
    """Each with what to write instead."""
    for name, step in transformer_and_explainer(spec):
        if not step.image and not _has_image(step):
            yield f"{name} names no image; write {name}.image"
        yield from resources_type_errors(step.resources, f"{name}.resources")
        if any(one.name == name for one in spec.backends) and not is_colocated(step):
            yield f"a backend is called '{name}', and the objects of the {name} have that name; rename the backend"
    transformer = spec.transformer
    if transformer is None or not transformer.colocated:
        return
    for field in ("replicas", "pod"):
        if getattr(transformer, field):
            yield f"transformer.{field} has no effect with colocated; write it into the backends, or remove colocated"
    if any(one.disaggregation is not None for one in spec.backends):
        yield "transformer.colocated: prefill and decode are different pods; remove colocated"


def _has_image(step: Step) -> bool:
    return any(one.get("name") == "engine" and one.get("image") for one in step.pod.get("containers") or ())


def port_conflict(spec: ModelSpec, preset: Preset) -> Iterator[str]:
    """Why a transformer cannot listen in the pods of an engine that ``preset`` starts."""
    transformer = spec.transformer
    if transformer is None or not transformer.colocated:
        return
    taken = {preset.spec.port: "engine", **({AGENT_PORT: "agent"} if preset.spec.agent.enabled else {})}
    if spec.batching is not None:
        taken[BATCHED_PORT] = "engine"
    if transformer.port in taken:
        who = taken[transformer.port]
        yield f"transformer.port is {transformer.port}, where the {who} listens in the same pod; write another one"


def transformer_and_explainer(spec: ModelSpec) -> Iterator[tuple[str, Step]]:
    """All that the Model has."""
    if spec.transformer is not None:
        yield TRANSFORMER, spec.transformer
    if spec.explainer is not None:
        yield EXPLAINER, spec.explainer


def is_colocated(step: Step) -> bool:
    """Whether it runs in the engines' pods."""
    return isinstance(step, Transformer) and step.colocated


def steps_with_own_pods(spec: ModelSpec) -> list[tuple[str, Step]]:
    """Those with pods of their own."""
    return [(name, step) for name, step in transformer_and_explainer(spec) if not is_colocated(step)]


class ResolvedStep(msgspec.Struct, frozen=True):
    """A step as what a backend is made of."""

    backend: Backend
    preset: Preset
    settings: EngineSettings


def step_engine(name: str, step: Step, like: EngineSettings, predictor: str) -> ResolvedStep:
    """``like``: the predictor's settings, whose protocol it has. ``predictor``: where it calls that, ``host`` or
    ``host:port``.
    """
    protocol: ServingProtocol = "V1" if name == EXPLAINER else like.protocol
    config = EngineConfig(
        image=step.image,
        command=step.command,
        args=step.args,
        env=step.env,
        resources=step.resources,
        drain_timeout=step.drain_timeout,
    )
    preset = ServingRuntimeSpec(
        engine="Custom",
        protocol_versions=(protocol,),
        port=step.port,
        arguments=tuple(ConditionalArguments(args=(one,)) for one in _words(step, like.protocol, predictor)),
        agent=RuntimeAgent(enabled=False),
        pod={"containers": [{"name": "engine", **readiness_probe(step)}]},
    )
    settings = replace(
        like,
        port=step.port,
        grpc_port=None,
        protocol=protocol,
        config=config,
        role=None,
        connector=None,
        has_adapters=False,
    )
    return ResolvedStep(
        Backend(name=name, replicas=step.replicas), Preset(name, PresetScope.BUILT_IN, preset), settings
    )


def readiness_probe(step: Step) -> dict[str, Any]:
    """Of its container: it has a model as soon as it listens."""
    return {"readinessProbe": {"tcpSocket": {"port": step.port}, "periodSeconds": 2}}


def _words(step: Step, protocol: ServingProtocol, predictor: str) -> Iterator[str]:
    """KServe's, but for those that the user has written. ``{name}`` and ``{port}`` are settings."""
    flags = {
        "--model_name": "{name}",
        "--http_port": "{port}",
        "--predictor_host": predictor,
        **({"--predictor_protocol": _PROTOCOLS[protocol]} if protocol in _PROTOCOLS else {}),
        "--predictor_use_ssl": "false",
        "--predictor_request_timeout_seconds": str(max(math.ceil(step.timeout), 1)),
    }
    for flag, value in flags.items():
        if not any(one == flag or one.startswith(f"{flag}=") for one in step.args):
            yield f"{flag}={value}"

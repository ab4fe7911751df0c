# SPDX-License-Identifier: Apache-2.0
"""Typed fields as settings by name; a preset's rules turn these into arguments; where an engine finds its weights.

A setting that is unset, or has a value without effect (a degree of 1), is missing.

    name                         the served name; missing, as format is, where a server has many models
    model, port                  the directory of weights, or of many models; the engine's port; always there
    grpcPort                     its port of gRPC
    protocol                     by which the engine is asked: OpenAI, V1, V2 or TensorFlow; always there
    multiModel                   true, where a server has many models
    format, formatVersion        of the weights
    tensor, pipeline, data       degrees of parallelism above 1
    expert                       true
    gpus                         GPUs of one pod, if the preset has an accelerator
    nodes, node                  pods of one engine, if more than 1; and this one: entry or worker
    maxLength                    tokens of prompt and answer
    prefixCaching                true or false
    kvEvents, promptTokenDetails true
    lora                         true, where there are adapters
    maxLoras, maxCachedLoras, maxLoraRank
    connector, role              of prefill and decode: NIXL, LMCache or Mooncake; prefill or decode
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec

from controller.api.model import ModelFormat
from controller.api.serving_runtime import Connector, EngineConfig
from extproc.api.model_server import ServingProtocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from controller.api.model import WeightsCache
    from controller.api.serving_runtime import ConditionalArguments

MODEL_PATH: Final = "/mnt/models"
# Of the runtime agent, beside the engine.
AGENT_PORT: Final = 9000
# Where an engine listens whose own port the batcher has, so that old and new pods of a rollout have the same port.
BATCHED_PORT: Final = 9010
NAMES: Final = frozenset(
    {
        *("name", "model", "port", "grpcPort", "protocol", "format", "formatVersion", "tensor", "pipeline", "data"),
        "expert",
        *("gpus", "nodes", "node", "maxLength", "prefixCaching", "kvEvents", "promptTokenDetails"),
        *("lora", "maxLoras", "maxCachedLoras", "maxLoraRank", "multiModel", "connector", "role"),
    }
)
Node = Literal["entry", "worker"]
# JSON in arguments has braces, too, but never a bare word in them.
_PLACE: Final = re.compile(r"(?<!\$)\{([A-Za-z]+)\}")
_ANY: Final = "*"
CACHE_PATH: Final = "/var/cache/attache"
WEIGHTS: Final = "weights"
MODELS: Final = "models"
_DEFAULT_FORMAT: Final = "huggingface"
# By the suffix of a single file.
_FORMATS: Final = {".gguf": "gguf", ".onnx": "onnx"}
_MOUNTED: Final = ("pvc", "file")


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine is started for. ``served_name``: of the model. ``path`` and ``format``: of its weights. ``port``
    and ``grpc_port``: where it listens. ``protocol``: by which it is asked over REST. ``config``: all layers merged.
    ``role`` and ``connector``: of prefill and decode. ``has_adapters``: LoRA adapters are loaded into it.
    ``has_models``: many models are.
    """

    served_name: str
    path: str
    format: ModelFormat
    port: int
    grpc_port: int | None = None
    protocol: ServingProtocol = "OpenAI"
    config: EngineConfig
    role: Literal["prefill", "decode"] | None = None
    connector: Connector | None = None
    has_adapters: bool = False
    has_models: bool = False


def gpus_per_pod(config: EngineConfig) -> int | None:
    """GPUs of one pod; None if they cannot be shared out evenly."""
    total = config.parallelism.tensor * config.parallelism.pipeline * config.parallelism.data
    each, rest = divmod(total, config.nodes)
    return None if rest else each


def engine_settings(engine: EngineSettings, node: Node) -> Mapping[str, str]:
    """By name."""
    config, spread, lora = engine.config, engine.config.parallelism, engine.config.lora
    degrees = {"tensor": spread.tensor, "pipeline": spread.pipeline, "data": spread.data, "nodes": config.nodes}
    numbers = {
        "port": engine.port,
        "grpcPort": engine.grpc_port,
        "gpus": gpus_per_pod(config),
        **{name: degree for name, degree in degrees.items() if degree > 1},
        "maxLength": config.max_length,
        "maxLoras": lora.max_loaded,
        "maxCachedLoras": lora.max_cached,
        "maxLoraRank": lora.max_rank,
    }
    switches = {
        "expert": spread.expert or None,
        "prefixCaching": config.prefix_caching,
        "kvEvents": config.kv_events or None,
        "promptTokenDetails": config.prompt_token_details or None,
        "lora": engine.has_adapters or None,
        "multiModel": engine.has_models or None,
    }
    texts = {
        "name": None if engine.has_models else engine.served_name,
        "model": engine.path,
        "protocol": engine.protocol,
        "format": None if engine.has_models else engine.format.name,
        "formatVersion": None if engine.has_models else engine.format.version,
        "node": node if config.nodes > 1 else None,
        "connector": engine.connector,
        "role": engine.role,
    }
    found = {name: str(number) for name, number in numbers.items() if number is not None}
    found |= {name: "true" if value else "false" for name, value in switches.items() if value is not None}
    return {**found, **{name: text for name, text in texts.items() if text is not None}}


class CommandLine(NamedTuple):
    """``args``: of the command line. ``env``: as a container has it."""

    args: list[str]
    env: list[dict[str, Any]]


def build_command_line(rules: Sequence[ConditionalArguments], settings: Mapping[str, str]) -> CommandLine:
    """What the rules that hold add, in their order."""
    holding = [one for one in rules if _holds(one.when, settings)]
    env = [msgspec.to_builtins(one) for rule in holding for one in rule.env]
    filled = [{**one, "value": _filled(one["value"], settings)} if one.get("value") else one for one in env]
    return CommandLine(
        args=[_filled(one, settings) for rule in holding for one in rule.args],
        env=[{name: value for name, value in one.items() if value is not None} for one in filled],
    )


def unknown_settings(rules: Iterable[ConditionalArguments]) -> Iterator[str]:
    """Names in rules that are no settings: a rule with one never holds, or leaves the place unfilled."""
    for rule in rules:
        yield from sorted(_used(rule) - NAMES)


def uses_setting(rules: Iterable[ConditionalArguments], name: str) -> bool:
    """Whether the command line or the environment depends on it."""
    return any(name in _used(rule) for rule in rules)


def _used(rule: ConditionalArguments) -> set[str]:
    texts = [*rule.args, *(one.value or "" for one in rule.env)]
    return {*rule.when, *(name for text in texts for name in _PLACE.findall(text))}


def _holds(when: Mapping[str, str], settings: Mapping[str, str]) -> bool:
    return all(name in settings and value in (_ANY, settings[name]) for name, value in when.items())


def _filled(text: str, settings: Mapping[str, str]) -> str:
    return _PLACE.sub(lambda match: settings.get(match[1], match[0]), text)


class WeightsMount(msgspec.Struct, frozen=True):
    """``path``: of the weights, for the engine. ``volumes``: of the pod. ``mounts``: of the engine. ``is_downloaded``:
    an init container has to fetch them.
    """

    path: str
    volumes: tuple[Mapping[str, Any], ...]
    mounts: tuple[Mapping[str, Any], ...]
    is_downloaded: bool


def model_format(uri: str, written: ModelFormat | None) -> ModelFormat:
    """The format in the spec, or else by the file's suffix."""
    return written or ModelFormat(name=_FORMATS.get(_name(uri).suffix, _DEFAULT_FORMAT))


def weights_from_uri(uri: str, cache: WeightsCache) -> WeightsMount:
    """``pvc://CLAIM/PATH`` and ``file:///PATH`` are mounted where they are, all else is downloaded."""
    scheme, _, place = uri.partition("://")
    if scheme not in _MOUNTED:
        # the link into the cache is the pod's own, the cache may be shared
        volumes = ({"name": MODELS, "emptyDir": {}}, cache_volume(cache))
        mounts = (
            {"name": MODELS, "mountPath": str(PurePosixPath(MODEL_PATH).parent), "readOnly": True},
            {"name": WEIGHTS, "mountPath": CACHE_PATH, "readOnly": True},
        )
        return WeightsMount(_file_in(MODEL_PATH, uri), volumes, mounts, is_downloaded=True)
    mount: dict[str, Any] = {"name": MODELS, "mountPath": MODEL_PATH, "readOnly": True}
    if scheme == "file":
        volume: dict[str, Any] = {"name": MODELS, "hostPath": {"path": _directory(place)}}
    else:
        claim, _, path = place.partition("/")
        volume = {"name": MODELS, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        if inner := _directory(path.strip("/")):
            mount["subPath"] = inner
    return WeightsMount(_file_in(MODEL_PATH, uri), (volume,), (mount,), is_downloaded=False)


def repository_weights(cache: WeightsCache) -> WeightsMount:
    """Of many models: a directory of the pod, which the agent fills."""
    volumes = ({"name": MODELS, "emptyDir": {}}, cache_volume(cache))
    mounts = (
        {"name": MODELS, "mountPath": MODEL_PATH, "readOnly": True},
        {"name": WEIGHTS, "mountPath": CACHE_PATH, "readOnly": True},
    )
    return WeightsMount(MODEL_PATH, volumes, mounts, is_downloaded=False)


def cache_volume(cache: WeightsCache) -> Mapping[str, Any]:
    """The volume that downloads go to."""
    if cache.claim:
        return {"name": WEIGHTS, "persistentVolumeClaim": {"claimName": cache.claim}}
    if cache.host_path:
        return {"name": WEIGHTS, "hostPath": {"path": cache.host_path, "type": "DirectoryOrCreate"}}
    return {"name": WEIGHTS, "emptyDir": {}}


def _name(uri: str) -> PurePosixPath:
    """Without the query, which may hold a signature."""
    return PurePosixPath(uri.partition("?")[0])


def _is_file(uri: str) -> bool:
    return _name(uri).suffix in _FORMATS


def _directory(path: str) -> str:
    """A single file is mounted with its directory."""
    parent = str(PurePosixPath(path).parent) if _is_file(path) else path
    return "" if parent == "." else parent


def _file_in(directory: str, uri: str) -> str:
    return f"{directory}/{_name(uri).name}" if _is_file(uri) else directory

# SPDX-License-Identifier: Apache-2.0
"""A preset is chosen by name, or by format, engine, scope, version and priority, and never by chance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import pytest

from controller.api.model import Backend, ModelFormat
from controller.models.runtimes.presets import (
    Preset,
    PresetNotChosen,
    available_presets,
    built_in_presets,
    choose_preset,
)
from extproc.api.model_server import ServingProtocol

if TYPE_CHECKING:
    from collections.abc import Iterator

HUGGINGFACE = ModelFormat(name="huggingface")


def runtime(name: str, *supports: dict[str, Any], engine: str = "vLLM", **more: object) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"engine": engine, "supports": list(supports), **more}}


def form(priority: int = 1, version: str | None = None, name: str = "new", *, auto: bool = True) -> dict[str, Any]:
    found = {"name": name, "autoSelect": auto, "priority": priority}
    return {**found, "version": version} if version else found


def chosen(*own: dict[str, Any], cluster: tuple[dict[str, Any], ...] = (), **backend: Any) -> str:  # noqa: ANN401 - fields
    wanted, protocol = ModelFormat(name="new", version=backend.pop("version", None)), backend.pop("protocol", None)
    found = choose_preset(Backend(name="a", **backend), wanted, available_presets(own, cluster), protocol)
    return f"{found.reason}: {found.message}" if isinstance(found, PresetNotChosen) else str(found)


NONE, WRONG = "NoSupportingRuntime", "ProtocolNotServed"
# By format, the runtime of a Model that names no protocol, and of those that ask for OpenAI, V1, V2 and TensorFlow.
TABLE = {
    "huggingface": ("vllm", "vllm", "huggingfaceserver", "huggingfaceserver", WRONG),
    "huggingface 1": ("vllm", "vllm", "huggingfaceserver", "huggingfaceserver", WRONG),
    "safetensors": ("vllm", "vllm", WRONG, WRONG, WRONG),
    "gguf": ("vllm", "vllm", WRONG, WRONG, WRONG),
    "tensorrt-llm": ("tensorrt-llm", "tensorrt-llm", WRONG, WRONG, WRONG),
    "sklearn": ("mlserver", WRONG, "sklearnserver", "mlserver", WRONG),
    "sklearn 0": ("mlserver", WRONG, WRONG, "mlserver", WRONG),
    "sklearn 1": ("mlserver", WRONG, "sklearnserver", "mlserver", WRONG),
    "sklearn 2": (NONE,) * 5,
    "xgboost": ("mlserver", WRONG, "xgbserver", "mlserver", WRONG),
    "xgboost 1": ("mlserver", WRONG, WRONG, "mlserver", WRONG),
    "xgboost 2": ("mlserver", WRONG, "xgbserver", "mlserver", WRONG),
    "lightgbm": ("mlserver", WRONG, "lgbserver", "mlserver", WRONG),
    "lightgbm 3": ("mlserver", WRONG, WRONG, "mlserver", WRONG),
    "lightgbm 4": ("mlserver", WRONG, "lgbserver", "mlserver", WRONG),
    "mlflow": ("mlserver", WRONG, WRONG, "mlserver", WRONG),
    "mlflow 2": ("mlserver", WRONG, WRONG, "mlserver", WRONG),
    "pmml": ("pmmlserver", WRONG, "pmmlserver", "pmmlserver", WRONG),
    "pmml 4": ("pmmlserver", WRONG, "pmmlserver", "pmmlserver", WRONG),
    "paddle": ("paddleserver", WRONG, "paddleserver", "paddleserver", WRONG),
    "paddle 2": ("paddleserver", WRONG, "paddleserver", "paddleserver", WRONG),
    "tensorflow": ("tensorflow-serving", WRONG, "tensorflow-serving", "triton", "tensorflow-serving"),
    "tensorflow 1": ("tensorflow-serving", WRONG, "tensorflow-serving", "triton", "tensorflow-serving"),
    "pytorch": ("torchserve", WRONG, "torchserve", "torchserve", WRONG),
    "pytorch 1": ("torchserve", WRONG, "torchserve", "torchserve", WRONG),
    "onnx": ("triton", WRONG, WRONG, "triton", WRONG),
    "onnx 1": ("triton", WRONG, WRONG, "triton", WRONG),
    "tensorrt": ("triton", WRONG, WRONG, "triton", WRONG),
    "tensorrt 8": ("triton", WRONG, WRONG, "triton", WRONG),
    "triton": ("triton", WRONG, WRONG, "triton", WRONG),
    "custom": ("custom", "custom", WRONG, WRONG, WRONG),
    "new": (NONE,) * 5,
}


def cells() -> Iterator[tuple[str, ServingProtocol | None, str]]:
    for wanted, row in TABLE.items():
        yield from zip([wanted] * len(row), (None, *get_args(ServingProtocol)), row, strict=True)


@pytest.mark.parametrize(("wanted", "protocol", "expected"), [*cells()])
def test_a_cluster_without_runtimes_has_the_built_in_ones(
    wanted: str, protocol: ServingProtocol | None, expected: str
) -> None:
    name, _, version = wanted.partition(" ")
    found = choose_preset(
        Backend(name="a"), ModelFormat(name=name, version=version or None), built_in_presets(), protocol
    )
    assert (found.reason if isinstance(found, PresetNotChosen) else found.name) == expected


def test_every_format_that_is_chosen_by_itself_is_in_the_table() -> None:
    formats = {one.name for preset in built_in_presets().values() for one in preset.spec.supports if one.auto_select}
    assert formats == {one.partition(" ")[0] for one in TABLE} - {"new"}


# As kserve/kserve has them in config/runtimes (2026-08): formats with version and priority, 0 without autoSelect; and
# protocols.
KSERVE = {
    "mlserver": (
        "sklearn 0 2, sklearn 1 2, xgboost 1 2, xgboost 2 2, lightgbm 3 2, lightgbm 4 2, mlflow 1 1, mlflow 2 1",
        "v2",
    ),
    "sklearnserver": ("sklearn 1 1", "v1 v2"),
    "xgbserver": ("xgboost 2 1", "v1 v2"),
    "lgbserver": ("lightgbm 4 1", "v1 v2"),
    "pmmlserver": ("pmml 3 1, pmml 4 1", "v1 v2"),
    "paddleserver": ("paddle 2 1", "v1 v2"),
    # but for its version, 1
    "huggingfaceserver": ("huggingface None 1", "v2 v1"),
    "tensorflow-serving": ("tensorflow 1 2, tensorflow 2 2", "v1 grpc-v1"),
    "torchserve": ("pytorch 1 2", "v1 v2 grpc-v2"),
    "triton": ("tensorrt 8 1, tensorflow 1 1, tensorflow 2 1, onnx 1 1, pytorch 1 0, triton 2 1", "v2 grpc-v2"),
}
PROTOCOLS = {"v1": "V1", "v2": "V2", "grpc-v1": "TensorFlow-gRPC", "grpc-v2": "V2-gRPC"}


@pytest.mark.parametrize("name", KSERVE)
def test_formats_priorities_and_protocols_are_kserves(name: str) -> None:
    spec, (formats, protocols) = built_in_presets()[name].spec, KSERVE[name]
    found = [f"{one.name} {one.version} {one.priority}" for one in spec.supports]
    # MLServer's own, by which nothing is chosen
    assert ", ".join(one for one in found if one != "huggingface None 0") == formats
    assert all(one.auto_select == (one.priority > 0) for one in spec.supports)
    assert [PROTOCOLS[one] for one in protocols.split()] == [
        one for one in spec.protocols if one in {PROTOCOLS[each] for each in protocols.split()}
    ]


def test_a_runtime_that_is_named_and_does_not_serve_the_protocol_is_not_taken() -> None:
    assert chosen(runtime="mlserver", protocol="V1") == (
        "ProtocolNotServed: built-in runtime mlserver serves V2, V2-gRPC; the Model asks for protocol V1: write another"
        " protocol or runtime"
    )


def test_a_runtime_that_serves_grpc_alone_serves_no_model() -> None:
    only = runtime("a", form(), engine="Triton", protocolVersions=["V2-gRPC"])
    expected = (
        "ProtocolNotServed: ServingRuntime a serves V2-gRPC; the Model is served over REST, which needs another"
        " protocol or runtime"
    )
    assert chosen(only) == chosen(only, runtime="a") == expected


def test_the_protocol_comes_before_the_scope_and_the_priority() -> None:
    both = runtime("a", form(1), engine="KServe"), runtime("b", form(9), engine="Triton")
    assert chosen(*both) == "ServingRuntime b"
    assert chosen(*both, protocol="V1") == "ServingRuntime a"
    far = runtime("far", form(1), protocolVersions=["V1"])
    assert chosen(both[1], cluster=(far,), protocol="V1") == "ClusterServingRuntime far"


@pytest.mark.parametrize(
    ("engine", "versions", "wanted", "expected"),
    [
        ("KServe", [], None, "V1"),
        ("Triton", [], None, "V2"),
        ("TensorFlow", [], None, "TensorFlow"),
        ("TensorFlow", [], "V1", "V1"),
        ("TorchServe", [], "V2", "V2"),
        ("vLLM", [], None, "OpenAI"),
        ("Custom", ["V2-gRPC", "V2", "V1"], None, "V2"),
        ("Custom", ["V2", "V1"], "V1", "V1"),
        ("Custom", ["V2", "V1"], "OpenAI", None),
    ],
)
def test_the_first_protocol_is_the_default(
    engine: str, versions: list[str], wanted: ServingProtocol | None, expected: str | None
) -> None:
    preset = available_presets([runtime("a", engine=engine, protocolVersions=versions)], [])["a"]
    assert preset.problem == ""
    assert preset.rest_protocol_for(wanted) == expected


def test_an_engine_that_is_named_needs_no_autoselect() -> None:
    found = choose_preset(Backend(name="a", engine="TensorRT-LLM"), HUGGINGFACE, built_in_presets())
    assert isinstance(found, Preset)
    assert found.name == "tensorrt-llm"


def test_the_namespace_comes_before_the_cluster_whatever_the_priority() -> None:
    assert chosen(runtime("mine", form(1)), cluster=(runtime("theirs", form(9)),)) == "ServingRuntime mine"


def test_the_highest_priority_wins() -> None:
    assert chosen(runtime("low", form(1)), runtime("high", form(2))) == "ServingRuntime high"


def test_a_runtime_of_the_exact_version_comes_first_and_one_of_another_version_never() -> None:
    runtimes = (runtime("any", form(9)), runtime("one", form(1, "1")), runtime("two", form(99, "2")))
    assert chosen(*runtimes, version="1") == "ServingRuntime one"
    assert chosen(*runtimes, version="3") == "ServingRuntime any"


def test_of_a_model_without_version_the_priority_decides() -> None:
    assert chosen(runtime("any", form(9)), runtime("one", form(10, "1"))) == "ServingRuntime one"


def test_a_tie_is_told_and_not_decided() -> None:
    said = chosen(runtime("b", form(1)), runtime("a", form(1)))
    assert said.startswith("AmbiguousRuntime: ServingRuntime a, ServingRuntime b fit equally well")


def test_an_object_of_the_cluster_takes_the_place_of_a_built_in_one() -> None:
    found = available_presets([], [runtime("vllm", form(1), disabled=True)])["vllm"]
    assert str(found) == "ClusterServingRuntime vllm"
    assert found.spec.disabled


@pytest.mark.parametrize(
    ("own", "backend", "reason"),
    [
        ((), {}, "NoSupportingRuntime: no runtime supports format 'new'"),
        ((runtime("a", form(auto=False)),), {}, "NoSupportingRuntime"),
        (
            (runtime("a", form()),),
            {"engine": "SGLang"},
            "NoSupportingRuntime: no runtime supports format 'new' with engine SGLang",
        ),
        ((runtime("a", form(), disabled=True),), {}, "RuntimeDisabled: ServingRuntime a would fit, but is disabled"),
        ((runtime("a", form(), disabled=True),), {"runtime": "a"}, "RuntimeDisabled: ServingRuntime a is disabled"),
        ((), {"runtime": "gone"}, "RuntimeNotRecognized: there is no runtime 'gone'; there are: custom,"),
        ((runtime("a", form(), prot=1),), {"runtime": "a"}, "RuntimeNotRecognized: ServingRuntime a cannot be used"),
    ],
)
def test_why_none_is_chosen(own: tuple[dict[str, Any], ...], backend: dict[str, Any], reason: str) -> None:
    assert chosen(*own, **backend).startswith(reason)


def test_a_disabled_runtime_leaves_the_place_to_the_next() -> None:
    assert chosen(runtime("a", form(9), disabled=True), runtime("b", form(1))) == "ServingRuntime b"

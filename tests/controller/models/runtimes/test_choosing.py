# SPDX-License-Identifier: Apache-2.0
"""A preset is chosen by name, or by format, engine, scope, version and priority, and never by chance."""

from __future__ import annotations

from typing import Any

import pytest

from controller.api.model import Backend, ModelFormat
from controller.models.runtimes.presets import NotChosen, Preset, available, built_in, choose_preset

HUGGINGFACE = ModelFormat(name="huggingface")


def runtime(name: str, *supports: dict[str, Any], engine: str = "vLLM", **more: object) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"engine": engine, "supports": list(supports), **more}}


def form(priority: int = 1, version: str | None = None, name: str = "new", *, auto: bool = True) -> dict[str, Any]:
    found = {"name": name, "autoSelect": auto, "priority": priority}
    return {**found, "version": version} if version else found


def chosen(*own: dict[str, Any], cluster: tuple[dict[str, Any], ...] = (), **backend: Any) -> str:  # noqa: ANN401 - fields
    wanted = ModelFormat(name="new", version=backend.pop("version", None))
    found = choose_preset(Backend(name="a", **backend), wanted, available(own, cluster))
    return f"{found.reason}: {found.message}" if isinstance(found, NotChosen) else str(found)


@pytest.mark.parametrize(
    ("format_", "expected"),
    [
        ("huggingface", "vllm"),
        ("gguf", "vllm"),
        ("onnx", "triton"),
        ("sklearn", "mlserver"),
        ("tensorrt-llm", "tensorrt-llm"),
    ],
)
def test_a_cluster_without_runtimes_has_the_built_in_ones(format_: str, expected: str) -> None:
    found = choose_preset(Backend(name="a"), ModelFormat(name=format_), built_in())
    assert isinstance(found, Preset)
    assert found.name == expected


def test_an_engine_that_is_named_needs_no_autoselect() -> None:
    found = choose_preset(Backend(name="a", engine="TensorRT-LLM"), HUGGINGFACE, built_in())
    assert isinstance(found, Preset)
    assert found.name == "tensorrt-llm"


def test_the_namespace_comes_before_the_cluster_whatever_the_priority() -> None:
    assert chosen(runtime("mine", form(1)), cluster=(runtime("theirs", form(9)),)) == "ServingRuntime mine"


def test_the_highest_priority_wins() -> None:
    assert chosen(runtime("low", form(1)), runtime("high", form(2))) == "ServingRuntime high"


def test_a_runtime_of_the_exact_version_comes_first_and_one_of_another_version_never() -> None:
    runtimes = (runtime("any", form(9)), runtime("one", form(1, "1")), runtime("two", form(99, "2")))
    assert chosen(*runtimes, version="1") == "ServingRuntime one"
    assert chosen(*runtimes) == "ServingRuntime any"


def test_a_tie_is_told_and_not_decided() -> None:
    said = chosen(runtime("b", form(1)), runtime("a", form(1)))
    assert said.startswith("AmbiguousRuntime: ServingRuntime a, ServingRuntime b fit equally well")


def test_an_object_of_the_cluster_takes_the_place_of_a_built_in_one() -> None:
    found = available([], [runtime("vllm", form(1), disabled=True)])["vllm"]
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

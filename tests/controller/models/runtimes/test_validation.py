# SPDX-License-Identifier: Apache-2.0
"""What no schema can tell of a Model, each with a Model that is right in it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from controller.api.model import ModelSpec
from controller.models.runtimes.validation import LONGEST_NAME, validation_errors
from extproc.api.quantities import decode_quantity

URI = "hf://org/model"


def found(name: str = "llama", **spec: Any) -> list[str]:  # noqa: ANN401 - fields of a ModelSpec
    made = msgspec.convert(spec, ModelSpec, dec_hook=decode_quantity)
    return list(validation_errors(name, made))


def backend(**fields: object) -> dict[str, Any]:
    return {"backends": [{"name": "a", **fields}]}


PINNED = [{"name": "sql", "uri": URI, "pinned": True}]
APART = {"prefill": 1, "decode": 1}
MANY: dict[str, Any] = {"models": [{"name": "iris", "uri": URI}]}


@pytest.mark.parametrize(
    ("right", "wrong", "words"),
    [
        ({"name": "llama-3-1"}, {"name": "llama-3.1"}, "write servedName: llama-3.1"),
        (
            {"name": "a" * (LONGEST_NAME - 8)},
            {"name": "a" * (LONGEST_NAME - 7)},
            f"is longer than {LONGEST_NAME} characters",
        ),
        ({"aliases": ["b", "c"]}, {"aliases": ["b", "b"]}, "'b' is there 2 times"),
        ({"aliases": ["b"]}, {"aliases": ["llama"]}, "'llama' is there 2 times"),
        ({"adapters": PINNED}, {"adapters": PINNED, "aliases": ["sql"]}, "'sql' is there 2 times"),
        ({"servedName": "v3"}, {"servedName": "v1"}, "'v1' is the beginning of paths"),
        ({}, {"aliases": ["publishers"]}, "'publishers' is the beginning of paths"),
        ({"uri": "file:///models/x"}, {"uri": "file:///etc/x"}, "file:///etc/x: the path must be below one of /models"),
        ({"uri": "file:///models/x"}, {"uri": "file:///models/../etc"}, "the path must be below"),
        ({"uri": "pvc://claim/x"}, {"uri": "pvc:///x"}, "write pvc://CLAIM/PATH"),
        ({"uri": "pvc://claim/x"}, {"uri": "pvc://claim/../x"}, "write pvc://CLAIM/PATH"),
        (
            {"cache": {"hostPath": "/var/lib/attache/w"}},
            {"cache": {"hostPath": "/var/lib"}},
            "cache.hostPath: the path",
        ),
        # what is written there must not be what another Model reads as it is
        ({"cache": {"hostPath": "/var/lib/attache/w"}}, {"cache": {"hostPath": "/models"}}, "cache.hostPath: the path"),
        ({"uri": "file:///models/x"}, {"uri": "file:///var/lib/attache/x"}, "the path must be below one of /models"),
        ({"adapters": PINNED}, {"adapters": [{"name": "sql", "uri": "pvc://c/x"}]}, "adapters are downloaded into"),
        (MANY, {}, "there are no weights: write uri, or models"),
        (MANY, {**MANY, "uri": URI}, "write uri or models, not both"),
        (MANY, {**MANY, "adapters": PINNED}, "adapters is of one model"),
        (MANY, {**MANY, "servedName": "x"}, "servedName is of one model"),
        (MANY, {**MANY, "aliases": ["x"]}, "aliases is of one model"),
        (MANY, {**MANY, "warm": True}, "warm is of one model"),
        (MANY, {**MANY, **backend(disaggregation=APART)}, "models have no prefill and decode"),
        (MANY, {"models": [*MANY["models"], *MANY["models"]]}, "'iris' is there 2 times"),
        (MANY, {"models": [{"name": "v2", "uri": URI}]}, "'v2' is the beginning of paths"),
        (MANY, {"models": [{"name": "iris", "uri": "pvc://c/x"}]}, "models are downloaded into a running pod"),
        # a Model may have one of its own name
        (
            {"models": [{"name": "llama", "uri": URI}]},
            {"models": [{"name": "a", "uri": "file:///etc/x"}]},
            "must be below",
        ),
        (backend(weight=1), backend(weight=0), "the weight of every backend is 0"),
        (
            {"autoscaling": {}, **backend(maxReplicas=2)},
            {"autoscaling": {}, **backend()},
            "autoscaling needs a backend with maxReplicas",
        ),
        (
            {"adapters": PINNED, **backend(disaggregation=APART)},
            {"adapters": [{**PINNED[0], "pinned": False}], **backend(disaggregation=APART)},
            "write pinned: true",
        ),
        (
            backend(engine="vLLM", disaggregation=APART),
            backend(engine="Triton", disaggregation=APART),
            "Triton has no disaggregation here",
        ),
        (
            backend(config={"nodes": 2, "parallelism": {"tensor": 4}}),
            backend(config={"nodes": 3, "parallelism": {"tensor": 4}}),
            "cannot be shared out evenly over 3 nodes",
        ),
        (
            backend(config={"pod": {"containers": []}}),
            backend(config={"pod": {"containers": {}}}),
            "config.pod is no part of a PodSpec: Expected `array | null`, got `object` - at `$.containers`",
        ),
    ],
)
def test_a_mistake_is_told_and_its_correction_taken(right: dict[str, Any], wrong: dict[str, Any], words: str) -> None:
    assert found(**with_weights(right)) == []
    assert words in "; ".join(found(**(wrong if "models" in right else with_weights(wrong))))


def with_weights(spec: dict[str, Any]) -> dict[str, Any]:
    return spec if "models" in spec else {"uri": URI, **spec}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-a", ".a", "a b", "ä", "x" * 201, "a%2Fb", "a?b", "a#b"])
def test_a_name_of_one_of_many_models_is_a_directory_and_a_segment_of_a_path(name: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        found(models=[{"name": name, "uri": URI}])

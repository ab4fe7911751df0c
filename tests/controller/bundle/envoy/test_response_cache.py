# SPDX-License-Identifier: Apache-2.0
"""Envoy copies answers for the response cache where a route has one, as clients get them, and nowhere else."""

from __future__ import annotations

import json

from controller.bundle.envoy.bundle import build_bundle
from extproc.api.config_loader import load_snapshot

OBJECTS = """
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec: {model: m, endpoints: [{address: "10.0.0.1:8000"}]}
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: chat}
spec: {modelName: m, rules: [{targetModels: [{modelServerName: llama}]}], CACHE}
"""


def filters(cache: str) -> list[str]:
    files = build_bundle(load_snapshot({"a.yaml": OBJECTS.replace("CACHE", cache).encode()}), "/x")
    (listener,) = json.loads(files["lds.json"])["resources"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return [one["name"] for one in manager["http_filters"]]


def test_only_a_route_with_a_cache_has_answers_copied() -> None:
    without, found = filters(""), filters("cache: {}")
    assert [one for one in found if one not in without] == ["attache.response_cache"]


def test_the_copy_is_what_all_filters_of_answers_have_made_of_it() -> None:
    found = filters("cache: {}")
    # answers come from the end of the chain
    assert found.index("attache.response_cache") < min(
        map(found.index, ("attache.usage", "attache.usage_of_responses"))
    )

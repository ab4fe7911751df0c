# SPDX-License-Identifier: Apache-2.0
"""Layers: typed fields merge plainly, PodSpecs as the API server's strategic merge patch merges them."""

from __future__ import annotations

from typing import Any

import pytest

from controller.models.runtimes.config_layers import merge_all_but_pod_specs, merge_pod_spec_layers, strategic_merge

Plain = dict[str, Any]


@pytest.mark.parametrize(
    ("name", "lower", "upper", "merged"),
    [
        (
            "containers by name, in the lower layer's order",
            {"containers": [{"name": "a", "image": "1"}, {"name": "b", "image": "1"}]},
            {"containers": [{"name": "b", "image": "2"}, {"name": "c"}]},
            {"containers": [{"name": "a", "image": "1"}, {"name": "b", "image": "2"}, {"name": "c"}]},
        ),
        (
            "mounts by path",
            {"containers": [{"name": "a", "volumeMounts": [{"mountPath": "/x", "name": "v", "readOnly": True}]}]},
            {"containers": [{"name": "a", "volumeMounts": [{"mountPath": "/x", "name": "w"}]}]},
            {"containers": [{"name": "a", "volumeMounts": [{"mountPath": "/x", "name": "w", "readOnly": True}]}]},
        ),
        (
            "ports by number",
            {"containers": [{"name": "a", "ports": [{"containerPort": 1, "name": "x"}]}]},
            {"containers": [{"name": "a", "ports": [{"containerPort": 2}]}]},
            {"containers": [{"name": "a", "ports": [{"containerPort": 1, "name": "x"}, {"containerPort": 2}]}]},
        ),
        (
            "tolerations are replaced",
            {"tolerations": [{"key": "a"}]},
            {"tolerations": [{"key": "b"}]},
            {"tolerations": [{"key": "b"}]},
        ),
        (
            "args are replaced",
            {"containers": [{"name": "a", "args": ["x", "y"]}]},
            {"containers": [{"name": "a", "args": ["z"]}]},
            {"containers": [{"name": "a", "args": ["z"]}]},
        ),
        (
            "another kind of source replaces a volume's",
            {"volumes": [{"name": "v", "emptyDir": {}}]},
            {"volumes": [{"name": "v", "hostPath": {"path": "/x"}}]},
            {"volumes": [{"name": "v", "hostPath": {"path": "/x"}}]},
        ),
        (
            "the same kind of source is merged",
            {"volumes": [{"name": "v", "emptyDir": {"medium": "Memory"}}]},
            {"volumes": [{"name": "v", "emptyDir": {"sizeLimit": "1Gi"}}]},
            {"volumes": [{"name": "v", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}]},
        ),
        (
            "another source of an environment variable",
            {"containers": [{"name": "a", "env": [{"name": "X", "value": "1"}]}]},
            {"containers": [{"name": "a", "env": [{"name": "X", "valueFrom": {"fieldRef": {}}}]}]},
            {"containers": [{"name": "a", "env": [{"name": "X", "valueFrom": {"fieldRef": {}}}]}]},
        ),
        (
            "an item is deleted",
            {"containers": [{"name": "a"}, {"name": "b"}]},
            {"containers": [{"name": "a", "$patch": "delete"}]},
            {"containers": [{"name": "b"}]},
        ),
        (
            "a list is replaced as a whole",
            {"volumes": [{"name": "a"}]},
            {"volumes": [{"$patch": "replace"}, {"name": "b"}]},
            {"volumes": [{"name": "b"}]},
        ),
        (
            "a map is replaced",
            {"nodeSelector": {"a": "1"}},
            {"nodeSelector": {"$patch": "replace", "b": "2"}},
            {"nodeSelector": {"b": "2"}},
        ),
        (
            "null removes",
            {"nodeSelector": {"a": "1"}, "hostIPC": True},
            {"hostIPC": None},
            {"nodeSelector": {"a": "1"}},
        ),
        (
            "maps are merged",
            {"nodeSelector": {"a": "1"}},
            {"nodeSelector": {"b": "2"}},
            {"nodeSelector": {"a": "1", "b": "2"}},
        ),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_pod_specs_merge_as_kubernetes_merges_them(name: str, lower: Plain, upper: Plain, merged: Plain) -> None:
    assert strategic_merge(lower, upper) == merged, name


def test_three_layers_the_highest_wins() -> None:
    assert strategic_merge({"a": 1, "b": 1, "c": 1}, {"b": 2, "c": 2}, {"c": 3}) == {"a": 1, "b": 2, "c": 3}


def test_typed_fields_merge_named_items_and_replace_lists() -> None:
    lower = {"aliases": ["a"], "backends": [{"name": "x", "weight": 1, "config": {"maxLength": 1, "args": ["p"]}}]}
    upper = {"aliases": ["b"], "backends": [{"name": "x", "config": {"args": ["q"]}}, {"name": "y"}]}
    assert merge_all_but_pod_specs(lower, upper) == {
        "aliases": ["b"],
        "backends": [{"name": "x", "weight": 1, "config": {"maxLength": 1, "args": ["q"]}}, {"name": "y"}],
    }


def test_what_a_layer_deletes_of_a_pod_may_stand_below_all_typed_layers() -> None:
    lower = {"config": {"pod": {"nodeSelector": {"a": "1"}}}}
    upper = {"config": {"pod": {"containers": [{"name": "exporter", "$patch": "delete"}]}}}
    found = merge_all_but_pod_specs(lower, upper)
    preset = {"containers": [{"name": "engine"}, {"name": "exporter"}]}
    assert strategic_merge(preset, *found["config"]["pod"]) == {
        "containers": [{"name": "engine"}],
        "nodeSelector": {"a": "1"},
    }
    assert merge_pod_spec_layers(found) == {"config": {"pod": {"nodeSelector": {"a": "1"}, "containers": []}}}


def test_the_layers_themselves_are_left_alone() -> None:
    lower = {"containers": [{"name": "a", "env": [{"name": "X", "value": "1"}]}]}
    strategic_merge(lower, {"containers": [{"name": "a", "env": [{"name": "X", "value": "2"}]}]})
    assert lower == {"containers": [{"name": "a", "env": [{"name": "X", "value": "1"}]}]}

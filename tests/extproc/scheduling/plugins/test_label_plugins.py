# SPDX-License-Identifier: Apache-2.0
"""Label plugins: roles, selectors, ranges, and label affinity."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from extproc.endpoints.table import EndpointConfig
from extproc.scheduling.plugins.label_plugins import (
    ROLE_LABEL,
    ContextLengthAware,
    DecodeRoleFilter,
    EncodeRoleFilter,
    HeaderLabelAffinityScorer,
    LabelSelectorFilter,
    LabelValueFilter,
    PrefillRoleFilter,
    context_range,
)
from tests.extproc.scheduling.plugins.views import view_of

if TYPE_CHECKING:
    from extproc.scheduling.framework import Filter
    from extproc.scheduling.picker import View


def labelled(*labels: dict[str, str], **options: object) -> View:
    view = view_of(len(labels), **options)  # type: ignore[arg-type]
    view.table.replace_endpoints({f"e{number}:1": EndpointConfig(one) for number, one in enumerate(labels)})
    return view


def kept(plugin: Filter, view: View) -> list[int]:
    return [int(row) for row in plugin.keep(view, view.table.is_active).nonzero()[0]]


ROLES = ["prefill", "decode", "both", "encode", "encode-prefill", "prefill-decode", "encode-prefill-decode"]


@pytest.mark.parametrize(
    ("plugin", "roles"),
    [
        (PrefillRoleFilter(), {"prefill", "both", "encode-prefill", "prefill-decode", "encode-prefill-decode"}),
        (DecodeRoleFilter(), {"decode", "both", "prefill-decode", "encode-prefill-decode", ""}),
        (EncodeRoleFilter(), {"encode", "encode-prefill", "encode-prefill-decode"}),
    ],
)
def test_roles_are_llm_ds(plugin: Filter, roles: set[str]) -> None:
    view = labelled(*({ROLE_LABEL: role} for role in ROLES), {})
    assert {([*ROLES, ""])[row] for row in kept(plugin, view)} == roles


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"matchLabels": {"gpu": "h100"}}, [0, 1]),
        ({"matchLabels": {"gpu": "h100", "zone": "a"}}, [0]),
        ({"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]}, [0, 1]),
        ({"matchExpressions": [{"key": "zone", "operator": "NotIn", "values": ["a"]}]}, [1, 2]),
        ({"matchExpressions": [{"key": "zone", "operator": "Exists"}]}, [0, 1]),
        ({"matchExpressions": [{"key": "zone", "operator": "DoesNotExist"}]}, [2]),
        ({"matchLabels": {"gpu": "b200"}}, []),
        ({}, [0, 1, 2]),
    ],
)
def test_a_selector_reads_as_in_kubernetes(parameters: dict[str, object], expected: list[int]) -> None:
    view = labelled({"gpu": "h100", "zone": "a"}, {"gpu": "h100", "zone": "b"}, {"gpu": "a100"})
    assert kept(msgspec.convert(parameters, LabelSelectorFilter), view) == expected


def test_one_label_with_one_of_several_values() -> None:
    view = labelled({"gpu": "h100"}, {"gpu": "a100"}, {})
    assert kept(LabelValueFilter("gpu", ("h100", "h200")), view) == [0]
    assert kept(LabelValueFilter("gpu", ("a100",), allows_no_label=True), view) == [1, 2]


def test_labels_that_change_are_seen_at_once() -> None:
    view = labelled({"zone": "a"}, {"zone": "b"})
    assert kept(LabelSelectorFilter({"zone": "a"}), view) == [0]
    view.table.replace_endpoints({"e0:1": EndpointConfig({"zone": "b"}), "e1:1": EndpointConfig({"zone": "a"})})
    assert kept(LabelSelectorFilter({"zone": "a"}), view) == [1]


def test_a_header_selects_a_label() -> None:
    plugin = HeaderLabelAffinityScorer("x-Preferred-Zone", "zone")
    view = labelled({"zone": "a"}, {"zone": "b"}, {}, headers={"x-preferred-zone": "b"})
    assert plugin.score(view, view.table.is_active)[:3].tolist() == [0, 1, 0]
    assert not plugin.score(labelled({"zone": "a"}), view.table.is_active).any()


def test_prompts_go_to_engines_made_for_their_length() -> None:
    key = "llm-d.ai/context-length-range"
    view = labelled({key: "0-2000"}, {key: "0-10000"}, {key: "2000-3000"}, {key: "1000-1000"}, {}, {key: "long"})
    found = ContextLengthAware().score(view, view.table.is_active)[:6]
    # 1000 tokens. Width 2000, headroom 1000: 0.3 + 0.7 (0.7 / 1.2 + 0.3 / 2); width 10000, headroom 9000: 0.3 + 0.7
    # (0.35 + 0.27); 1000 too short: 0.3 / 2; a range of exactly that: 1; no label: 0.5; one that cannot be read: 0
    expected = [0.3 + 0.7 * (0.7 / 1.2 + 0.15), 0.3 + 0.7 * (0.35 + 0.27), 0.15, 1.0, 0.5, 0.0]
    assert found.tolist() == pytest.approx(expected)
    assert kept(ContextLengthAware(), view) == [0, 1, 2, 3, 4, 5]
    assert kept(ContextLengthAware(enable_filtering=True), view) == [0, 1, 3, 4]


@pytest.mark.parametrize("text", ["long", "", "2000", "2000-1000", "-5-10", "1.5-2", "²-3", "0-8k", "0-1-2"])
def test_a_range_that_cannot_be_read_matches_no_prompt(text: str) -> None:
    assert context_range(text) is None
    key = "llm-d.ai/context-length-range"
    view = labelled({key: text}, {key: " 0 - 8192 "})
    assert ContextLengthAware().score(view, view.table.is_active)[0] == 0
    assert kept(ContextLengthAware(enable_filtering=True), view) == [1]

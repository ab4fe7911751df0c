# SPDX-License-Identifier: Apache-2.0
"""Nearness to the endpoint that was picked before."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec
import pytest

from extproc.endpoints.table import EndpointConfig
from extproc.llmd.picker_builder import picker_from_text
from extproc.llmd.plugin_types import BUILT_IN
from extproc.scheduling.plugins.label_plugins import (
    NearPeerFilter,
    PeerNearnessScorer,
    TopologyAffinityFilter,
    TopologyAffinityScorer,
    TopologyExtractor,
)
from tests.extproc.scheduling.plugins.views import view_of

if TYPE_CHECKING:
    from extproc.scheduling.picker import View

HOST, RACK = "kubernetes.io/hostname", "topology.kubernetes.io/rack"
ZONE, REGION = "topology.kubernetes.io/zone", "topology.kubernetes.io/region"
# the peer, then one that shares its host, its rack, its zone, its region, and nothing; the last two have no labels
PLACES = [
    {HOST: "a", RACK: "1", ZONE: "x", REGION: "eu"},
    {HOST: "a", RACK: "1", ZONE: "x", REGION: "eu"},
    {HOST: "b", RACK: "1", ZONE: "x", REGION: "eu"},
    {HOST: "c", RACK: "2", ZONE: "x", REGION: "eu"},
    {HOST: "d", RACK: "3", ZONE: "y", REGION: "eu"},
    {HOST: "e", RACK: "4", ZONE: "z", REGION: "us"},
    {},
    {},
]


def view(peer_row: int | None = 0, header: str = "", *, is_trusted: bool = True) -> View:
    found = view_of(len(PLACES), headers={"x-peer-topology": header} if header else {})
    found.table.replace_endpoints({f"e{row}:1": EndpointConfig(labels) for row, labels in enumerate(PLACES)})
    request = msgspec.structs.replace(found.request, is_trusted=is_trusted)
    return msgspec.structs.replace(found, peer_row=peer_row, request=request)


def near(of: View, farthest: str = "host", **parameters: str) -> list[int]:
    plugin = msgspec.convert({"minAffinity": farthest, **parameters}, TopologyAffinityFilter).with_plugins({})
    return [int(row) for row in plugin.keep(of, of.table.is_active).nonzero()[0]]


ALL = list(range(8))


@pytest.mark.parametrize(
    ("farthest", "expected"),
    [("host", [0, 1]), ("rack", [0, 1, 2]), ("zone", [0, 1, 2, 3]), ("region", [0, 1, 2, 3, 4])],
)
def test_the_filter_keeps_what_is_near_enough(farthest: str, expected: list[int]) -> None:
    assert near(view(), farthest) == expected


def test_a_request_is_never_without_an_endpoint_for_want_of_nearness() -> None:
    assert near(view(None)) == ALL, "no peer"
    assert near(view(6)) == ALL, "nobody knows where the peer is, and two unknown places are not one"
    alone = view(5)
    others = alone.table.is_active.copy()
    others[5] = False
    assert (NearPeerFilter(TopologyExtractor().labels).keep(alone, others) == others).all(), "no candidate is near"


def test_the_score_falls_with_the_level_that_is_shared() -> None:
    plugin = TopologyAffinityScorer().with_plugins({})
    assert isinstance(plugin, PeerNearnessScorer)
    assert plugin.score(view(), view().table.is_active).tolist() == [1, 1, 0.2, 0.05, 0.02, 0, 0, 0]
    assert not plugin.score(view(None), view().table.is_active).any()
    assert not plugin.score(view(7), view().table.is_active).any()


def test_a_gateway_may_say_where_the_peer_is() -> None:
    parameters = {"peerTopologyHeader": "X-Peer-Topology"}
    said = "host=b,rack=1,unknown=7,broken"
    assert near(view(None, said), **parameters) == [2]
    assert near(view(0, said), **parameters) == [0, 1], "the peer that was picked here goes first"
    assert near(view(None, said, is_trusted=False), **parameters) == ALL
    assert near(view(None, said)) == ALL, "no header is configured"


PAIRS = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
  - {type: topology-extractor, name: other, parameters: {hostname: nowhere}}
  - {type: topology-extractor, name: ours, parameters: {hostname: node}}
  - {type: topology-affinity-%s, name: near, parameters: {topologyProducerName: ours}}
  - {type: disagg-profile-handler, parameters: {stageOrder: %s, deciders: {prefill: always-disagg-pd-decider}}}
  - {type: always-disagg-pd-decider}
  - {type: prefill-filter}
  - {type: decode-filter}
  - {type: random-picker}
schedulingProfiles:
  - {name: prefill, plugins: [{pluginRef: prefill-filter}%s, {pluginRef: %s}]}
  - {name: decode, plugins: [{pluginRef: decode-filter}%s, {pluginRef: %s}]}
"""


@pytest.mark.parametrize("kind", ["filter", "scorer"])
@pytest.mark.parametrize("order", ["decode-first", "prefill-first"])
def test_the_second_of_a_pair_is_on_the_node_of_the_first(kind: str, order: str) -> None:
    use, best = ", {pluginRef: near}", "random-picker" if kind == "filter" else "max-score-picker"
    first, second = ("", "random-picker"), (use, best)
    prefill, decode = (second, first) if order == "decode-first" else (first, second)
    text = PAIRS % (kind, order, *prefill, *decode)
    text = text.replace("- {type: random-picker}", "- {type: random-picker}\n  - {type: max-score-picker}")
    picker = picker_from_text("pairs.yaml", text, BUILT_IN).picker
    found = view_of(6)
    roles = ["prefill", "decode"] * 3
    found.table.replace_endpoints(
        {f"e{row}:1": EndpointConfig({"llm-d.ai/role": role, "node": str(row // 2)}) for row, role in enumerate(roles)}
    )
    for seed in range(20):
        pick = picker.pick(found, rng=random.Random(seed))
        assert pick.prefill_row is not None
        assert pick.rows[0] // 2 == pick.prefill_row // 2

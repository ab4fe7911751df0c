# SPDX-License-Identifier: Apache-2.0
"""Pairs stay on one revision during a rollout, and requests on the one that they name."""

from __future__ import annotations

import random

import pytest

from extproc.endpoints.table import EndpointConfig
from extproc.llmd.picker_builder import picker_from_text
from extproc.llmd.plugin_types import BUILT_IN
from extproc.refusals import NoEndpoint
from extproc.scheduling.plugins.profile_handlers import EndpointPinScreener
from tests.extproc.scheduling.plugins.views import view_of

REVISION = "disaggregatedset.x-k8s.io/revision"
FILE = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
  - type: disaggregatedset-rollout-screener
    parameters:
      scope: {labelSelector: "a=b"}
      revisionGating: {mode: max-role, requiredRoles: [prefill, decode], revisionHeaderName: X-Revision}
  - {type: always-disagg-pd-decider}
  - {type: disagg-profile-handler, parameters: {deciders: {prefill: always-disagg-pd-decider}}}
  - {type: prefill-filter}
  - {type: decode-filter}
schedulingProfiles:
  - {name: prefill, plugins: [{pluginRef: prefill-filter}]}
  - {name: decode, plugins: [{pluginRef: decode-filter}]}
"""
ENDPOINTS = [("prefill", "a"), ("decode", "a"), ("prefill", "b"), ("decode", "b")]


def pairs(text: str, headers: dict[str, str] | None = None) -> set[tuple[int | None, int]]:
    """Rows of prefill and decode, of many picks."""
    picker = picker_from_text("epp.yaml", text, BUILT_IN).picker
    view = view_of(4, headers=headers)
    view.table.replace_endpoints(
        {
            f"e{number}:1": EndpointConfig({"llm-d.ai/role": role, REVISION: revision})
            for number, (role, revision) in enumerate(ENDPOINTS)
        }
    )
    picks = [picker.pick(view, rng=random.Random(seed)) for seed in range(40)]
    return {(pick.prefill_row, pick.rows[0]) for pick in picks}


def test_both_endpoints_of_a_pair_are_of_one_revision() -> None:
    assert pairs(FILE) == {(0, 1), (2, 3)}
    assert pairs(FILE.replace("max-role", "disabled")) == {(0, 1), (2, 3), (0, 3), (2, 1)}


def test_a_header_names_the_revision_and_one_that_is_not_there_gets_nothing() -> None:
    assert pairs(FILE, {"x-revision": "b"}) == {(2, 3)}
    with pytest.raises(NoEndpoint, match="disaggregatedset-rollout-screener"):
        pairs(FILE, {"x-revision": "c"})


def test_the_form_of_an_earlier_release_does_the_same() -> None:
    older = FILE.replace(
        "requiredRoles: [prefill, decode], revisionHeaderName: X-Revision", "requireRoles: {values: [x]}"
    )
    selector = (
        f"headerSelectors: [{{name: r, headerName: X-Revision, labelKey: {REVISION}, mode: strict}}]\n      scope:"
    )
    assert pairs(older.replace("scope:", selector), {"x-revision": "a"}) == {(0, 1)}
    assert pairs(older) == {(0, 1), (2, 3)}


def test_a_header_pins_the_endpoint_and_another_address_gets_nothing() -> None:
    pin, view = EndpointPinScreener(), view_of(3, headers={"x-llm-d-pin-host-port": "e1:1"})
    assert pin.keep(view, view.table.is_active).nonzero()[0].tolist() == [1]
    other = view_of(3, headers={"x-llm-d-pin-host-port": "e9:1"})
    assert not pin.keep(other, other.table.is_active).any()
    pinned = FILE.replace("  - {type: prefill-filter}", "  - {type: endpoint-pin-screener}\n  - {type: prefill-filter}")
    assert pairs(pinned) == {(0, 1), (2, 3)}

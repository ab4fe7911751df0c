# SPDX-License-Identifier: Apache-2.0
"""llm-d's usage limit policies and agents' flows, as settings of flow control."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.api.admission import FlowControl, PriorityBand
from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import load_snapshot
from extproc.api.picker_flow_control import SESSION_HEADERS, PriorityHoldback

DIRECTORY = """
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec: {model: m, endpoints: [], pickerConfig: epp.yaml}
"""
OBJECTIVE = """---
apiVersion: llm-d.ai/v1alpha2
kind: InferenceObjective
metadata: {name: o%d, namespace: %s}
spec: {priority: %d}
"""
EPP = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
  - {type: random-picker}
%s
flowControl:
  priorityBands: [{priority: 100}, {priority: 50}]
%s
"""


def flow_control(plugin: str, *, name: str = "", objectives: dict[int, str] | None = None) -> FlowControl:
    """``objectives``: namespace by priority."""
    text = DIRECTORY + "".join(OBJECTIVE % (abs(one), space, one) for one, space in (objectives or {}).items())
    reference = f"  usageLimitPolicyPluginRef: {name}" if name else ""
    snapshot = load_snapshot({"all.yaml": text.encode(), "epp.yaml": (EPP % (plugin, reference)).encode()})
    (server,) = snapshot.servers
    control = snapshot.flow_control_of(server.spec, "default")
    assert control is not None
    return control


def ceiling_at(control: FlowControl, priority: int) -> float:
    bands = sorted(control.bands, key=lambda one: one.priority, reverse=True)
    return next((band.ceiling for band in bands if band.priority <= priority), bands[-1].ceiling)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        # 0.9, 0.65, 0.4 in equal steps
        (PriorityHoldback(min_ceiling=0.4, max_ceiling=0.9), {100: 0.9, 50: 0.65, 0: 0.4}),
        (PriorityHoldback(min_ceiling=0.4), {100: 1.0, 10: 0.7, -5: 0.4}),
        (PriorityHoldback(min_ceiling=0.4, domain="value"), {100: 1.0, 20: 0.52, 0: 0.4}),
        (PriorityHoldback(min_ceiling=0.4, max_ceiling=0.8), {7: 0.8}),
        (PriorityHoldback(domain="explicit", ceilings={100: 0.95, 50: 0.7}), {100: 0.95, 50: 0.7, 0: 0.0}),
    ],
)
def test_ceilings_follow_the_formula(policy: PriorityHoldback, expected: dict[int, float]) -> None:
    assert policy.ceilings_of(expected.keys()) == pytest.approx(expected)


@given(
    st.sets(st.integers(-100, 100), min_size=1, max_size=8),
    st.floats(0, 0.5),
    st.floats(0.51, 1),
    st.sampled_from(["rank", "value"]),
)
def test_a_higher_priority_never_has_a_lower_ceiling(
    priorities: set[int], least: float, most: float, domain: str
) -> None:
    given_parameters = {"minCeiling": least, "maxCeiling": most, "domain": domain}
    found = msgspec.convert(given_parameters, PriorityHoldback).ceilings_of(priorities)
    ordered = [found[one] for one in sorted(priorities)]
    assert ordered == sorted(ordered)
    assert ordered[-1] == pytest.approx(most)
    assert len(ordered) == 1 or ordered[0] == pytest.approx(least)


def test_holdback_is_over_bands_and_objectives_of_the_servers_namespace() -> None:
    plugin = "  - {type: priority-holdback-policy, name: mine, parameters: {minCeiling: 0.4}}"
    control = flow_control(plugin, name="mine", objectives={10: "default", 70: "elsewhere"})
    # 100, 50, 10 and 0; those between two have the lower one's, those below all the lowest
    expected = {100: 1.0, 70: 0.8, 50: 0.8, 10: 0.6, 7: 0.4, 0: 0.4, -3: 0.4}
    assert {one: ceiling_at(control, one) for one in expected} == pytest.approx(expected)


def test_each_objective_is_a_band_of_its_own() -> None:
    control = flow_control("", objectives={10: "default", -2: "default"})
    found = {band.priority: band for band in control.bands}
    assert {10, -2, 0, 50, 100} <= found.keys()
    assert 11 in found, "what is above 10 is no part of it"
    before = {band.priority: band for band in flow_control("").bands}
    assert isinstance(before[0], PriorityBand)
    assert found[10] == msgspec.structs.replace(before[0], name="priority-10", priority=10)


def test_other_policies_and_agents_are_settings() -> None:
    static = "  - {type: static-usage-limit-policy, parameters: {threshold: 0.8}}"
    assert {one.ceiling for one in flow_control(static, name="static-usage-limit-policy").bands} == {0.8}
    assert flow_control(static).bands[0].ceiling == 1.0, "nothing refers to it"
    assert flow_control("", name="soft-reflective-ceiling-policy").ceilings == "SoftReflective"
    agents = "  - {type: agent-identity, parameters: {additionalSessionHeaders: [X-My-Agent]}}"
    assert flow_control(agents).flow_headers == ("x-my-agent", *SESSION_HEADERS)


@pytest.mark.parametrize(
    ("parameters", "mistake"),
    [
        ("{}", "minCeiling is missing"),
        ("{minCeiling: 0.9, maxCeiling: 0.9}", "minCeiling 0.9 is not below maxCeiling 0.9"),
        ("{minCeiling: 1.2}", "minCeiling"),
        ("{minCeiling: 0.2, ceilings: {1: 0.5}}", "ceilings go with domain: explicit"),
        ("{domain: explicit}", "ceilings are missing"),
        ("{domain: explicit, minCeiling: 0.2, ceilings: {1: 0.5}}", "minCeiling has no meaning"),
        ("{domain: explicit, ceilings: {1: 0.5, 2: 0.4}}", "priority 1 has a higher ceiling than priority 2"),
        ("{domain: explicit, ceilings: {high: 0.5}}", "ceilings.high"),
        ("{domain: explicit, ceilings: {1: 1.5}}", "ceilings.1"),
        ("{minCeiling: 0.2, shape: cubic}", "shape"),
        ("{minimum: 0.2}", "there is no such field"),
    ],
)
def test_what_contradicts_itself_is_refused(parameters: str, mistake: str) -> None:
    with pytest.raises(ConfigInvalid, match=re.escape(mistake)):
        flow_control(f"  - {{type: priority-holdback-policy, parameters: {parameters}}}")


def test_a_policy_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="'random-picker' is no usage limit policy"):
        flow_control("", name="random-picker")


def test_priorities_may_be_written_as_text_as_in_json() -> None:
    policy = "  - {type: priority-holdback-policy, parameters: {domain: explicit, ceilings: %s}}"
    as_text = flow_control(policy % '{"100": 0.9, "-5": 0.2}', name="priority-holdback-policy")
    assert as_text == flow_control(policy % "{100: 0.9, -5: 0.2}", name="priority-holdback-policy")
    assert ceiling_at(as_text, 100) == 0.9

# SPDX-License-Identifier: Apache-2.0
"""llm-d's flow control, unchanged: what of it means what here."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import load_snapshot

if TYPE_CHECKING:
    from extproc.api.admission import FlowControl
    from extproc.api.config_snapshot import Snapshot

SERVER = b"""
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec: {model: m, endpoints: [], pickerConfig: epp.yaml}
"""
EPP = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
  - {type: queue-scorer}
  - {type: round-robin-fairness-policy, name: turns}
  - {type: concurrency-detector, name: busy, parameters: {maxConcurrency: 132, headroom: 0.2}}
schedulingProfiles:
  - {name: default, plugins: [{pluginRef: queue-scorer}]}
flowControl:
  defaultRequestTTL: 30s
  noEndpointRequestTTL: 5m
  maxRequests: 900
  defaultPriorityBand: {maxRequests: 10}
  priorityBands:
    - {priority: 100, maxRequests: 50, maxBytes: 1Gi, fairnessPolicyRef: turns, orderingPolicyRef: edf-ordering-policy}
  saturationDetector: {pluginRef: busy}
"""


def snapshot(epp: str = EPP) -> Snapshot:
    return load_snapshot({"server.yaml": SERVER, "epp.yaml": epp.encode()})


def control(epp: str = EPP) -> FlowControl | None:
    found = snapshot(epp)
    return found.flow_control_of(found.servers[0].spec)


def test_bands_policies_and_times() -> None:
    found = control()
    assert found is not None
    assert (str(found.timeout), str(found.no_endpoint_timeout), found.max_hold_s) == ("30s", "5m", 300.0)
    assert (found.sharing, found.max_requests) == ("Strict", 900)
    bands = {band.priority: band for band in found.bands}
    assert (bands[100].fairness, bands[100].order, bands[100].max_requests) == ("RoundRobin", "Deadline", 50)
    assert (bands[0].fairness, bands[0].order, bands[0].max_requests) == ("GlobalStrict", "FirstCome", 10)
    assert min(bands) < 0


def test_the_detector_says_when_engines_are_full() -> None:
    found = control()
    assert found is not None
    limits = found.saturation.limits()
    assert (limits.max_requests, limits.headroom) == (132, 0.2)
    usual = control(EPP.replace("  saturationDetector: {pluginRef: busy}\n", ""))
    assert usual is not None
    assert (usual.saturation.queue_depth, usual.saturation.kv_usage, usual.saturation.max_wait) == (5, 0.8, None)


def test_without_its_feature_gate_there_is_none() -> None:
    assert control(EPP.replace("featureGates: [flowControl]", "featureGates: []")) is None


def test_no_end_ends_before_an_hour() -> None:
    found = control(EPP.replace("defaultRequestTTL: 30s", "defaultRequestTTL: 0s"))
    assert found is not None
    assert str(found.timeout) == "59m"
    longer = control(EPP.replace("defaultRequestTTL: 30s", "defaultRequestTTL: 2h"))
    assert longer is not None
    assert str(longer.timeout) == "59m"


def test_the_servers_own_goes_before_its_files() -> None:
    text = SERVER.decode().replace("pickerConfig: epp.yaml}", "pickerConfig: epp.yaml, flowControl: {timeout: 7s}}")
    found = load_snapshot({"server.yaml": text.encode(), "epp.yaml": EPP.encode()})
    own = found.flow_control_of(found.servers[0].spec)
    assert own is not None
    assert str(own.timeout) == "7s"


def with_section(section: str, gates: str = "[flowControl]") -> str:
    return EPP[: EPP.index("flowControl:\n")].replace("[flowControl]", gates) + f"flowControl: {section}\n"


def mistakes_of(text: str) -> str:
    with pytest.raises(ConfigInvalid) as caught:
        snapshot(text)
    return "\n".join(map(str, caught.value.mistakes))


@pytest.mark.parametrize(
    ("written", "requests", "size"),
    [
        ("{maxRequests: 900, maxBytes: 1000000}", 900, 1_000_000),
        ('{maxRequests: "1k", maxBytes: "10G"}', 1000, 10**10),
        ("{maxRequests: 1.5k, maxBytes: 10Gi}", 1500, 10 * 2**30),
        ('{maxRequests: "2e3", maxBytes: "1e9"}', 2000, 10**9),
        # 0 is no limit, as if it were absent
        ("{maxRequests: 0, maxBytes: 0}", 1_000_000, 64 * 2**30),
        ("{}", 1_000_000, 64 * 2**30),
    ],
)
def test_quantities_are_read_as_kubernetes_writes_them(written: str, requests: int, size: int) -> None:
    found = control(with_section(written))
    assert found is not None
    assert (found.max_requests, found.max_bytes) == (requests, size)


def test_a_band_without_limits_of_its_own_has_llm_ds() -> None:
    found = control(with_section('{priorityBands: [{priority: 3, maxRequests: 0}, {priority: 9, maxBytes: "2G"}]}'))
    assert found is not None
    bands = {band.priority: band for band in found.bands}
    assert (bands[3].max_requests, bands[3].max_bytes, bands[9].max_bytes) == (5000, 10**9, 2 * 10**9)


def test_a_named_band_is_of_its_own_priority_only() -> None:
    section = "{defaultPriorityBand: {maxRequests: 7}, priorityBands: [{priority: 10, maxRequests: 3}]}"
    found = control(with_section(section))
    assert found is not None
    assert [(band.priority, band.max_requests) for band in found.bands] == [(-(2**31), 7), (0, 7), (10, 3), (11, 7)]


@pytest.mark.parametrize(
    ("section", "mistake"),
    [
        ("{maxRequests: -1}", "flowControl.maxRequests: '-1' is negative"),
        ('{maxBytes: "-1Gi"}', "flowControl.maxBytes: '-1Gi' is negative"),
        ("{maxBytes: 10GB}", "'10GB' is not a quantity; write 10Gi for powers of 1024, 10G for powers of 1000"),
        ("{priorityBands: [{priority: 1}, {priority: 1}]}", "priorityBands[1].priority: a second band of priority 1"),
        ("{defaultRequestTTL: -5s}", "'-5s' is not a duration"),
        ("{defaultRequestTTL: 60}", "60 has no unit"),
        ("{noEndpointRequestTTL: soon}", "'soon' is not a duration"),
        ("{priorityBands: [{priority: 1, defaultRequestTTL: soon}]}", "'soon' is not a duration"),
        ("{priorityBands: [{priority: 1.5}]}", "priorityBands[0].priority"),
    ],
)
@pytest.mark.parametrize("gates", ["[flowControl]", "[]"])
def test_numbers_that_cannot_be_meant_are_refused_even_where_they_are_not_used(
    section: str, mistake: str, gates: str
) -> None:
    assert mistake in mistakes_of(with_section(section, gates))


@pytest.mark.parametrize(
    ("gates", "is_on"),
    [("[flowControl=true]", True), ("[flowControl=False]", False), ("[dataLayer, 'flowControl= 1']", True)],
)
def test_a_gate_may_be_written_with_its_value(gates: str, is_on: bool) -> None:
    assert (control(with_section("{}", gates)) is not None) == is_on


def test_a_gate_that_was_meant_and_one_without_a_readable_value_are_refused() -> None:
    assert "did you mean 'flowControl'?" in mistakes_of(with_section("{}", "[flow-control]"))
    assert "write flowControl=true or flowControl=false" in mistakes_of(with_section("{}", "[flowControl=yes]"))
    assert "write flowControl=true or flowControl=false" in mistakes_of(with_section("{}", "['flowControl=']"))
    assert "there is no gate 'other'; write one of: dataLayer" in mistakes_of(with_section("{}", "[other]"))


@pytest.mark.parametrize(
    ("top", "limits"),
    [
        ("saturationDetector: {pluginRef: busy}", (math.inf, 132)),
        # as the Inference Extension wrote it before detectors were plugins
        ("saturationDetector: {queueDepthThreshold: 3, kvCacheUtilThreshold: 0.7}", (3, math.inf)),
        # the section's own goes before
        ("saturationDetector: {pluginRef: busy}\nflowControl: {saturationDetector: {pluginRef: quiet}}", (9, math.inf)),
    ],
)
def test_the_top_level_detector_counts(top: str, limits: tuple[float, float]) -> None:
    quiet = "\n  - {type: utilization-detector, name: quiet, parameters: {queueDepthThreshold: 9}}\nschedulingProfiles:"
    found = control(EPP[: EPP.index("flowControl:\n")].replace("\nschedulingProfiles:", quiet) + top)
    assert found is not None
    saturation = found.saturation.limits()
    assert (saturation.queue_depth, saturation.max_requests) == limits


def test_program_aware_fairness_is_read_by_its_present_and_its_older_name() -> None:
    for name in ("program-aware-fairness", "program-aware-fairness-policy"):
        found = control(with_section(f"{{defaultPriorityBand: {{fairnessPolicyRef: {name}}}}}"))
        assert found is not None
        assert {band.fairness for band in found.bands} == {"SlidingWindow"}


def test_requests_of_negative_priority_wait_like_all_others() -> None:
    found = control()
    assert found is not None
    assert found.shed_from > 1.99

# SPDX-License-Identifier: Apache-2.0
"""llm-d's flow control, unchanged: what of it means what here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.config.load import load

if TYPE_CHECKING:
    from extproc.config.admission import FlowControl
    from extproc.config.snapshot import Snapshot

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
    return load({"server.yaml": SERVER, "epp.yaml": epp.encode()})


def control(epp: str = EPP) -> FlowControl | None:
    found = snapshot(epp)
    return found.flow_control_of(found.servers[0].spec)


def test_bands_policies_and_times() -> None:
    found = control()
    assert found is not None
    assert (str(found.timeout), str(found.no_endpoint_timeout), found.longest_wait_s) == ("30s", "5m", 300.0)
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
    found = load({"server.yaml": text.encode(), "epp.yaml": EPP.encode()})
    own = found.flow_control_of(found.servers[0].spec)
    assert own is not None
    assert str(own.timeout) == "7s"

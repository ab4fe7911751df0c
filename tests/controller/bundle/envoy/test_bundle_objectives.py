# SPDX-License-Identifier: Apache-2.0
"""Envoy reads the events of streams where an objective is about their tokens, and nowhere else."""

from __future__ import annotations

import json

import pytest

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
spec: {modelName: m, rules: [{targetModels: [{modelServerName: llama}]}], slo: [SLO]}
"""


@pytest.mark.parametrize(
    ("slo", "reads"),
    [
        ("", False),
        ("{name: a, e2e: 1m}", False),
        ("{name: a, ttft: 1s}", True),
        ("{name: a, priority: 1, e2e: 1m}, {name: b, tpot: 1s}", True),
    ],
)
def test_events_are_read_for_objectives_of_streams(slo: str, reads: bool) -> None:
    files = build_bundle(load_snapshot({"a.yaml": OBJECTS.replace("SLO", slo).encode()}), "/x")
    (listener,) = json.loads(files["lds.json"])["resources"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    names = [one["name"] for one in manager["http_filters"]]
    # the time at which the request began, for the scripts
    assert ("attache.kept_for_log" in names) == reads
    assert files["lds.json"].count("local LOGS = true") == 2 * reads
    assert files["lds.json"].count("local LOGS = false") == 2 * (not reads)
    # and no usage log
    assert [one["name"] for one in manager["access_log"]] == ["envoy.access_loggers.http_grpc"]

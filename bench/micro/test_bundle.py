# SPDX-License-Identifier: Apache-2.0
"""What a first bundle costs: 100 HTTPRoutes of 3 rules, and 3,000 ModelRoutes that Envoy can serve by itself."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

from controller.bundle.envoy.bundle import build_bundle
from extproc.api.config_loader import load_snapshot
from extproc.api.spec import API_VERSION

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

    from extproc.api.config_snapshot import Snapshot

SERVERS = 50
# processor time: a bundle is built beside requests
pytestmark = pytest.mark.benchmark(timer=time.process_time)


def new_object(kind: str, name: str, spec: dict[str, object]) -> dict[str, object]:
    """An object of one of our kinds."""
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


def http_route(number: int) -> dict[str, object]:
    """Three rules, each to another ModelServer and with a path of its own."""
    rules = [
        {
            "matches": [
                {
                    "path": {"type": "PathPrefix", "value": f"/team{number}/{one}"},
                    "headers": [{"name": "x-stage", "value": f"s{one}"}],
                }
            ],
            "filters": [
                {
                    "type": "URLRewrite",
                    "urlRewrite": {"path": {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/"}},
                }
            ],
            "backendRefs": [{"group": "attache.dev", "kind": "ModelServer", "name": f"s{(number + one) % SERVERS}"}],
        }
        for one in range(3)
    ]
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": f"r{number}"},
        "spec": {"hostnames": [f"h{number % 20}.example.com"], "rules": rules},
    }


def model_route(number: int) -> dict[str, object]:
    """One model on one of the ModelServers."""
    rules = [{"targetModels": [{"modelServerName": f"s{number % SERVERS}"}]}]
    return new_object("ModelRoute", f"m{number}", {"modelName": f"model-{number}", "rules": rules})


def snapshot_of(mode: str, routes: list[dict[str, object]]) -> Snapshot:
    """``routes`` over ``SERVERS`` ModelServers, in this failure mode."""
    servers = [
        new_object("ModelServer", f"s{one}", {"model": f"org/s{one}", "endpoints": [{"address": f"10.0.{one}.1:8000"}]})
        for one in range(SERVERS)
    ]
    gateway = new_object("GatewayConfig", "gateway", {"failureMode": mode, "extproc": "127.0.0.1:9002"})
    return load_snapshot({"all.json": json.dumps([gateway, *servers, *routes]).encode()})


def test_a_first_bundle_of_a_hundred_http_routes(benchmark: BenchmarkFixture) -> None:
    snapshot = snapshot_of("Close", [http_route(one) for one in range(100)])
    files = benchmark.pedantic(build_bundle, args=(snapshot, "/x"), warmup_rounds=1, rounds=5)  # type: ignore[no-untyped-call]  # the library leaves types out
    assert sum(text.count("path_separated_prefix") for text in files.values()) == 300


def test_a_first_bundle_of_three_thousand_model_routes(benchmark: BenchmarkFixture) -> None:
    snapshot = snapshot_of("Open", [model_route(one) for one in range(3000)])
    files = benchmark.pedantic(build_bundle, args=(snapshot, "/x"), warmup_rounds=1, rounds=3)  # type: ignore[no-untyped-call]  # the library leaves types out
    assert sum(text.count("without-extproc/default/m") for text in files.values()) == 3000

# SPDX-License-Identifier: Apache-2.0
"""What a changed pod costs the gateway role: 50 ModelServers with 4 pods each, and with 40."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any

import pytest

from controller.gateway.compile.compiler import Compiler

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

_SERVERS = 50


@pytest.mark.parametrize("pods", [200, 2000])
def test_a_pod_becomes_ready_and_unready(benchmark: BenchmarkFixture, pods: int) -> None:
    compiler = Compiler()
    for server in range(_SERVERS):
        compiler.update_object("ModelServer", f"default/s{server}", _server(server))
        compiler.update_object("ModelRoute", f"default/s{server}", _route(server))
    for number in range(pods):
        compiler.update_object("Pod", f"default/p{number}", _pod(number, is_ready=True))
    compiler.compile()
    changes = cycle((number, ready) for number in range(pods) for ready in (False, True))

    def change() -> int:
        number, ready = next(changes)
        compiler.update_object("Pod", f"default/p{number}", _pod(number, is_ready=ready))
        return len(compiler.compile().files)

    assert benchmark(change) == 2 * _SERVERS + 1


def _server(number: int) -> dict[str, Any]:
    selecting = {"workloadSelector": {"matchLabels": {"app": f"a{number}"}}, "workloadPort": {"port": 8000}}
    return _object("ModelServer", number, {"model": "m", **selecting})


def _route(number: int) -> dict[str, Any]:
    targets = [{"modelServerName": f"s{number}"}]
    return _object("ModelRoute", number, {"modelName": f"m{number}", "rules": [{"targetModels": targets}]})


def _object(kind: str, number: int, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": f"s{number}", "namespace": "default", "generation": 1}
    return {"apiVersion": "attache.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}


def _pod(number: int, *, is_ready: bool) -> dict[str, Any]:
    labels = {"app": f"a{number % _SERVERS}"}
    conditions = [{"type": "Ready", "status": "True" if is_ready else "False"}]
    status = {"phase": "Running", "podIP": f"10.0.{number // 250}.{number % 250 + 1}", "conditions": conditions}
    return {"metadata": {"name": f"p{number}", "namespace": "default", "labels": labels}, "status": status}

# SPDX-License-Identifier: Apache-2.0
"""InferenceModelRewrites of an API server, through attache epp and a real Envoy: which model an engine is asked for."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import httpx

from bench.cluster.local_control_plane import write_kubeconfig
from controller.kube.api_resources import CRDS, EVENTS, INFERENCE_POOLS, LLM_D_MODEL_REWRITES, NAMESPACES
from controller.kube.client import connect
from tests.controller.gateway.compile.test_inference_pool_compiler import PICKER, rewrite, rule
from tests.fake_api.server import running_fake_api_server
from tests.waiting import eventually
from tests.with_envoy.gateways import engines, gateway
from tests.with_kube.pods import make_pod
from tests.with_kube.test_picker_manifests import definition
from tests.with_kube.test_picker_role import POOL_CRD, pool

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kube_objects import Object

REWRITES = LLM_D_MODEL_REWRITES
FLAGS = ("--pool-name=llama", "--pool-namespace=team", "--metrics-endpoint-auth=false")


def body(model: str) -> bytes:
    whole = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
    return json.dumps(whole, separators=(",", ":")).encode()


# an engine tells the digest of what reached it
MODELS = {hashlib.sha256(body(one)).hexdigest(): one for one in ("gpt", "chat", "v1", "canary", "base")}


def named(name: str, thing: Object) -> Object:
    """A rewrite as llm-d has it."""
    kind = {"apiVersion": REWRITES.api_version, "kind": REWRITES.kind}
    return {**kind, **thing, "metadata": {"name": name, "namespace": "team"}}


async def test_models_are_rewritten_by_weight_and_mistakes_are_reported(tmp_path: Path) -> None:
    async with running_fake_api_server() as server, connect(server.admin, manager="test") as client, engines(2) as both:
        await client.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}})
        await client.apply(CRDS, POOL_CRD, force=True)
        crd = definition(REWRITES.group, REWRITES.version, REWRITES.plural, REWRITES.kind)
        await client.apply(CRDS, crd, force=True)
        await client.create(INFERENCE_POOLS, pool("team", *(int(one.rpartition(":")[2]) for one in both)))
        await make_pod(client, "team", "a", "127.0.0.1")
        weighted = rule(("v1", 3), ("canary", 1), models=("gpt",))
        await client.create(REWRITES, named("weighted", rewrite(weighted, rule("chat", models=("chat",)))))
        flags = [*FLAGS, f"--kubeconfig={write_kubeconfig(tmp_path / 'kubeconfig', server.admin)}"]
        async with (
            gateway(tmp_path, both, picker=PICKER, is_epp=True, flags=flags) as made,
            httpx.AsyncClient(timeout=60) as http,
        ):

            async def asked(model: str, times: int = 1, **headers: str) -> Counter[str]:
                found = Counter[str]()
                for _ in range(times):
                    answer = await http.post(f"{made.url}/v1/chat/completions", content=body(model), headers=headers)
                    assert answer.status_code == 200, answer.text
                    told: dict[str, Any] = answer.json()
                    assert told["served"] in both
                    found[MODELS[told["digest"]]] += 1
                return found

            drawn = await asked("gpt", 100)
            assert drawn.keys() == {"v1", "canary"}
            assert 8 <= drawn["canary"] <= 45
            # a header does not have precedence, one to itself is no circle, and others keep their name
            assert await asked("gpt", **{"x-llm-d-model-name-rewrite": "base"}) <= Counter(v1=1, canary=1)
            assert await asked("chat") == {"chat": 1}
            assert await asked("base") == {"base": 1}
            hostile = [
                *(rule("v1", models=("chat",)), rule("chat", models=("v1",)), rule(models=("gpt",))),
                rule(("canary", 0), models=("gpt",)),
            ]
            await client.merge_patch(REWRITES, "weighted", "team", {"spec": {"rules": hostile}})

            async def is_used() -> bool:
                return await asked("chat") == {"v1": 1}

            await eventually(is_used)
            # without targets a rule is left out, and the next one holds
            assert await asked("gpt", 5) == {"canary": 5}
            assert await asked("v1") == {"chat": 1}
            role = int(made.metrics.rpartition(":")[2]) + 1
            page = (await http.get(f"http://127.0.0.1:{role}/metrics")).text
            assert 'attache_pool_problem{pool="team/llama",reason="ModelRewriteInvalid"} 1.0' in page
            events = [one["message"] for one in (await client.list(EVENTS, "team")).items]
            assert any("rules[2] is left out" in one and "rules[3]: no target" in one for one in events)

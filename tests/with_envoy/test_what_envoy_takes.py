# SPDX-License-Identifier: Apache-2.0
"""A running Envoy takes what the loader takes, at its bounds, and reads it as extproc does."""

from __future__ import annotations

import asyncio
import json
import socket
from asyncio.subprocess import PIPE, STDOUT
from typing import TYPE_CHECKING

import httpx
import pytest
import yaml
from aiohttp import web

from bench.stack.loopback_stack import ALIAS, ROOT, documents, envoy_command
from bench.stack.processes import Processes, free_ports
from controller.bundle.sync import write_bundle_once
from extproc.api.config_loader import load_snapshot
from extproc.api.match_patterns import MAX_PROGRAM_SIZE
from extproc.routing.routing_table import compile_match
from tests.waiting import until_served

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

# Envoy's formats take what is between two of these as a command.
MODEL = "50% of %REQ(:path)%"
# 2n + 3 instructions of RE2.
LARGEST = f"[a-z]{{1,{(MAX_PROGRAM_SIZE - 3) // 2}}}"
CONDITIONS = {
    "x-large": {"regex": LARGEST},
    "x-bytes": {"regex": "é+"},
    "x-exact": {"exact": "naïve"},
    "x-prefix": {"prefix": "naïve "},
    "X-UPPER": {"exact": "A, b"},
}
# By header, values that match and values that do not.
VALUES = {
    "x-large": (["a", "a" * 498], ["A", "a" * 1000, "aé"]),
    "x-bytes": (["é"], ["e", "ée"]),
    "x-exact": (["naïve"], ["naive", "NAÏVE"]),
    "x-prefix": (["naïve x"], ["naïve", "naive x"]),
    "x-upper": (["A, b"], ["a, b"]),
}


@pytest.fixture
async def envoy_alone(tmp_path: Path) -> AsyncIterator[str]:
    """The URL of an Envoy whose extproc is not there; the engine answers with the body that it got."""
    listen, admin, extproc = free_ports(3)

    async def echo(request: web.Request) -> web.Response:
        # whatever the content type
        return web.json_response({"asked": json.loads(await request.read())})

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", echo)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    gateway = {
        "listen": f"127.0.0.1:{listen}",
        "admin": f"127.0.0.1:{admin}",
        "extproc": f"127.0.0.1:{extproc}",
        "messageTimeout": "1h",
        "accessLogFlush": "1ms",
        "maxBodySize": 2**32 - 1,
        "maxConnections": 2**31 - 1,
        "servedHeader": "X-Served-By",
    }
    more = {
        "model": MODEL,
        "trafficPolicy": {"connectTimeout": "1ms", "timeout": "8784h", "outlierDetection": {"ejectionTime": "8784h"}},
        "flowControl": {"timeout": "1h"},
    }
    address = f"127.0.0.1:{runner.addresses[0][1]}"
    text = documents([address], gateway=gateway, server="s" * 253, more=more, route={"rules": _rules("s" * 253)})
    write_bundle_once(load_snapshot({"a.yaml": text.encode()}), tmp_path / "envoy", str(tmp_path / "envoy"))
    with socket.socket() as reserved:
        # so that no other program listens there, which Envoy would wait for: for an hour
        reserved.bind(("127.0.0.1", extproc))
        async with Processes(tmp_path) as processes, httpx.AsyncClient(timeout=60) as http:
            await processes.start("envoy", envoy_command(tmp_path / "envoy"))

            # a refused listener, route or cluster would not
            await until_served(http, f"http://127.0.0.1:{listen}")
            yield f"http://127.0.0.1:{listen}"
    await runner.cleanup()


async def test_envoy_matches_what_extproc_matches_and_writes_the_models_name_as_it_is(envoy_alone: str) -> None:
    text = documents(["127.0.0.1:1"], gateway={}, route={"rules": _rules("llama")})
    (route,) = load_snapshot({"a.yaml": text.encode()}).routes
    extproc = [compile_match(rule.model_match) for rule in route.spec.rules]
    async with httpx.AsyncClient(timeout=10) as http:
        for name, (matching, others) in VALUES.items():
            for value in (*matching, *others):
                sent = {name: value.encode()}
                body = {"model": ALIAS, "messages": []}
                answer = await http.post(f"{envoy_alone}/v1/chat/completions", json=body, headers=sent)
                # bytes, as extproc reads them
                read = {name: value.encode().decode("latin-1").strip(" ")}
                holds = any(one is not None and one(read, "/v1/chat/completions") for one in extproc)
                assert holds == (value in matching), (name, value)
                assert answer.status_code == (200 if holds else 404), (name, value, answer.text)
                if holds:
                    assert answer.json()["asked"]["model"] == MODEL


@pytest.mark.parametrize(
    "content_type", [None, "", "text/plain", "application/json; charset=utf-8", "Application/JSON"]
)
async def test_without_extproc_the_model_is_renamed_whatever_the_body_claims_to_be(
    envoy_alone: str, content_type: str | None
) -> None:
    headers = {"x-exact": "naïve".encode()}
    if content_type is not None:
        headers["content-type"] = content_type.encode()
    async with httpx.AsyncClient(timeout=10) as http:
        body = f'{{"model": "{ALIAS}", "messages": []}}'.encode()
        answer = await http.post(f"{envoy_alone}/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code == 200
    assert answer.json()["asked"]["model"] == MODEL


def _rules(server: str) -> list[dict[str, object]]:
    return [
        {"modelMatch": {"headers": {name: match}}, "targetModels": [{"modelServerName": server}]}
        for name, match in CONDITIONS.items()
    ]


def _commands_of(document: object) -> Iterator[list[str]]:
    """The arguments of each container of Envoy's image in a manifest or a compose file."""
    if isinstance(document, dict):
        if str(document.get("image", "")).startswith("envoyproxy/envoy:"):
            yield [one for one in document.get("args") or document["command"] if one != "envoy"]
        document = list(document.values())
    if isinstance(document, list):
        for one in document:
            yield from _commands_of(one)


@pytest.mark.parametrize("file", ["manifests/gateway/deployment.yaml", "deploy/compose.yaml"])
async def test_the_options_of_shipped_containers_are_options_of_envoy(file: str, tmp_path: Path, envoy: str) -> None:
    bootstrap = tmp_path / "bootstrap.json"
    bootstrap.write_text("{}")
    (command,) = (one for made in yaml.safe_load_all((ROOT / file).read_text()) for one in _commands_of(made))
    at_bootstrap = [str(bootstrap) if one == "/bundle/bootstrap.json" else one for one in command]
    assert at_bootstrap != command
    made = await asyncio.create_subprocess_exec(
        *(envoy, *at_bootstrap, "--mode", "validate"), stdout=PIPE, stderr=STDOUT
    )
    said, _ = await asyncio.wait_for(made.communicate(), 60)
    assert made.returncode == 0, said.decode()

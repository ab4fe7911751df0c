# SPDX-License-Identifier: Apache-2.0
"""What extproc shows engines and asks of them: files are followed, and the last good ones stay."""

from __future__ import annotations

import json
import random
import ssl
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from extproc.api.config_loader import load_snapshot
from extproc.api.engine_connection import EngineConnection, EngineTls
from extproc.api.guard_services import GuardService
from extproc.api.model_server import ModelServerSpec, StaticEndpoint
from extproc.core.core import Core
from extproc.core.request_record import RequestHead
from extproc.feeds.engine_http import EngineCredentials
from extproc.feeds.tokenizers import EngineTokenizer
from tests.certificates import Authority
from tests.extproc.scenes import core_of, endpoints

if TYPE_CHECKING:
    from pathlib import Path

AUTHORITY = Authority()


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def spec(connection: EngineConnection, *endpoints: StaticEndpoint) -> ModelServerSpec:
    return ModelServerSpec(model="m", listed=endpoints, connection=connection)


async def test_plain_engines_need_nothing() -> None:
    access = await EngineCredentials({}, Clock()).settings_for_engine(spec(EngineConnection()), "127.0.0.1:1")
    assert (access.tls, access.server_name, access.authorization) == (None, None, "")


async def test_keys_come_from_files_and_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-1\n")
    filed, clock = spec(EngineConnection(api_key_file=str(tmp_path / "key"))), Clock()
    accesses = EngineCredentials({"KEY": "sk-2"}, clock)
    assert (await accesses.settings_for_engine(filed, "a")).authorization == "Bearer sk-1"
    assert (
        await accesses.settings_for_engine(spec(EngineConnection(api_key_env="KEY")), "a")
    ).authorization == "Bearer sk-2"
    with pytest.raises(ValueError, match="environment variable OTHER is not set"):
        await accesses.settings_for_engine(spec(EngineConnection(api_key_env="OTHER")), "a")
    (tmp_path / "key").write_text("sk-3")
    clock.now_s = 3.0
    assert (await accesses.settings_for_engine(filed, "a")).authorization == "Bearer sk-3"


async def test_files_that_turn_bad_leave_the_last_ones_in_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "ca").write_bytes(AUTHORITY.cert)
    server = spec(EngineConnection(tls=EngineTls(ca_file=str(tmp_path / "ca"), server_name="a.example")))
    clock = Clock()
    accesses = EngineCredentials({}, clock)
    first = await accesses.settings_for_engine(server, "a")
    assert first.server_name == "a.example"
    (tmp_path / "ca").write_text("nothing")
    for clock.now_s in (3.0, 6.0):
        assert (await accesses.settings_for_engine(server, "a")).tls is first.tls
    assert caplog.text.count("the last ones stay") == 1
    (tmp_path / "ca").write_bytes(AUTHORITY.cert)
    clock.now_s = 9.0
    assert (await accesses.settings_for_engine(server, "a")).tls is first.tls
    (tmp_path / "ca").write_bytes(Authority().cert)
    clock.now_s = 12.0
    assert (await accesses.settings_for_engine(server, "a")).tls is not first.tls


async def test_files_that_never_were_good_are_an_error(tmp_path: Path) -> None:
    server = spec(EngineConnection(tls=EngineTls(ca_file=str(tmp_path / "ca"), server_name="a.example")))
    with pytest.raises(FileNotFoundError):
        await EngineCredentials({}, Clock()).settings_for_engine(server, "a")


async def test_a_connection_that_is_in_use_no_more_leaves_no_key_behind(tmp_path: Path) -> None:
    accesses = EngineCredentials({}, Clock(), tmp_path)
    keys = {"engine": "key", "gone": "old"}
    servers = {name: f"{endpoints('10.0.0.1:1')}connection: {{apiKeyFile: {key}}}" for name, key in keys.items()}
    engine, gone = core_of(servers=servers).pools.values()
    guard = GuardService(name="pii", url="http://10.0.0.1/", api_key_file="guard")
    for connection in (engine.spec.connection, gone.spec.connection, guard.connection):
        file = tmp_path / (connection.api_key_file or "")
        file.write_text(f"sk-{file.name}")
        await accesses.settings_for_service(connection)
        file.unlink()
    accesses.retain_only([engine], [guard])
    assert (await accesses.settings_for_service(guard.connection)).authorization == "Bearer sk-guard"
    assert (await accesses.settings_for_engine(engine.spec, "a")).authorization == "Bearer sk-key"
    with pytest.raises(FileNotFoundError):
        await accesses.settings_for_engine(gone.spec, "a")


async def test_endpoints_may_have_names_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "ca").write_bytes(AUTHORITY.cert)
    connection = EngineConnection(tls=EngineTls(ca_file=str(tmp_path / "ca"), server_name="all.example"))
    server = spec(connection, StaticEndpoint(address="10.0.0.1:1", server_name="one.example"))
    accesses = EngineCredentials({}, Clock())
    assert (await accesses.settings_for_engine(server, "10.0.0.1:1")).server_name == "one.example"
    assert (await accesses.settings_for_engine(server, "10.0.0.2:1")).server_name == "all.example"


async def test_prompts_are_tokenized_over_tls_with_the_engines_key(tmp_path: Path) -> None:
    async def tokenize(http: web.Request) -> web.Response:
        assert http.headers["authorization"] == "Bearer sk-1"
        return web.json_response({"tokens": [1, 2, 3]})

    files = AUTHORITY.issue(dns=["engine.example"]).write(tmp_path, "engine")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["certFile"], files["keyFile"])
    app = web.Application()
    app.router.add_post("/tokenize", tokenize)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    (tmp_path / "ca").write_bytes(AUTHORITY.cert)
    config = f"""
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {{name: llama}}
spec:
  model: base
  endpoints: [{{address: "127.0.0.1:{runner.addresses[0][1]}"}}]
  connection: {{tls: {{caFile: {tmp_path}/ca, serverName: engine.example}}, apiKeyEnv: KEY}}
  tokenizer: {{timeout: 60s}}
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {{name: llama}}
spec: {{modelName: llama, rules: [{{targetModels: [{{modelServerName: llama}}]}}]}}
"""
    core = Core(load_snapshot({"a.yaml": config.encode()}), rng=random.Random(0), ticket_prefix="t")
    body = json.dumps({"model": "llama", "prompt": "hi"}).encode()
    head = RequestHead("POST", "/v1/completions", {}, has_body=True)
    arrival = core.builder.build_by_model(head, body)
    tokenizer = EngineTokenizer(EngineCredentials({"KEY": "sk-1"}, Clock()))
    try:
        assert await tokenizer.tokens(arrival) == [1, 2, 3]
    finally:
        await tokenizer.close()
        await runner.cleanup()

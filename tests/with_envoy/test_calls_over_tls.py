# SPDX-License-Identifier: Apache-2.0
"""Engines that are called by gRPC over TLS, through a real Envoy: HTTP/2 by ALPN, certificates and keys."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

import grpc.aio
import pytest
import pytest_asyncio
import yaml

from bench.stack.loopback_stack import EngineFlags, running_stack
from extproc.api.spec import API_VERSION
from tests.certificates import Authority
from tests.model_calls import INFER, V2, Engine, infer
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from bench.stack.loopback_stack import Stack
    from tests.certificates import Pair

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAME: Final = "engine.example.com"
KEY: Final = "sk-engine"
Status = grpc.StatusCode


def document(kind: str, name: str, **spec: object) -> dict[str, object]:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


class Served:
    """``engines``: by the model of which each is the only one."""

    def __init__(self, stack: Stack, engines: dict[str, Engine], channel: grpc.aio.Channel) -> None:
        self.stack = stack
        self.engines = engines
        self._channel = channel

    async def infer(self, model: str) -> list[float]:
        """The tensor that came back; raises AioRpcError."""
        raw = await self._channel.unary_unary(INFER)(
            infer(model, 1.0, 2.0).SerializeToString(), timeout=30, metadata=[("authorization", "Bearer sk-client")]
        )
        return list(V2["ModelInferResponse"].FromString(raw).outputs[0].contents.fp64_contents)

    async def refused(self, model: str) -> Status:
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await self.infer(model)
        return found.value.code()


def over_tls(pair: Pair, clients: Authority | None) -> Engine:
    """An engine with this certificate. ``clients``: who signs those that it asks for; None: it asks for none.

    A server of gRPC ends connections that have not chosen h2 by ALPN.
    """
    roots = None if clients is None else clients.cert
    return Engine(grpc.ssl_server_credentials([(pair.key, pair.cert)], roots, clients is not None))


@pytest_asyncio.fixture(params=["Close", "Open"], scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    folder: Path = tmp_path_factory.mktemp("calls")
    authority, clients = Authority("engines"), Authority("gateways")
    (folder / "ca.pem").write_bytes(authority.cert)
    (folder / "key.txt").write_text(KEY)
    good = {"caFile": str(folder / "ca.pem"), "serverName": NAME}
    own = clients.issue("gateway").write(folder, "gateway")
    engines = {
        "plain": over_tls(authority.issue(dns=[NAME]), None),
        "mutual": over_tls(authority.issue(dns=[NAME]), clients),
        "no-client": over_tls(authority.issue(dns=[NAME]), clients),
        "other-name": over_tls(authority.issue(dns=["other.example.com"]), None),
        "other-authority": over_tls(Authority("nobody").issue(dns=[NAME]), None),
        "no-tls": Engine(),
    }
    gateway = {"failureMode": request.param}
    async with AsyncExitStack() as exits:
        for one in engines.values():
            await exits.enter_async_context(one)
        stack = await exits.enter_async_context(
            running_stack(folder / "stack", EngineFlags(count=1), watch=True, gateway=gateway)
        )
        documents = []
        for name, engine in engines.items():
            tls = {**good, **({"clientCertificate": own} if name == "mutual" else {})}
            connection = {"tls": tls, **({"apiKeyFile": str(folder / "key.txt")} if name == "mutual" else {})}
            endpoints = [{"address": engine.address}]
            spec = {"model": "m", "protocol": "V2-gRPC", "endpoints": endpoints, "connection": connection}
            documents.append(document("ModelServer", name, **spec))
            documents.append(
                document("ModelRoute", name, modelName=name, rules=[{"targetModels": [{"modelServerName": name}]}])
            )
        file = stack.config / "attache.yaml"
        new = file.with_suffix(".new")
        new.write_text(f"{file.read_text()}\n---\n{yaml.safe_dump_all(documents)}")
        new.replace(file)
        address = stack.url.removeprefix("http://")

        async def is_served() -> bool:
            # a connection of its own: the last one may be of the listener before
            async with grpc.aio.insecure_channel(address) as channel:
                try:
                    await channel.unary_unary(INFER)(infer("plain", 1.0).SerializeToString(), timeout=10)
                except grpc.aio.AioRpcError:
                    return False
                return True

        await eventually(is_served)
        yield Served(stack, engines, await exits.enter_async_context(grpc.aio.insecure_channel(address)))


async def test_tensors_reach_an_engine_over_tls_and_come_back(served: Served) -> None:
    assert await served.infer("plain") == [1.0, 2.0]
    path, name, metadata = served.engines["plain"].seen[-1]
    assert (path, name) == (INFER, "m")
    assert metadata["authorization"] == "Bearer sk-client"
    assert served.engines["plain"].clients == set()


async def test_an_engine_gets_the_gateways_certificate_and_its_own_key(served: Served) -> None:
    assert await served.infer("mutual") == [1.0, 2.0]
    assert served.engines["mutual"].clients == {b"gateway"}
    assert served.engines["mutual"].seen[-1][2]["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("model", ["no-client", "other-name", "other-authority", "no-tls"])
async def test_an_engine_that_cannot_be_trusted_or_reached_gets_nothing(served: Served, model: str) -> None:
    assert await served.refused(model) is Status.UNAVAILABLE
    assert served.engines[model].seen == []

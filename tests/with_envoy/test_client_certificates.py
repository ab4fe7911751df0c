# SPDX-License-Identifier: Apache-2.0
"""Callers by client certificate through a real Envoy: whose they are, and every certificate that is refused."""

from __future__ import annotations

import ssl
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import pytest_asyncio
import yaml

from bench.stack.loopback_stack import ALIAS, EngineFlags, Stack, running_stack
from bench.stack.processes import free_ports
from tests.certificates import Authority, Pair, client_context
from tests.waiting import eventually
from tests.with_envoy.test_admission import edit, spec_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED = {"model": ALIAS, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
# What a handshake that Envoy refuses looks like, which with TLS 1.3 a client meets when it reads
REFUSED = (httpx.TransportError, ssl.SSLError)
NAMES = [
    {"name": "spiffe", "field": "URI", "pattern": "spiffe://example.com/{tenant}/{user}"},
    {"name": "hosts", "field": "DNS", "pattern": "{user}.{tenant}.clients.example.com"},
    {"name": "people", "field": "CommonName", "pattern": "{user}@bell", "tenant": "bell"},
]


class Site:
    """Authorities, ports, and files of the listeners: one that requires a certificate, one that does not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server, self.clients, self.others = Authority("servers"), Authority("clients"), Authority("others")
        self.probed, self.required, self.optional = free_ports(3)
        self.revoked = self.clients.issue(uris=["spiffe://example.com/acme/eve"])
        self.crl, self.ca = folder / "crl.pem", folder / "clients.pem"
        self.ca.write_bytes(self.clients.cert)
        self.crl.write_bytes(self.clients.revoked(self.revoked))

    def listeners(self) -> list[dict[str, object]]:
        certificate = self.server.issue(dns=["gateway.example.com"]).write(self.folder, "server")

        def listener(name: str, port: int, mode: str) -> dict[str, object]:
            asked = {"caFile": str(self.ca), "crlFile": str(self.crl), "mode": mode}
            tls = {"certificates": [certificate], "clientCertificates": asked}
            return {"name": name, "address": f"127.0.0.1:{port}", "tls": tls}

        return [listener("required", self.required, "Require"), listener("optional", self.optional, "Optional")]

    async def ask(
        self,
        shows: Pair | None,
        *,
        port: int | None = None,
        headers: dict[str, str] | None = None,
        model: str = ALIAS,
    ) -> httpx.Response:
        context = client_context(self.server, shows, self.folder)
        sent = {"host": "gateway.example.com", **(headers or {})}
        async with httpx.AsyncClient(verify=context, timeout=20) as http:
            return await http.post(
                f"https://127.0.0.1:{port or self.required}/v1/chat/completions",
                json={**ASKED, "model": model},
                headers=sent,
                extensions={"sni_hostname": "gateway.example.com"},
            )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("certificates"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory, site: Site) -> AsyncIterator[Stack]:
    """Begins with a plain listener and without authentication, and is then changed to what is tested."""
    directory = tmp_path_factory.mktemp("mtls") / "stack"
    async with running_stack(
        directory,
        EngineFlags(count=1, speed=20.0),
        gateway={"listen": f"127.0.0.1:{site.probed}"},
        watch=True,
    ) as running:
        edit(
            running,
            "GatewayConfig",
            listeners=site.listeners(),
            authentication={"clientCertificates": NAMES},
            tenants=[{"name": "poor", "models": ["something-else"]}],
            clients="Trusted",
        )

        async def serves() -> bool:
            try:
                shown = site.clients.issue(uris=["spiffe://example.com/acme/first"])
                return (await site.ask(shown)).status_code == 200
            except REFUSED:
                return False

        await eventually(serves)
        yield running


def add_route(stack: Stack, tenant: str, user: str) -> str:
    """A model that this user of this tenant alone may use, by the headers that extproc sees."""
    name = f"{tenant}-{user}"
    is_caller = {"x-attache-tenant": {"exact": tenant}, "x-attache-user": {"exact": user}}
    rule = {"modelMatch": {"headers": is_caller}, "targetModels": [{"modelServerName": "llama"}]}
    route = {
        "apiVersion": "attache.dev/v1alpha1",
        "kind": "ModelRoute",
        "metadata": {"name": name},
        "spec": {"modelName": name, "rules": [rule]},
    }
    (stack.config / f"{name}.yaml").write_text(yaml.safe_dump(route))
    return name


@pytest.mark.parametrize(
    ("shown", "tenant", "user"),
    [
        ({"uris": ["spiffe://example.com/acme/alice"]}, "acme", "alice"),
        ({"uris": ["spiffe://other.example/x/y", "spiffe://example.com/acme/bob"]}, "acme", "bob"),
        ({"dns": ["carol.core.Clients.example.com"]}, "core", "carol"),
        ({"common_name": "dave@bell"}, "bell", "dave"),
        ({"common_name": "dave@bell", "uris": ["spiffe://example.com/acme/dave"]}, "acme", "dave"),
    ],
)
async def test_a_certificate_says_who_asks(
    stack: Stack, site: Site, shown: dict[str, Any], tenant: str, user: str
) -> None:
    model, pair = add_route(stack, tenant, user), site.clients.issue(**shown)
    forged = {"x-attache-tenant": "victim", "x-attache-user": "victim", "x-attache-client": "victim"}

    async def is_served() -> bool:
        return (await site.ask(pair, headers=forged, model=model)).status_code == 200

    await eventually(is_served)
    other = site.clients.issue(uris=["spiffe://example.com/acme/other"])
    pretended = {"x-attache-tenant": tenant, "x-attache-user": user}
    assert (await site.ask(other, headers=pretended, model=model)).status_code == 404


@pytest.mark.usefixtures("stack")
@pytest.mark.parametrize(
    "shown",
    [
        {"uris": ["spiffe://example.com/acme"]},
        {"uris": ["spiffe://example.com/acme/alice/x"]},
        {"uris": ["xspiffe://example.com/acme/alice"]},
        {"uris": ["spiffe://exampleXcom/acme/alice"]},
        {"uris": ["spiffe://example.com/acme/a", "spiffe://example.com/bell/a"]},
        {"common_name": "dave@bell/x"},
        {"common_name": "a@b@bell"},
    ],
)
async def test_a_certificate_that_names_no_tenant_or_two_is_forbidden(site: Site, shown: dict[str, Any]) -> None:
    answer = await site.ask(site.clients.issue(**shown), headers={"x-attache-tenant": "acme"})
    assert answer.status_code == 403
    assert "has no name by which this gateway knows tenants" in answer.json()["error"]["message"]


@pytest.mark.usefixtures("stack")
async def test_a_tenant_known_by_certificate_may_not_use_every_model(site: Site) -> None:
    answer = await site.ask(site.clients.issue(uris=["spiffe://example.com/poor/a"]))
    assert answer.status_code in {403, 404}


@pytest.mark.usefixtures("stack")
@pytest.mark.parametrize("mode", ["required", "optional"])
async def test_bad_certificates_are_refused_in_the_handshake(site: Site, mode: str) -> None:
    port = site.required if mode == "required" else site.optional
    uris = ["spiffe://example.com/acme/mallory"]
    expired = site.clients.issue(uris=uris, ends_in=timedelta(days=-1))
    for shown in (expired, site.others.issue(uris=uris), site.revoked):
        with pytest.raises(REFUSED):
            await site.ask(shown, port=port)


@pytest.mark.usefixtures("stack")
async def test_without_a_certificate_there_is_no_connection_or_no_answer(site: Site) -> None:
    with pytest.raises(REFUSED):
        await site.ask(None)
    answer = await site.ask(None, port=site.optional, headers={"x-attache-tenant": "acme"})
    assert answer.status_code == 401
    assert "has no client certificate" in answer.json()["error"]["message"]
    shown = site.clients.issue(uris=["spiffe://example.com/acme/a"])
    assert (await site.ask(shown, port=site.optional)).status_code == 200


@pytest.mark.usefixtures("stack")
async def test_a_certificate_that_is_revoked_now_is_refused_from_now_on(site: Site) -> None:
    shown = site.clients.issue(uris=["spiffe://example.com/acme/frank"])
    assert (await site.ask(shown)).status_code == 200
    site.crl.write_bytes(site.clients.revoked(site.revoked, shown))

    async def is_refused() -> bool:
        try:
            await site.ask(shown)
        except REFUSED:
            return True
        return False

    await eventually(is_refused)
    assert (await site.ask(site.clients.issue(uris=["spiffe://example.com/acme/a"]))).status_code == 200


async def test_names_of_certificates_change_without_a_new_listener(stack: Stack, site: Site) -> None:
    listeners = (stack.directory / "envoy" / "lds.json").read_bytes()
    shown = site.clients.issue(uris=["urn:acme:zoe"])
    assert (await site.ask(shown)).status_code == 403
    fresh = [{"name": "urn", "field": "URI", "pattern": "urn:{tenant}:{user}"}, *NAMES]
    before = spec_of(stack, "GatewayConfig")["authentication"]
    edit(stack, "GatewayConfig", authentication={"clientCertificates": fresh})

    async def is_known() -> bool:
        return (await site.ask(shown)).status_code == 200

    # {tenant} reaches over ':', so the first that fits would be ambiguous if it did so twice
    await eventually(is_known)
    assert (stack.directory / "envoy" / "lds.json").read_bytes() == listeners
    edit(stack, "GatewayConfig", authentication=before)

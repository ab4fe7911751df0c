# SPDX-License-Identifier: Apache-2.0
"""Several listeners through a real Envoy: plain ones and HTTPS, told apart by server name, with certificates that
change.
"""

from __future__ import annotations

import asyncio
import ssl
import stat
from typing import TYPE_CHECKING

import httpx
import pytest
import pytest_asyncio

from bench.stack.loopback_stack import ALIAS, EngineFlags, Stack, running_stack
from bench.stack.processes import free_ports
from controller.bundle.acknowledgements import AcknowledgementPoller
from controller.bundle.envoy_admin_client import read_envoy_state
from controller.bundle.sync import wait_until_acknowledged
from extproc.api.config_loader import load_directory
from tests.certificates import Authority, client_context
from tests.waiting import eventually
from tests.with_envoy.test_admission import edit, spec_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASKED = {"model": ALIAS, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


class Site:
    """The certificates and ports of the listeners."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority()
        self.plain, self.other, self.https, self.later = free_ports(4)
        self.api = self.authority.issue(dns=["api.example.com"])
        self.wild = self.authority.issue(dns=["*.wild.example.com"])
        self.rest = self.authority.issue(dns=["rest.example.com"])

    def listeners(self) -> list[dict[str, object]]:
        def https(name: str, hostname: str | None, certificate: dict[str, str]) -> dict[str, object]:
            named = {} if hostname is None else {"hostname": hostname}
            tls = {"certificates": [certificate]}
            return {"name": name, "address": f"127.0.0.1:{self.https}", "tls": tls, **named}

        return [
            {"name": "plain", "address": f"127.0.0.1:{self.plain}"},
            {"name": "other", "address": f"127.0.0.1:{self.other}"},
            https("api", "api.example.com", self.api.write(self.folder, "api")),
            https("wild", "*.wild.example.com", self.wild.write(self.folder, "wild")),
            https("rest", None, self.rest.write(self.folder, "rest")),
        ]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("certificates"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory, site: Site) -> AsyncIterator[Stack]:
    gateway = {"listen": f"127.0.0.1:{site.plain}", "listeners": site.listeners()}
    async with running_stack(
        tmp_path_factory.mktemp("listeners") / "stack", EngineFlags(count=1, speed=20.0), gateway=gateway, watch=True
    ) as running:
        yield running


async def ask(site: Site, name: str, *, http2: bool = False, port: int | None = None) -> httpx.Response:
    """A chat over HTTPS with the server name ``name``."""
    url = f"https://127.0.0.1:{port or site.https}/v1/chat/completions"
    async with httpx.AsyncClient(verify=client_context(site.authority), http2=http2, timeout=20) as http:
        return await http.post(url, json=ASKED, headers={"host": name}, extensions={"sni_hostname": name})


async def shown(port: int, name: str) -> bytes:
    """The certificate that a handshake for ``name`` shows, whoever signed it."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return ssl.DER_cert_to_PEM_cert(certificate).encode()


@pytest.mark.usefixtures("stack")
async def test_each_listener_serves(site: Site) -> None:
    async with httpx.AsyncClient(timeout=20) as http:
        for port in (site.plain, site.other):
            answer = await http.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=ASKED)
            assert answer.status_code == 200, answer.text
    for name in ("api.example.com", "one.wild.example.com", "rest.example.com"):
        assert (await ask(site, name)).status_code == 200


@pytest.mark.usefixtures("stack")
async def test_the_server_name_decides_which_certificate_is_shown(site: Site) -> None:
    assert await shown(site.https, "api.example.com") == site.api.cert
    assert await shown(site.https, "API.example.com") == site.api.cert
    assert await shown(site.https, "a.wild.example.com") == site.wild.cert
    assert await shown(site.https, "nobody.example.com") == site.rest.cert
    with pytest.raises(httpx.ConnectError, match=r"(?i)hostname mismatch"):
        await ask(site, "nobody.example.com")


@pytest.mark.usefixtures("stack")
async def test_http2_is_agreed_on_in_the_handshake(site: Site) -> None:
    assert (await ask(site, "api.example.com", http2=True)).http_version == "HTTP/2"
    assert (await ask(site, "api.example.com")).http_version == "HTTP/1.1"


@pytest.mark.usefixtures("stack")
async def test_https_does_not_take_plain_requests(site: Site) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        with pytest.raises(httpx.TransportError):
            await http.get(f"http://127.0.0.1:{site.https}/v1/models")


async def test_private_keys_are_for_the_owner_alone_and_in_no_other_file(stack: Stack, site: Site) -> None:
    bundle = stack.directory / "envoy"
    secrets = list((bundle / "secrets").iterdir())
    assert len(secrets) == 3
    assert {stat.S_IMODE(file.stat().st_mode) for file in secrets} == {0o600}
    async with httpx.AsyncClient(timeout=60) as http:
        dump = (await http.get(f"{stack.admin}/config_dump?include_eds")).text
    text = "".join(file.read_text() for file in bundle.glob("*.json")) + dump
    assert "secrets/" in text
    for line in site.api.key.decode().splitlines()[1:-1]:
        assert line not in text


async def test_a_new_certificate_is_shown_and_connections_stay(stack: Stack, site: Site) -> None:
    listeners = (stack.directory / "envoy" / "lds.json").read_bytes()
    name = "api.example.com"
    async with httpx.AsyncClient(verify=client_context(site.authority), timeout=20) as http:
        url = f"https://127.0.0.1:{site.https}/v1/models"

        async def answers() -> tuple[int, object]:
            got = await http.get(url, headers={"host": name}, extensions={"sni_hostname": name})
            return got.status_code, got.extensions["network_stream"].get_extra_info("client_addr")

        before = await answers()
        site.api = site.authority.issue(dns=[name])
        site.api.write(site.folder, "api")

        async def is_shown() -> bool:
            return await shown(site.https, name) == site.api.cert

        await eventually(is_shown)
        # the same connection
        assert await answers() == before == (200, before[1])
    assert (stack.directory / "envoy" / "lds.json").read_bytes() == listeners


async def test_a_certificate_without_its_key_is_said_and_the_last_pair_stays(stack: Stack, site: Site) -> None:
    name = "rest.example.com"
    good, new = site.rest, site.authority.issue(dns=[name])
    (site.folder / "rest.crt").write_bytes(new.cert)
    await eventually(lambda: "the private key is of another certificate" in _log(stack))
    assert await shown(site.https, name) == good.cert
    (site.folder / "rest.crt").write_bytes(new.cert[:100])
    await eventually(lambda: "only part of one" in _log(stack))
    assert await shown(site.https, name) == good.cert
    assert _log(stack).count("the private key is of another certificate") == 1
    site.rest = new
    # in place: no other file is moved there
    (site.folder / "rest.crt").write_bytes(new.cert)
    (site.folder / "rest.key").write_bytes(new.key)

    async def is_shown() -> bool:
        return await shown(site.https, name) == new.cert

    await eventually(is_shown)


async def test_listeners_come_and_go_while_others_serve(stack: Stack, site: Site) -> None:
    more = site.authority.issue(dns=["more.example.com"])
    tls = {"certificates": [more.write(site.folder, "more")]}
    one = {"name": "more", "address": f"127.0.0.1:{site.later}", "hostname": "more.example.com", "tls": tls}
    before = list(spec_of(stack, "GatewayConfig")["listeners"])  # type: ignore[call-overload]
    edit(stack, "GatewayConfig", listeners=[*before, one])

    async def serves() -> bool:
        try:
            return (await ask(site, "more.example.com", port=site.later)).status_code == 200
        except httpx.TransportError:
            return False

    await eventually(serves)
    assert (await ask(site, "api.example.com")).status_code == 200
    edit(stack, "GatewayConfig", listeners=before)

    async def is_gone() -> bool:
        return not await serves()

    await eventually(is_gone)
    assert (await ask(site, "api.example.com")).status_code == 200
    await eventually(lambda: len(list((stack.directory / "envoy" / "secrets").iterdir())) == 3)


async def test_a_listener_whose_certificate_is_missing_is_refused_as_a_whole(stack: Stack, site: Site) -> None:
    before = list(spec_of(stack, "GatewayConfig")["listeners"])  # type: ignore[call-overload]
    files = {"certFile": str(site.folder / "none.crt"), "keyFile": str(site.folder / "none.key")}
    one = {"name": "none", "address": f"127.0.0.1:{site.later}", "tls": {"certificates": [files]}}
    edit(stack, "GatewayConfig", listeners=[*before, one])
    await eventually(lambda: "none.crt: No such file" in _log(stack))
    assert (await ask(site, "api.example.com")).status_code == 200
    edit(stack, "GatewayConfig", listeners=before)


async def test_envoy_is_seen_to_use_the_routes_of_every_listener(stack: Stack) -> None:
    bundle = stack.directory / "envoy"
    acknowledgements = AcknowledgementPoller(read_envoy_state, str(bundle / "bootstrap.json"))
    assert wait_until_acknowledged(load_directory(stack.config), bundle, acknowledgements, wait_s=10.0), (
        acknowledgements.verdict
    )
    assert len(list((bundle / "rds").iterdir())) == 5


def _log(stack: Stack) -> str:
    return (stack.directory / "bundle.log").read_text()

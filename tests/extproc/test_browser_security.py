# SPDX-License-Identifier: Apache-2.0
"""Which requests pages answer: those of programs and of their own site, and on loopback none by a name of others."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from extproc.browser_security import add_browser_protection

OWN = "console.example:9003"


async def status(listen: str, method: str = "GET", *, is_behind_envoy: bool = False, **headers: str) -> int:
    async def answer(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_route("*", "/", answer)
    add_browser_protection(app, listen, is_behind_envoy=is_behind_envoy)
    written = {name.replace("_", "-"): value for name, value in headers.items()}
    async with TestClient(TestServer(app)) as client, client.request(method, "/", headers=written) as found:
        return found.status


@pytest.mark.parametrize("listen", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *((one, 200) for one in ("127.0.0.1", "127.0.0.1:9003", "[::1]:9003", "10.0.0.7:9003")),
        *((one, 200) for one in ("localhost", "LOCALHOST:9003", "localhost.:9003", "a.localhost:9003")),
        *((one, 421) for one in ("rebound.example", "rebound.example:9003", "127.0.0.1.example", "localhost.example")),
        *((one, 421) for one in ("notlocalhost", "127.0.0.1@rebound.example", "[rebound.example]:9003")),
    ],
)
async def test_on_loopback_a_page_has_no_name_that_others_can_give_it(listen: str, host: str, expected: int) -> None:
    assert await status(listen, Host=host) == expected


@pytest.mark.parametrize("listen", ["0.0.0.0", "::", "10.0.0.7"])  # noqa: S104 - nothing listens there
async def test_elsewhere_names_of_services_are_answered(listen: str) -> None:
    assert await status(listen, Host="attache.gateways.svc.cluster.local:9003") == 200


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        # curl, Prometheus, kubelets
        ({}, 200),
        # an address that was typed in, and the console's own script
        ({"Sec_Fetch_Site": "none", "Sec_Fetch_Mode": "navigate"}, 200),
        ({"Sec_Fetch_Site": "same-origin", "Origin": "https://console.example"}, 200),
        ({"Origin": f"http://{OWN}"}, 200),
        ({"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"}, 403),
        # another port of this machine
        ({"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "cors"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "http://console.example:1"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
async def test_what_pages_of_other_sites_send_is_refused(method: str, headers: dict[str, str], expected: int) -> None:
    assert await status("0.0.0.0", method, Host=OWN, **headers) == expected  # noqa: S104 - nothing listens there


@pytest.mark.parametrize(("method", "expected"), [("GET", 200), ("POST", 403)])
async def test_a_link_of_another_site_is_followed_and_its_form_is_not(method: str, expected: int) -> None:
    sent = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Origin": "https://wiki.example"}
    assert await status("127.0.0.1", method, Host="localhost", **sent) == expected


async def test_behind_envoy_other_sites_may_ask() -> None:
    sent = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "cors", "Origin": "https://app.example"}
    assert await status("127.0.0.1", is_behind_envoy=True, Host="127.0.0.1:9009", **sent) == 200
    assert await status("127.0.0.1", is_behind_envoy=True, Host="rebound.example:9009") == 421

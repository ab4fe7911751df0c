# SPDX-License-Identifier: Apache-2.0
"""Answers that somebody else makes, through a real Envoy: filters in front of ext_proc, routes that answer by
themselves, and the gateway's own time limits. They reach clients as they are, and nothing is decided.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final

import httpx
import pytest
import pytest_asyncio

from controller.bundle.atomic_files import replace_file
from tests.waiting import eventually
from tests.with_envoy.gateways import IN_PIECES, Gateway, engines, gateway, pool_config

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

CHAT: Final = "/v1/chat/completions"
BODY: Final = json.dumps({"model": "base", "messages": [{"role": "user", "content": "hello"}]}).encode()
TYPES: Final = "type.googleapis.com/envoy.extensions.filters.http"

# By header, so that one gateway has them all: RBAC refuses, the rate limit has one token, Lua answers with a long body
# or with none, and the authorization service is not there.
LUA: Final = """
function envoy_on_request(handle)
  local wish = handle:headers():get("x-lua")
  if wish == "long" then
    handle:respond({[":status"] = "401", ["www-authenticate"] = "Bearer"}, string.rep("denied ", 30000))
  elseif wish then
    handle:respond({[":status"] = "401"}, nil)
  end
end
"""


def matching(header: str) -> dict[str, Any]:
    return {"name": header, "present_match": True}


FILTERS: Final = [
    {
        "name": "envoy.filters.http.rbac",
        "typed_config": {
            "@type": f"{TYPES}.rbac.v3.RBAC",
            "rules": {
                "action": "DENY",
                "policies": {"no": {"permissions": [{"any": True}], "principals": [{"header": matching("x-rbac")}]}},
            },
        },
    },
    {
        "name": "envoy.filters.http.local_ratelimit",
        "typed_config": {
            "@type": f"{TYPES}.local_ratelimit.v3.LocalRateLimit",
            "stat_prefix": "limit",
            "token_bucket": {"max_tokens": 100_000, "fill_interval": "3600s"},
            "filter_enabled": {"default_value": {"numerator": 100}},
            "filter_enforced": {"default_value": {"numerator": 100}},
            "descriptors": [
                {
                    "entries": [{"key": "limited", "value": "yes"}],
                    "token_bucket": {"max_tokens": 1, "tokens_per_fill": 1, "fill_interval": "3600s"},
                }
            ],
            "rate_limits": [
                {
                    "actions": [
                        {
                            "header_value_match": {
                                "descriptor_key": "limited",
                                "descriptor_value": "yes",
                                "headers": [matching("x-limited")],
                            }
                        }
                    ]
                }
            ],
        },
    },
    {
        "name": "envoy.filters.http.lua",
        "typed_config": {"@type": f"{TYPES}.lua.v3.Lua", "default_source_code": {"inline_string": LUA}},
    },
    {
        "name": "envoy.filters.http.ext_authz",
        "typed_config": {
            "@type": f"{TYPES}.ext_authz.v3.ExtAuthz",
            "grpc_service": {"envoy_grpc": {"cluster_name": "nobody"}, "timeout": "1s"},
            "filter_enabled_metadata": {
                "filter": "authz",
                "path": [{"key": "wanted"}],
                "value": {"string_match": {"exact": "yes"}},
            },
        },
    },
]
SETS_AUTHZ: Final = {
    "name": "envoy.filters.http.header_to_metadata",
    "typed_config": {
        "@type": f"{TYPES}.header_to_metadata.v3.Config",
        "request_rules": [
            {"header": "x-authz", "on_header_present": {"metadata_namespace": "authz", "key": "wanted", "value": "yes"}}
        ],
    },
}
ROUTES: Final = [
    {"match": {"path": "/told"}, "direct_response": {"status": 418, "body": {"inline_string": "short and stout"}}},
    {"match": {"path": "/moved"}, "redirect": {"path_redirect": "/elsewhere"}},
]
ALL: Final = {"request_header_mode": "SEND", "response_header_mode": "SEND"}
TRAILERS: Final = {"request_trailer_mode": "SEND", "response_trailer_mode": "SEND"}
MODES: Final = {
    "in pieces": IN_PIECES,
    "whole both ways": {**ALL, **TRAILERS, "request_body_mode": "BUFFERED", "response_body_mode": "BUFFERED"},
    "whole, answers in pieces": {
        **ALL,
        **TRAILERS,
        "request_body_mode": "BUFFERED",
        "response_body_mode": "FULL_DUPLEX_STREAMED",
    },
    "whole, answers streamed": {**ALL, "request_body_mode": "BUFFERED", "response_body_mode": "STREAMED"},
    "in pieces, answers streamed": {
        **ALL,
        **TRAILERS,
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "response_body_mode": "STREAMED",
    },
    "in pieces, answers whole": {
        **ALL,
        **TRAILERS,
        "request_body_mode": "FULL_DUPLEX_STREAMED",
        "response_body_mode": "BUFFERED",
    },
    "whole, headers of answers": {**ALL, "request_body_mode": "BUFFERED", "response_body_mode": "NONE"},
    "whole, bodies of answers alone": {
        **ALL,
        "response_header_mode": "SKIP",
        "request_body_mode": "BUFFERED",
        "response_body_mode": "BUFFERED",
    },
}
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(MODES))
async def guarded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Gateway, str]]:
    """A gateway with filters in front of ext_proc, and extproc's log."""
    directory = tmp_path_factory.mktemp("guarded")
    async with (
        engines(2) as addresses,
        gateway(
            directory,
            addresses,
            mode=MODES[request.param],
            filters=[SETS_AUTHZ, *FILTERS],
            routes=ROUTES,
            flags=["--buffered-choices", "1"],
        ) as made,
    ):
        yield made, str(directory / "extproc.log")


async def picked(made: Gateway) -> float:
    async with httpx.AsyncClient(timeout=60) as http:
        page = (await http.get(f"{made.metrics}/metrics")).text
    counted = [line for line in page.splitlines() if line.startswith("attache_requests_total")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in counted)


@pytest.mark.parametrize(
    ("headers", "status", "told"),
    [
        ({"x-rbac": "1"}, 403, b"RBAC: access denied"),
        ({"x-lua": "long"}, 401, b"denied " * 30_000),
        ({"x-lua": "bare"}, 401, b""),
        ({"x-authz": "1"}, 403, b""),
    ],
)
async def test_what_a_filter_before_ours_answers_reaches_the_client(
    guarded: tuple[Gateway, str], headers: dict[str, str], status: int, told: bytes
) -> None:
    made, log = guarded
    before = await picked(made)
    async with httpx.AsyncClient(timeout=20) as http:
        for method, content in (("POST", BODY), ("POST", BODY * 20_000), ("GET", None), ("HEAD", None)):
            answer = await http.request(method, made.url + CHAT, content=content, headers=headers)
            assert answer.status_code == status, answer.text
            assert answer.content == (b"" if method == "HEAD" else told)
    assert await picked(made) == before
    assert_quiet(log)


async def test_a_rate_limit_before_ours_is_a_429(guarded: tuple[Gateway, str]) -> None:
    made, log = guarded
    async with httpx.AsyncClient(timeout=20) as http:
        answers = [await http.post(made.url + CHAT, content=BODY, headers={"x-limited": "1"}) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 429, 429]
    assert answers[1].content == b"local_rate_limited"
    assert_quiet(log)


async def test_routes_that_answer_by_themselves_do(guarded: tuple[Gateway, str]) -> None:
    made, log = guarded
    async with httpx.AsyncClient(timeout=20) as http:
        told = await http.post(made.url + "/told", content=BODY)
        moved = await http.post(made.url + "/moved", content=BODY)
    assert (told.status_code, told.text) == (418, "short and stout")
    assert (moved.status_code, moved.headers["location"].rpartition("/")[2]) == (301, "elsewhere")
    assert_quiet(log)


async def test_engines_answers_pass_as_they_were_sent(guarded: tuple[Gateway, str]) -> None:
    made, log = guarded
    async with httpx.AsyncClient(timeout=20) as http:
        plain = await http.post(made.url + CHAT, content=BODY)
        streamed = await http.post(made.url + CHAT, content=BODY, headers={"x-pieces": "30", "x-piece-bytes": "9000"})
    assert plain.json()["bytes"] == len(BODY)
    assert streamed.content.count(b"data: ") == 32
    assert streamed.content.endswith(b"data: [DONE]\n\n")
    assert_quiet(log)


async def test_a_request_with_trailers_and_no_body_goes_nowhere_undecided(guarded: tuple[Gateway, str]) -> None:
    """Buffering, Envoy sends on what has no body and does not ask us: not to an address of the client's."""
    made, log = guarded
    host, _, port = made.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with engines(1) as (elsewhere,):
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\ntrailer: x-end\r\n"
        )
        writer.write(f"{head}x-gateway-destination-endpoint: {elsewhere}\r\n\r\n0\r\nx-end: 1\r\n\r\n".encode())
        answer = await asyncio.wait_for(reader.read(), 120)
        writer.close()
        await writer.wait_closed()
    assert elsewhere.encode() not in answer
    assert answer.split(b" ", 2)[1] in {b"200", b"400", b"503"}
    assert_quiet(log)


@pytest.mark.parametrize("mode", ["in pieces", "whole both ways", "whole, headers of answers"])
async def test_a_time_limit_of_the_gateway_ends_a_request_that_is_held(tmp_path: Path, mode: str) -> None:
    limited = {"match": {"prefix": "/"}, "route": {"cluster": "pool", "idle_timeout": "0.5s"}}
    async with gateway(tmp_path, [], mode=MODES[mode], routes=[limited]) as made, httpx.AsyncClient(timeout=60) as http:
        waits = pool_config([]).replace(
            "scrapeInterval: 0s", "scrapeInterval: 0s, flowControl: {noEndpointTimeout: 10m}"
        )
        # in place, it could be read while it is empty
        replace_file(made.config / "pool.yaml", waits.encode(), 0o644)

        async def holds() -> bool:
            answer = await http.post(made.url + CHAT, content=BODY, timeout=60)
            return answer.status_code == 504 and answer.text == "stream timeout"

        # a 503 until the configuration is there
        await eventually(holds)

        async def is_idle() -> bool:
            return "attache_open_streams 0.0" in (await http.get(f"{made.metrics}/metrics")).text

        await eventually(is_idle)
    assert_quiet(str(tmp_path / "extproc.log"))


def assert_quiet(log: str) -> None:
    with open(log) as file:  # noqa: PTH123
        written = file.read()
    assert "Traceback" not in written
    assert "ERROR" not in written

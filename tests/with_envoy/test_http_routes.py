# SPDX-License-Identifier: Apache-2.0
"""HTTPRoutes through the real Envoy: matches, filters, weights, hosts, engines, and what hostile clients try."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import pytest_asyncio

from tests.waiting import eventually
from tests.with_envoy.http_stand import Servers, answer_http2, backend, chat, document, ref, route, rule, stand

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.with_envoy.http_stand import Stand

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"


def header_filter(kind: str, **changes: object) -> dict[str, object]:
    return {"type": f"{kind}HeaderModifier", f"{kind.lower()}HeaderModifier": changes}


def rewrite(**changes: object) -> dict[str, object]:
    return {"type": "URLRewrite", "urlRewrite": changes}


def to_path(kind: str, new: str) -> dict[str, object]:
    return {"type": kind, "replaceFullPath" if kind == "ReplaceFullPath" else "replacePrefixMatch": new}


def redirect(**changes: object) -> dict[str, object]:
    return {"type": "RequestRedirect", "requestRedirect": changes}


def mirror(name: str, **share: object) -> dict[str, object]:
    return {"type": "RequestMirror", "requestMirror": {"backendRef": ref(name), **share}}


def named(name: str, value: str) -> dict[str, str]:
    return {"name": name, "value": value}


def matching_rules() -> list[dict[str, Any]]:
    """Under ``/match``, each to the server that its condition names."""
    return [
        rule("/match", ref("a")),
        rule("/match/exact", ref("b"), kind="Exact"),
        rule("/match/deep/", ref("b")),
        rule("/match/[0-9]+", ref("c"), kind="RegularExpression"),
        rule("/match", ref("b"), match={"method": "PUT"}),
        rule("/match", ref("c"), match={"headers": [named("X-Who", "c"), named("x-who", "ignored")]}),
        rule("/match", ref("b"), match={"queryParams": [named("who", "b")]}),
        rule(
            "/match", ref("a"), match={"headers": [{"type": "RegularExpression", "name": "x-who", "value": "[0-9]+"}]}
        ),
    ]


def changing_rules() -> list[dict[str, Any]]:
    """Each with a filter."""
    headers = header_filter(
        "Request",
        set=[named("X-Set", "100%"), named("x-set", "ignored")],
        add=[named("x-add", "more")],
        remove=["x-gone"],
    )
    answers = header_filter("Response", set=[named("x-added", "set")], add=[named("x-new", "1")], remove=["x-removed"])
    return [
        rule("/headers", ref("a"), filters=[headers, answers]),
        rule("/headers/of-backend", ref("a", filters=[headers, answers])),
        rule("/rewrite/prefix", ref("a"), filters=[rewrite(path=to_path("ReplacePrefixMatch", "/new/"))]),
        rule("/rewrite/none/", ref("a"), filters=[rewrite(path=to_path("ReplacePrefixMatch", "/"))]),
        rule(
            "/rewrite/full", ref("a"), filters=[rewrite(hostname="new.test", path=to_path("ReplaceFullPath", "/all"))]
        ),
        rule("/mirror", ref("a"), filters=[mirror("b"), mirror("c", percent=0), mirror("nobody")]),
        rule("/mirror/half", ref("a"), filters=[mirror("c", fraction={"numerator": 1, "denominator": 2})]),
        rule("/retry", ref("a"), retry={"codes": [503], "attempts": 2, "backoff": "1ms"}),
        rule("/retry/other", ref("a"), retry={"codes": [500], "attempts": 2}),
        rule("/retry/slow", ref("slow"), retry={"attempts": 2}, timeouts={"backendRequest": "200ms"}),
        rule("/slow", ref("slow"), timeouts={"request": "300ms"}),
        rule("/slow/try", ref("slow"), timeouts={"request": "10s", "backendRequest": "300ms"}),
        rule("/slow/no-limit", ref("slow"), timeouts={"request": "0s"}),
        open_to_all("/cors-any"),
        open_to_all("/cors-any/with-credentials", allowCredentials=True),
        rule(
            "/cors",
            ref("a"),
            filters=[
                {
                    "type": "CORS",
                    "cors": {
                        "allowOrigins": ["https://app.test", "https://*.wide.test"],
                        "allowMethods": ["GET", "PUT"],
                        "allowHeaders": ["x-one"],
                        "exposeHeaders": ["x-two"],
                        "allowCredentials": True,
                        "maxAge": 60,
                    },
                }
            ],
        ),
    ]


def open_to_all(path: str, **more: object) -> dict[str, Any]:
    cors = {"allowOrigins": ["*"], "allowMethods": ["*"], "allowHeaders": ["*"], **more}
    return rule(path, ref("a"), filters=[{"type": "CORS", "cors": cors}])


def redirecting_rules() -> list[dict[str, Any]]:
    return [
        rule("/to/https", filters=[redirect(scheme="https", statusCode=301)]),
        rule("/to/host", filters=[redirect(hostname="new.test", statusCode=307)]),
        rule("/to/port", filters=[redirect(port=8443, statusCode=308)]),
        rule("/to/prefix", filters=[redirect(path=to_path("ReplacePrefixMatch", "/new"), statusCode=303)]),
        rule("/to/full", filters=[redirect(path=to_path("ReplaceFullPath", "/all"))]),
    ]


def backend_rules() -> list[dict[str, Any]]:
    return [
        rule("/weights", ref("a", weight=1), ref("b", weight=3), ref("c", weight=0)),
        rule("/half", ref("a"), ref("gone")),
        rule("/gone", ref("gone")),
        rule("/none"),
        rule("/zero", ref("a", weight=0)),
        rule("/empty", ref("nobody")),
        rule("/http2", ref("http2")),
        rule("/socket", ref("socket")),
        rule("/mixed", ref("a"), ref("llama", "ModelServer")),
        rule("/llama", ref("llama", "ModelServer"), filters=[rewrite(path=to_path("ReplacePrefixMatch", "/"))]),
        rule("/engines", ref("llama", "ModelServer")),
    ]


def documents(addresses: dict[str, str]) -> list[dict[str, Any]]:
    engines = [{"address": addresses[name]} for name in ("engine-1", "engine-2", "engine-3")]
    server = {"model": "engines-name", "scrapeInterval": "0s", "endpoints": engines}
    return [
        *(backend(name, addresses[name]) for name in ("a", "b", "c")),
        backend("slow", addresses["slow"]),
        backend("gone", unresolved=True),
        backend("nobody"),
        backend("http2", addresses["http2"], protocol="H2C"),
        backend("socket", addresses["a"], protocol="WebSocket"),
        document("ModelServer", "llama", server),
        document(
            "ModelRoute",
            "llama",
            {
                "modelName": "llama",
                "parentRefs": [{"name": "gateway", "sectionName": "main"}],
                "rules": [{"targetModels": [{"modelServerName": "llama"}]}],
            },
        ),
        document(
            "ModelRoute",
            "inside",
            {
                "modelName": "inside",
                "parentRefs": [{"name": "gateway", "sectionName": "inside"}],
                "rules": [{"targetModels": [{"modelServerName": "llama"}]}],
            },
        ),
        route("matching", *matching_rules(), sections=["main"]),
        route("changing", *changing_rules(), sections=["main"]),
        route("redirecting", *redirecting_rules(), sections=["main"]),
        route("backends", *backend_rules(), sections=["main"]),
        route("older", rule("/twice", ref("a")), sections=["main"], created="2025-01-01T00:00:00Z"),
        route("newer", rule("/twice", ref("b")), sections=["main"], created="2026-01-01T00:00:00Z"),
        route("wide", rule("/", ref("a")), sections=["wide"]),
        route("wide-one", rule("/", ref("b")), sections=["wide"], hostnames=["one.hosts.test", "two.hosts.test"]),
        route("one", rule("/one", ref("c")), sections=["one"]),
    ]


GATEWAY = {
    "servedHeader": "x-served-by",
    "accessLogFlush": "50ms",
    "listeners": [
        {"name": "main", "address": "main"},
        {"name": "wide", "address": "hosts", "hostname": "*.hosts.test"},
        {"name": "one", "address": "hosts", "hostname": "one.hosts.test"},
        {"name": "inside", "address": "inside", "hostname": "inside.test"},
    ],
}
PORTS = ("main", "hosts", "inside")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stand]:
    """Envoy with all of the routes above."""
    servers = Servers()
    await servers.start("a", "b", "c", "slow", "engine-1", "engine-2", "engine-3")
    http2 = await asyncio.start_server(answer_http2, "127.0.0.1", 0)
    servers.addresses["http2"] = f"127.0.0.1:{http2.sockets[0].getsockname()[1]}"
    async with stand(tmp_path_factory.mktemp("routes"), servers, documents(servers.addresses), GATEWAY, PORTS) as one:
        yield one
    http2.close()
    await servers.stop()


@pytest.mark.parametrize(
    ("path", "more", "server"),
    [
        ("/match", {}, "a"),
        ("/match/x?who=z", {}, "a"),
        ("/match/exact", {}, "b"),
        ("/match/exact/not", {}, "a"),
        ("/match/deep", {}, "b"),
        ("/match/deep/er", {}, "b"),
        ("/match/deeper", {}, "a"),
        ("/match", {"method": "PUT"}, "b"),
        ("/match", {"headers": {"x-who": "c"}}, "c"),
        ("/match?who=b", {}, "b"),
        ("/match?who=a&who=b", {}, "a"),
        ("/match", {"headers": {"x-who": "12"}}, "a"),
        ("/match", {"method": "PUT", "headers": {"x-who": "c"}}, "b"),
        ("/match?who=b", {"headers": {"x-who": "c"}}, "c"),
        ("/twice", {}, "a"),
    ],
)
async def test_the_most_specific_match_decides(gateway: Stand, path: str, more: dict[str, Any], server: str) -> None:
    assert (await gateway.served(path, **more)).server == server


@pytest.mark.parametrize("path", ["/matching", "/nothing", "/"])
async def test_what_no_route_matches_is_answered_404_in_openais_form(gateway: Stand, path: str) -> None:
    answer = await gateway.ask(path)

    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/headers", "/headers/of-backend"])
async def test_headers_of_requests_and_answers_are_changed(gateway: Stand, path: str) -> None:
    sent = {"x-set": "old", "x-add": "one", "x-gone": "1", "content-encoding": "mine"}
    answer = await gateway.ask(path, headers=sent)

    told = answer.json()["headers"]
    assert (told["x-set"], told["x-add"], told["content-encoding"]) == ("100%", "one,more", "mine")
    assert "x-gone" not in told
    assert answer.headers.get_list("x-added") == ["set"]
    assert answer.headers["x-new"] == "1"
    assert "x-removed" not in answer.headers


@pytest.mark.parametrize(
    ("path", "reached"),
    [
        ("/rewrite/prefix", "/new"),
        ("/rewrite/prefix/x/y?q=1", "/new/x/y?q=1"),
        ("/rewrite/none", "/"),
        ("/rewrite/none/", "/"),
        ("/rewrite/none/x?q=1", "/x?q=1"),
        ("/rewrite/full/x?q=1", "/all?q=1"),
    ],
)
async def test_paths_are_rewritten(gateway: Stand, path: str, reached: str) -> None:
    assert (await gateway.served(path)).path == reached


async def test_hosts_are_rewritten(gateway: Stand) -> None:
    assert (await gateway.served("/rewrite/full")).headers["host"] == "new.test"
    assert (await gateway.served("/rewrite/prefix")).headers["host"] == "any.test"


async def test_redirects(gateway: Stand) -> None:
    port = gateway.ports["main"]

    async def asked(path: str, host: str) -> tuple[int, str]:
        answer = await gateway.ask(path, host)
        return answer.status_code, answer.headers["location"]

    assert await asked("/to/https?q=1", f"any.test:{port}") == (301, "https://any.test:443/to/https?q=1")
    assert await asked("/to/host", "any.test") == (307, f"http://new.test:{port}/to/host")
    assert await asked("/to/port", "any.test:80") == (308, "http://any.test:8443/to/port")
    assert await asked("/to/prefix/x?q=1", "any.test") == (303, f"http://any.test:{port}/new/x?q=1")
    assert await asked("/to/full/x", f"any.test:{port}") == (302, f"http://any.test:{port}/all")


async def test_copies_go_to_all_mirrors_and_their_answers_to_nobody(gateway: Stand) -> None:
    gateway.servers.told.clear()

    for _ in range(20):
        assert (await gateway.served("/mirror", method="POST", content="body")).server == "a"
    for _ in range(60):
        await gateway.served("/mirror/half")
    await eventually(lambda: len(gateway.servers.got("b")) == 20 and len(gateway.servers.got("c")) >= 10)

    copies = gateway.servers.got("b")
    assert [(one.body, one.headers["host"], one.path) for one in copies] == [("body", "any.test", "/mirror")] * 20
    assert {one.path for one in gateway.servers.got("c")} == {"/mirror/half"}
    assert 10 <= len(gateway.servers.got("c")) <= 50


async def test_requests_are_tried_again_as_the_rule_says(gateway: Stand) -> None:
    async def asked(path: str, fails: int) -> tuple[int, int]:
        answer = await gateway.ask(path, headers={"x-fail-first": str(fails)})
        return answer.status_code, sum(1 for one in gateway.servers.told if one.path == path)

    assert await asked("/retry/x", fails=2) == (200, 3)
    assert await asked("/retry/y", fails=3) == (503, 3)
    assert await asked("/retry/other/code", fails=1) == (503, 1)
    assert await asked("/match/once", fails=1) == (503, 1)


async def test_a_try_that_takes_too_long_is_followed_by_another(gateway: Stand) -> None:
    gateway.servers.told.clear()

    answer = await gateway.ask("/retry/slow", headers={"x-delay": "0.6"})

    assert answer.status_code == 504
    # the server says so when it is done
    await eventually(lambda: len(gateway.servers.got("slow")) >= 2)


@pytest.mark.parametrize("path", ["/slow", "/slow/try"])
async def test_an_answer_that_takes_too_long_is_cut(gateway: Stand, path: str) -> None:
    answer = await gateway.ask(path, headers={"x-delay": "5"})

    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "timeout"


async def test_a_timeout_of_zero_is_none(gateway: Stand) -> None:
    assert (await gateway.ask("/slow/no-limit", headers={"x-delay": "0.6"})).status_code == 200


async def test_a_browser_is_told_which_origins_may_ask(gateway: Stand) -> None:
    asks = {"origin": "https://app.test", "access-control-request-method": "PUT"}
    wide = {**asks, "origin": "https://deep.er.wide.test"}
    other = {**asks, "origin": "https://app.test.evil"}

    allowed = await gateway.ask("/cors", method="OPTIONS", headers=asks)
    also = await gateway.ask("/cors", method="OPTIONS", headers=wide)
    refused = await gateway.ask("/cors", method="OPTIONS", headers=other)
    answer = await gateway.ask("/cors", headers={"origin": "https://app.test"})

    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://app.test"
    assert allowed.headers["access-control-allow-methods"] == "GET,PUT"
    assert allowed.headers["access-control-allow-headers"] == "x-one"
    assert allowed.headers["access-control-max-age"] == "60"
    assert also.headers["access-control-allow-origin"] == "https://deep.er.wide.test"
    assert "access-control-allow-origin" not in refused.headers
    assert answer.headers["access-control-allow-credentials"] == "true"
    assert answer.headers["access-control-expose-headers"] == "x-two"


@pytest.mark.parametrize("path", ["/cors-any", "/cors-any/with-credentials"])
async def test_a_star_allows_what_the_browser_asks_for(gateway: Stand, path: str) -> None:
    asks = {
        "origin": "https://other.test:8443",
        "access-control-request-method": "PUT",
        "access-control-request-headers": "x-one, x-two",
    }

    allowed = await gateway.ask(path, method="OPTIONS", headers=asks)
    answer = await gateway.ask(path, headers={"origin": "https://other.test"})

    told = {name: value for name, value in allowed.headers.items() if name.startswith("access-control")}
    with_credentials = {"access-control-allow-credentials": "true"} if path.endswith("credentials") else {}
    assert allowed.status_code == 200
    assert told == {
        "access-control-allow-origin": "https://other.test:8443",
        "access-control-allow-methods": "PUT",
        "access-control-allow-headers": "x-one, x-two",
        "access-control-max-age": "5",
        **with_credentials,
    }
    assert answer.headers["access-control-allow-origin"] == "https://other.test"


async def test_weights_are_shares(gateway: Stand) -> None:
    found = Counter([(await gateway.served("/weights")).server for _ in range(200)])

    assert set(found) == {"a", "b"}
    assert 110 <= found["b"] <= 185


async def test_the_share_of_a_backend_that_does_not_exist_is_answered_500(gateway: Stand) -> None:
    found = Counter([(await gateway.ask("/half")).status_code for _ in range(100)])

    assert set(found) == {200, 500}
    assert 25 <= found[500] <= 75


@pytest.mark.parametrize(("path", "status"), [("/gone", 500), ("/none", 500), ("/zero", 500), ("/empty", 503)])
async def test_without_a_backend_the_gateway_says_so(gateway: Stand, path: str, status: int) -> None:
    answer = await gateway.ask(path)

    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_http2_without_tls(gateway: Stand) -> None:
    assert (await gateway.ask("/http2")).headers["x-server"] == "http2"


async def test_connections_can_be_upgraded_where_the_backend_says_so(gateway: Stand) -> None:
    url = f"http://127.0.0.1:{gateway.ports['main']}"
    async with aiohttp.ClientSession() as http:
        async with http.ws_connect(f"{url}/socket") as socket:
            await socket.send_str("hello")
            assert (await socket.receive_str()) == "a:hello"
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await http.ws_connect(f"{url}/match")


async def test_a_host_belongs_to_the_most_specific_listener(gateway: Stand) -> None:
    async def asked(path: str, host: str) -> str:
        answer = await gateway.ask(path, host, port="hosts")
        return answer.headers["x-server"] if answer.status_code == 200 else str(answer.status_code)

    assert await asked("/x", "three.hosts.test") == "a"
    assert await asked("/x", "deep.er.hosts.test") == "a"
    assert await asked("/x", "two.hosts.test") == "b"
    assert await asked("/x", "TWO.hosts.test:8080") == "b"
    # routes of the wide listener do not reach the narrow one's host
    assert await asked("/x", "one.hosts.test") == "404"
    assert await asked("/one", "one.hosts.test") == "c"
    assert await asked("/one", "one.hosts.test:1234") == "c"
    assert await asked("/x", "hosts.test") == "404"
    assert await asked("/x", "other.test") == "404"


async def test_each_listener_serves_its_own_models(gateway: Stand) -> None:
    async def listed(**more: str) -> list[str]:
        return [one["id"] for one in (await gateway.ask("/v1/models", **more)).json()["data"]]

    async def status(model: str, **more: str) -> int:
        return (await gateway.ask(CHAT, method="POST", content=chat("hello", model), **more)).status_code

    assert await listed() == ["llama"]
    assert await listed(port="inside", host="inside.test") == ["inside"]
    assert [await status("llama"), await status("inside")] == [200, 404]
    assert await status("inside", port="inside", host="inside.test") == 200
    assert await status("llama", port="inside", host="inside.test") == 404
    # a host that no listener has, and one whose listener has no models
    assert await status("inside", port="inside", host="other.test") == 404
    assert (await gateway.ask("/v1/models", "one.hosts.test", port="hosts")).status_code == 404


async def metric(gateway: Stand, name: str) -> float:
    lines = (await gateway.http.get(f"{gateway.metrics}/metrics")).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


async def test_engines_of_a_chosen_server_are_picked_by_prefix(gateway: Stand) -> None:
    prompts = [f"{number} " + f"words of {number} " * 400 for number in range(6)]

    served = [
        [(await gateway.served("/llama" + CHAT, method="POST", content=chat(text))).server for _ in range(4)]
        for text in prompts
    ]

    assert all(len(set(one)) == 1 for one in served), served
    assert len({one[0] for one in served}) > 1


async def test_a_chosen_servers_engine_gets_the_clients_model_and_the_rewritten_path(gateway: Stand) -> None:
    told = await gateway.served("/llama" + CHAT, method="POST", content=chat("hello", "whatever"))

    assert told.path == CHAT
    assert '"whatever"' in told.body
    assert told.server.startswith("engine")


async def test_backends_may_compress_and_engines_may_not(gateway: Stand) -> None:
    headers = {"accept-encoding": "gzip"}
    of_engine = await gateway.served("/llama" + CHAT, method="POST", content=chat("hello"), headers=headers)
    of_backend = await gateway.served("/match", headers=headers)

    assert "accept-encoding" not in of_engine.headers
    assert of_backend.headers["accept-encoding"] == "gzip"


async def test_what_is_no_inference_is_picked_for_too(gateway: Stand) -> None:
    before = await metric(gateway, "attache_requests_total")

    got = await gateway.ask("/engines/metrics?x=1")
    posted = await gateway.ask("/engines/anything", method="POST", content=b"\xff\x00 no JSON")
    broken = await gateway.ask("/llama" + CHAT, method="POST", content="{")

    assert [one.status_code for one in (got, posted, broken)] == [200, 200, 200]
    assert got.json()["path"] == "/engines/metrics?x=1"
    assert got.headers["x-served-by"] in gateway.servers.addresses.values()
    assert await metric(gateway, "attache_requests_total") == before + 3


async def streams(gateway: Stand) -> float:
    """How many streams extproc has had, once all have ended: they do after their answers."""

    async def have_ended() -> bool:
        return not await metric(gateway, "attache_open_streams")

    await eventually(have_ended)
    return await metric(gateway, "attache_stream_seconds_count")


async def test_extproc_has_no_part_in_requests_to_backends(gateway: Stand) -> None:
    before = await streams(gateway)

    told = await gateway.served("/match", method="POST", content=chat("hello", "llama"))
    await gateway.ask("/to/host")
    await gateway.ask("/gone")
    await gateway.ask("/x", "other.test", port="hosts")
    await gateway.served("/engines/one-that-counts")

    assert told.server == "a"
    assert await streams(gateway) == before + 1


async def test_a_rule_may_share_requests_between_engines_and_other_servers(gateway: Stand) -> None:
    found = Counter(
        [(await gateway.served("/mixed", method="POST", content="x")).server.partition("-")[0] for _ in range(60)]
    )

    assert set(found) == {"a", "engine"}


async def test_clients_cannot_choose_servers_or_listeners_by_headers(gateway: Stand) -> None:
    forged = {
        "x-attache-server-key": "default/llama",
        "x-attache-server": "default/llama",
        "x-attache-listener": "inside",
        "x-attache-bundle": "1",
        "x-gateway-destination-endpoint": gateway.servers.addresses["c"],
        "x-envoy-upstream-rq-timeout-ms": "1",
    }

    told = await gateway.served("/match", headers=forged)
    answer = await gateway.ask(CHAT, method="POST", content=chat("hello", "inside"), headers=forged)
    nothing = await gateway.ask("/nothing", headers=forged)

    assert told.server == "a"
    assert not [name for name in told.headers if name.startswith(("x-attache", "x-gateway", "x-envoy-upstream"))]
    assert [answer.status_code, nothing.status_code] == [404, 404]


@pytest.mark.parametrize(
    "path", ["/match/%2Fdeep", "/match%2fexact", "/nothing/..%2fmatch", "/match/%5c..", "/nothing/%2e%2e%2fmatch"]
)
async def test_escaped_slashes_are_refused(gateway: Stand, path: str) -> None:
    assert (await raw(gateway, path)).startswith("HTTP/1.1 400")


@pytest.mark.parametrize(
    ("path", "server"),
    [("/nothing/../match/exact", "b"), ("//match//exact", "b"), ("/match/./deep/", "b"), ("/match/%65xact", "b")],
)
async def test_paths_are_compared_as_servers_read_them(gateway: Stand, path: str, server: str) -> None:
    answer = await raw(gateway, path)

    assert answer.startswith("HTTP/1.1 200"), answer
    assert f"x-server: {server}" in answer


@pytest.mark.parametrize(
    "host", ["", "*", "*.hosts.test", ".hosts.test", "a" * 4000, "one.hosts.test:99999999", "[::1]:80", "a@b", "%00"]
)
async def test_absurd_hosts_are_refused_or_belong_to_nobody(gateway: Stand, host: str) -> None:
    status = (await raw(gateway, "/one", host, port="hosts")).split(" ")[1]

    assert status in {"400", "404", "431"} or host in {"*.hosts.test", ".hosts.test", "one.hosts.test:99999999"}
    assert (await gateway.ask("/one", "one.hosts.test", port="hosts")).status_code == 200


async def raw(gateway: Stand, path: str, host: str = "any.test", port: str = "main") -> str:
    """The head of an answer to a request that no client library would send. Envoy closes a second after it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.ports[port])
    writer.write(f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 120)
    writer.close()
    return answer.decode("latin-1")

# SPDX-License-Identifier: Apache-2.0
"""An Envoy whose extproc is not there routes by the model that engines read, and serves nothing else."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any, Final

import httpx
import msgspec
import pytest
import pytest_asyncio
import yaml
from aiohttp import web

from bench.stack.loopback_stack import envoy_command
from bench.stack.processes import Processes, free_ports
from controller.bundle.sync import write_bundle_once
from extproc.api.config_loader import load_directory
from extproc.api.spec import API_VERSION
from extproc.wire_names import APIS_BY_PATH
from tests.fuzz.mutants import content_of
from tests.waiting import until_served
from tests.with_envoy.trailers import with_trailers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT: Final = "/v1/chat/completions"
MESSAGES: Final = "/v1/messages"
COUNT: Final = "/v1/messages/count_tokens"
GENERATE: Final = "/inference/v1/generate"
PATHS: Final = tuple(path for path, api in APIS_BY_PATH.items() if api.spec.body == "json")
# what the engines of the two servers call their model
ONE, TWO = "engines/one", 'engines/"zwei" \\ é'
STEERING: Final = ("kv_transfer_params", "bootstrap_host", "data_parallel_rank", "lora_path")


class Told(msgspec.Struct, frozen=True):
    """What reached an engine, and which one."""

    server: str
    body: bytes

    def pairs(self) -> list[tuple[str, Any]]:
        """As an engine reads it, but with every repetition."""
        found: list[tuple[str, Any]] = json.loads(self.body, object_pairs_hook=list)
        return found


class Gateway(msgspec.Struct, frozen=True):
    """Envoy, and what its engines were asked."""

    http: httpx.AsyncClient
    told: list[Told]

    async def post(self, content: bytes | str, path: str = CHAT, **headers: str) -> httpx.Response:
        """The answer; ``told`` has what reached an engine, if anything did."""
        self.told.clear()
        sent = content if isinstance(content, bytes) else content.encode()
        return await self.http.post(path, content=sent, headers=headers)

    async def served(self, content: bytes | str, path: str = CHAT, **headers: str) -> Told:
        """What reached the engine, of a request that must be served."""
        answer = await self.post(content, path, **headers)
        assert answer.status_code == 200, answer.text
        (told,) = self.told
        return told

    async def refused(self, content: bytes | str, status: int, path: str = CHAT) -> dict[str, Any]:
        """The error object of a request that must reach no engine."""
        answer = await self.post(content, path)
        assert answer.status_code == status, answer.text
        assert self.told == []
        assert answer.headers["content-type"] == "application/json"
        error: dict[str, Any] = answer.json()["error"]
        if path.startswith(MESSAGES):
            assert answer.json()["type"] == "error"
            assert set(error) == {"message", "type"}
        else:
            assert set(error) == {"message", "type", "param", "code"}
        return error


def documents(addresses: Mapping[str, str], gateway: Mapping[str, object]) -> str:
    """Two servers, whose engines are strangers to each other's model, and what routes to them."""

    def document(kind: str, name: str, spec: Mapping[str, object]) -> dict[str, object]:
        return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}

    def to(*servers: str, **more: object) -> dict[str, object]:
        return {"targetModels": [{"modelServerName": one} for one in servers], **more}

    testers = to("two", modelMatch={"headers": {"X-Tester": {"exact": "yes"}}})
    embeddings = to("two", modelMatch={"uri": {"prefix": "/v1/embeddings"}})
    models = {"one": ONE, "two": TWO}
    open_fields = {"two": ["priority", "data_parallel_rank"]}
    servers = [
        document(
            "ModelServer",
            name,
            {
                "model": models[name],
                "endpoints": [{"address": address}],
                "allowedFields": open_fields.get(name, []),
            },
        )
        for name, address in addresses.items()
    ]
    routes = [
        document("ModelRoute", "chat", {"modelName": "chat", "loraAdapters": ["sql"], "rules": [testers, to("one")]}),
        document("ModelRoute", "by-path", {"modelName": "by/path", "rules": [embeddings]}),
        document(
            "ModelRoute", "mixed", {"modelName": "混合 😀", "loraAdapters": ["mixed"], "rules": [to("one", "two")]}
        ),
    ]
    return yaml.safe_dump_all([*servers, *routes, document("GatewayConfig", "gateway", gateway)])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """Envoy alone, in mode Open."""
    directory = tmp_path_factory.mktemp("alone")
    told: list[Told] = []
    runners, addresses = [], {}
    for name in ("one", "two"):

        async def tell(request: web.Request, name: str = name) -> web.Response:
            told.append(Told(name, await request.read()))
            return web.json_response({})

        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.add_routes([web.post("/{path:.*}", tell)])
        runner = web.AppRunner(app, access_log=None)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        addresses[name] = f"127.0.0.1:{runner.addresses[0][1]}"
    listen, admin, extproc = free_ports(3)
    configured = {"listen": f"127.0.0.1:{listen}", "admin": f"127.0.0.1:{admin}", "extproc": f"127.0.0.1:{extproc}"}
    config, bundle = directory / "config", directory / "envoy"
    config.mkdir()
    (config / "a.yaml").write_text(documents(addresses, configured))
    write_bundle_once(load_directory(config), bundle, str(bundle))
    async with (
        Processes(directory) as processes,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{listen}", timeout=60) as http,
    ):
        await processes.start("envoy", envoy_command(bundle))

        await until_served(http)
        yield Gateway(http, told)
    for runner in runners:
        await runner.cleanup()


def names(told: Told) -> list[str]:
    return [name for name, _ in told.pairs()]


async def test_forms_wait_for_extproc(gateway: Gateway) -> None:
    """Envoy alone does not find the model in them."""
    for path, api in APIS_BY_PATH.items():
        if api.spec.body == "form":
            content, _ = content_of(api, {"model": "chat", **api.spec.example})
            error = await gateway.refused(content, 503, path)
            assert error["code"] == "no_picker"
            assert "JSON" in error["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "content",
    [
        '{"model": "chat", "messages": [], "model": "by/path"}',
        '{"model": "chat", "model": "chat"}',
        '{"model": "by/path", "m\\u006fdel": "chat"}',
        '{"\\u006dodel": "chat"}',
        '{"model": "chat", "\\u006bv_transfer_params": {}}',
        '{"priority": 1, "model": "chat", "priority": 2}',
    ],
)
async def test_names_that_two_readers_understand_differently_are_refused(
    gateway: Gateway, path: str, content: str
) -> None:
    assert (await gateway.refused(content, 400, path))["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        b"[]",
        b'"chat"',
        b'[{"model": "chat"}]',
        b"{",
        b"{}",
        b'{"messages": []}',
        b'{"model": 7}',
        b'{"model": ""}',
        b'{"model": ["chat"]}',
        b'{"nested": {"model": "chat"}}',
        b'{"model": "chat"',
        b'{"model": "chat",}',
        b'{"model": "chat"}}',
        b'{"model": "chat"} {"model": "by/path"}',
        b'{"model": "chat" "messages": []}',
        b'{"model" "chat"}',
        b'{"model": "chat", "messages": [}',
        b'{"model": "chat", "text": "open}',
        b'{"model": "ch\\at"}',
        b'{"model": "ch\\u00at"}',
        b"{'model': 'chat'}",
        b'{model: "chat"}',
        b'{/* "a": 1, */ "model": "chat"}',
        b'\xef\xbb\xbf{"model": "chat"}',
        '{"model": "chat"}'.encode("utf-16"),
        '{"model": "chat"}'.encode("utf-16-be"),
        '{"model": "chat"}'.encode("utf-32-le"),
        b'\x1f\x8b\x08{"model": "chat"}',
        b'{"model": "chat", ' + b", ".join(b'"f%d": 0' % number for number in range(1000)) + b"}",
    ],
)
async def test_what_is_no_request_is_refused(gateway: Gateway, content: bytes) -> None:
    assert (await gateway.refused(content, 400))["type"] == "invalid_request_error"


@pytest.mark.parametrize("content_type", ["application/json", "text/plain; charset=utf-16", "", "multipart/form-data"])
async def test_what_a_body_claims_to_be_changes_nothing(gateway: Gateway, content_type: str) -> None:
    told = await gateway.served('{"model": "chat"}', **{"content-type": content_type})
    assert json.loads(told.body) == {"model": ONE}
    await gateway.post('{"model": "chat", "model": "sql"}', **{"content-type": content_type})
    assert gateway.told == []


@pytest.mark.parametrize("name", ["unknown", "engines/one", "Chat", "chat ", "x" * 5000, "混合"])
async def test_a_model_that_no_route_names_is_unknown(gateway: Gateway, name: str) -> None:
    for escaped in (False, True):
        error = await gateway.refused(json.dumps({"model": name}, ensure_ascii=escaped), 404)
        assert error["code"] == "model_not_found"


async def test_a_route_whose_rules_take_other_paths_serves_none_else(gateway: Gateway) -> None:
    assert (await gateway.served('{"model": "by/path"}', "/v1/embeddings")).server == "two"
    assert (await gateway.served('{"model": "by\\/path"}', "/v1/embeddings?a=b")).server == "two"
    assert (await gateway.refused('{"model": "by/path"}', 404))["code"] == "model_not_found"


@pytest.mark.parametrize(
    "path", ["/v1/messages/batches", "/v1/audio/translations", "/v1/models", "/v1/load_lora_adapter", "/"]
)
async def test_other_paths_are_not_served(gateway: Gateway, path: str) -> None:
    assert (await gateway.post('{"model": "chat"}', path)).status_code == 404
    assert gateway.told == []


@pytest.mark.parametrize("path", PATHS)
async def test_the_model_is_renamed_and_all_else_stays_byte_for_byte(gateway: Gateway, path: str) -> None:
    values = [
        b'"seed":  9007199254740993',
        b'"big":123456789012345678901234567890',
        b'"small" : 1e-400',
        b'"float":1.10',
        b'"text":"a \\"model\\": \\u00e9 \\\\"',
        b'"deep": {"model": "by/path", "n": [[{"model": "sql"}, "]}"], {}]}',
        '"größe": "模型 😀"'.encode(),
        b'"null":null',
        b'"x\x7fy": NaN',
        b'"empty": ""',
    ]
    rng = random.Random(path)
    for _ in range(20):
        rng.shuffle(values)
        position = rng.randrange(len(values) + 1)
        members = [*values[:position], b'"model"\n:\t"chat"', *values[position:]]
        told = await gateway.served(b" \r\n{ " + b"\n , ".join(members) + b"\n}\t\n", path)
        assert told.server == "one"
        for value in values:
            assert value in told.body
        assert names(told).count("model") == 1
        assert dict(told.pairs())["model"] == ONE


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_errors_of_the_messages_api_have_its_form(gateway: Gateway, path: str) -> None:
    assert (await gateway.refused('{"model": "unknown"}', 404, path))["type"] == "not_found_error"
    refused = await gateway.refused('{"model": "chat", "kv_transfer_params": {}}', 400, path)
    assert refused["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", ["extra_args", "\\u0065xtra_args"])
async def test_what_cannot_be_read_out_of_sampling_parameters_is_refused(gateway: Gateway, name: str) -> None:
    """Engines obey ``kv_transfer_params`` there, too, and only extproc looks so deep."""

    def asked(sampling: str) -> str:
        return '{"model": "chat", "token_ids": [1], "sampling_params": {' + sampling + "}}"

    hidden = f'"n": 1, "{name}": {{"kv_transfer_params": {{"remote_host": "10.0.0.1"}}}}'
    assert (await gateway.refused(asked(hidden), 503, GENERATE))["type"] == "service_unavailable_error"
    assert (await gateway.served(asked('"stop": ["\\n"]'), GENERATE)).server == "one"


@pytest.mark.parametrize("name", ["kv_transfer_params", "data_parallel_rank", "\\u006bv_transfer_params"])
async def test_what_steers_engines_in_vllms_own_arguments_is_refused(gateway: Gateway, name: str) -> None:
    def asked(arguments: str) -> str:
        return '{"model": "chat", "messages": [], "vllm_xargs": {' + arguments + "}}"

    assert (await gateway.refused(asked(f'"{name}": "a"'), 503))["type"] == "service_unavailable_error"
    assert (await gateway.served(asked('"ngram_size": 30'))).server == "one"


async def test_a_header_decides_between_servers_with_names_of_their_own(gateway: Gateway) -> None:
    told = await gateway.served('{"model": "chat", "n": 1}', **{"x-tester": "yes"})
    assert told.server == "two"
    assert told.pairs() == [("model", TWO), ("n", 1)]
    assert (await gateway.served('{"model": "chat"}', **{"x-tester": "no"})).server == "one"


async def test_an_adapter_keeps_its_name_and_its_body(gateway: Gateway) -> None:
    content = b'{"stream" : false, "model": "sql", "seed": 9007199254740993 }'
    told = await gateway.served(content)
    assert (told.server, told.body) == ("one", content)


@pytest.mark.parametrize("model", ["混合 😀", "mixed"])
async def test_weights_choose_servers_and_the_name_goes_with_the_server(gateway: Gateway, model: str) -> None:
    known = {"one": ONE, "two": TWO}
    seen = set()
    for number in range(40):
        told = await gateway.served(json.dumps({"model": model}, ensure_ascii=number % 2 == 0))
        seen.add(told.server)
        assert told.pairs() == [("model", "mixed" if model == "mixed" else known[told.server])]
    assert seen == {"one", "two"}


@pytest.mark.parametrize("name", STEERING)
@pytest.mark.parametrize("model", ["chat", "sql"])
async def test_a_client_cannot_say_where_engines_connect(gateway: Gateway, name: str, model: str) -> None:
    error = await gateway.refused(json.dumps({"model": model, name: "10.0.0.9"}), 400)
    assert error["param"] == name


@pytest.mark.parametrize("model", ["chat", "sql"])
@pytest.mark.parametrize(
    "content",
    [
        '{"priority": -5, "model": "%s", "cache_salt": "mine", "n": 1}',
        '{"model": "%s", "n": 1, "priority": -5, "cache_salt": "mine"}',
        '{"priority": {"a": [1, "}"]}, "rid": "r", "model": "%s", "n": 1, "request_id": null}',
    ],
)
async def test_what_gateways_set_is_removed(gateway: Gateway, model: str, content: str) -> None:
    told = await gateway.served(content % model)
    assert told.pairs() == [("model", ONE if model == "chat" else "sql"), ("n", 1)]


async def test_a_server_that_allows_fields_gets_them(gateway: Gateway) -> None:
    content = '{"model": "%s", "priority": 3, "data_parallel_rank": 1, "rid": "r"}'
    for model in ("chat", "sql"):
        told = await gateway.served(content % model, **{"x-tester": "yes"})
        assert told.pairs()[1:] == [("priority", 3), ("data_parallel_rank", 1)]


async def test_a_body_in_chunks_is_served(gateway: Gateway) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for piece in (b'{"mod', b'el": "ch', b'at", "n"', b": 1}"):
            yield piece

    gateway.told.clear()
    answer = await gateway.http.post(CHAT, content=parts())
    assert answer.status_code == 200
    assert gateway.told[0].pairs() == [("model", ONE), ("n", 1)]


async def test_a_trailer_behind_the_body_gets_round_nothing(gateway: Gateway) -> None:
    async def send(content: bytes) -> int:
        gateway.told.clear()
        return (await with_trailers(f"{gateway.http.base_url}".rstrip("/") + CHAT, content, {}))[0]

    assert await send(b'{"model": "chat", "n": 1}') == 200
    (told,) = gateway.told
    assert (told.server, told.pairs()) == ("one", [("model", ONE), ("n", 1)])
    for content in (
        b'{"model": "chat", "model": "sql"}',
        b'{"model": "unknown"}',
        b'{"model": "chat", "rid": 1, "kv_transfer_params": 1}',
    ):
        assert await send(content) in {400, 404}
        assert gateway.told == []


LARGE: Final = 15 * 1024 * 1024


@pytest.mark.parametrize(
    "value",
    [
        '"' + "word " * (LARGE // 5) + '"',
        "[" + "1234," * (LARGE // 5) + "0]",
        '"' + "\\u6a21" * (LARGE // 6) + '"',
        "[" + '{"role": "user", "content": "hello, hello, hello"},' * 50_000 + "{}]",
    ],
    ids=["text", "token ids", "escapes", "messages"],
)
async def test_long_prompts_are_served(gateway: Gateway, value: str) -> None:
    told = await gateway.served('{"prompt": ' + value + ', "model": "chat"}', "/v1/completions")
    assert len(told.body) > len(value)
    assert told.body.endswith(b',"model":"engines/one"}')


@pytest.mark.parametrize(
    "value",
    [
        "[" * LARGE,
        "[]," * (LARGE // 3),
        '"' + '\\"' * (LARGE // 2) + '"',
        '"",' * (LARGE // 3),
        '"' + "\\" * LARGE + '"',
    ],
    ids=["nested", "lists", "escaped quotes", "strings", "backslashes"],
)
async def test_bodies_that_would_take_long_to_read_are_refused(gateway: Gateway, value: str) -> None:
    error = await gateway.refused('{"model": "chat", "prompt": [' + value + "0]}", 503, "/v1/completions")
    assert error["type"] == "service_unavailable_error"


async def test_many_members_with_a_long_text_behind_them_are_read_once(gateway: Gateway) -> None:
    members = ", ".join(f'"f{number}": [{{}}]' for number in range(900))
    told = await gateway.served('{"model": "chat", ' + members + ', "prompt": "' + "x" * LARGE + '"}')
    assert dict(told.pairs())["model"] == ONE


def plain_model(content: bytes) -> str | None:
    """What every reader finds; None if some would not, or would find something else."""
    try:
        text = content.decode()
        pairs = json.loads(text, object_pairs_hook=tuple)
    except (ValueError, RecursionError):
        return None
    if not text.lstrip(" \t\r\n").startswith("{"):
        return None
    found = [value for name, value in pairs if name == "model"]
    model = found[0] if len(found) == 1 else None
    return model if isinstance(model, str) else None


def a_body(rng: random.Random) -> bytes:
    """A request with mistakes and tricks at random."""
    keys = ['"n"', '"x"', '"y"', '"model"', '"m\\u006fdel"', '"a\\"model"', '"model\\\\"', '"rid"', '"messages"', '""']
    values = ['"chat"', '"sql"', '"by\\/path"', "1", "[]", '{"model": "sql"}', '"}"', '"\\""', "[{}]", '"\\\\"', "null"]
    members = [f"{rng.choice(keys)}:{rng.choice(values)}" for _ in range(rng.randrange(1, 5))]
    text = "{" + ",".join([*members, *rng.choice([['"model":"chat"'], ['"model":"sql"']])]) + "}"
    content = bytearray(text.encode())
    for _ in range(rng.choice([0, 0, 1, 2])):
        at = rng.randrange(len(content))
        match rng.randrange(3):
            case 0:
                del content[at]
            case 1:
                content.insert(at, rng.choice(b'{}[]",:\\ \x00m\xff'))
            case _:
                content[at] = rng.choice(b'{}[]",:\\ \n0')
    return bytes(content)


async def test_whatever_is_served_is_what_was_routed(gateway: Gateway) -> None:
    rng = random.Random(7)
    served = 0
    for _ in range(800):
        content = a_body(rng)
        answer = await gateway.post(content)
        assert answer.status_code in {200, 400, 404}, content
        if answer.status_code == 200:
            served += 1
            (told,) = gateway.told
            asked = plain_model(content)
            # an engine refuses what is no JSON; all else must be what was asked for
            if asked is not None:
                assert plain_model(told.body) == {"chat": ONE, "sql": "sql"}[asked], content
            assert plain_model(told.body) in {ONE, "sql", None}, content
        else:
            assert gateway.told == []
            assert set(answer.json()) == {"error"}
    assert served > 100

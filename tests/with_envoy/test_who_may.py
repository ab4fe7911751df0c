# SPDX-License-Identifier: Apache-2.0
"""Who may use which models, through a real Envoy: every kind of credential, and every way to ask for another's
model.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import pytest_asyncio
import yaml

from bench.stack.loopback_stack import ALIAS, MODEL, EngineFlags, Stack, running_stack
from bench.stack.processes import free_ports
from tests.certificates import Authority, client_context
from tests.waiting import eventually
from tests.with_envoy.issuer import AUDIENCE, ISSUER, Issuer, SigningKey
from tests.with_envoy.test_admission import edit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

UNVOUCHED = "https://unvouched.example"
CHAT = "/v1/chat/completions"
# By caller, its API key.
KEYS = {"acme": "sk-acme-0123", "root": "sk-root-0123", "nobody": "sk-nobody-0123"}
# What a token says of each caller beyond its tenant.
CLAIMS: Mapping[str, Mapping[str, object]] = {
    "acme": {"groups": ["ml", "ops"]},
    "root": {"groups": "admins"},
    "nobody": {},
}


def document(kind: str, name: str, spec: Mapping[str, object]) -> dict[str, object]:
    return {"apiVersion": "attache.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def models(large: str, policy: Mapping[str, object]) -> str:
    """A second server, models that come to it by name, header, path and weight, and who may use what."""

    def targets(*servers: str) -> dict[str, object]:
        return {"targetModels": [{"modelServerName": one} for one in servers]}

    rules = [
        {"modelMatch": {"headers": {"x-tier": {"exact": "gold"}}}, **targets("large")},
        {"modelMatch": {"uri": {"exact": "/v1/completions"}}, **targets("large")},
        targets("llama"),
    ]
    return yaml.safe_dump_all(
        [
            document("ModelServer", "large", {"model": MODEL, "endpoints": [{"address": large}]}),
            document("ModelRoute", "secret", {"modelName": "secret", "rules": [targets("large")]}),
            document("ModelRoute", "tiered", {"modelName": "tiered", "rules": rules}),
            document("ModelRoute", "canary", {"modelName": "canary", "rules": [targets("llama", "large")]}),
            document("ModelAccessPolicy", "models", policy),
        ]
    )


def policy_for(identity: str) -> dict[str, object]:
    """Acme may use some models on the small server, and root everything."""
    who = {
        "key": {"acme": {"tenants": ["acme"]}, "root": {"apiKeys": ["root"]}},
        "certificate": {"acme": {"tenants": ["acme"], "users": ["alice"]}, "root": {"tenants": ["root"]}},
        "token": {
            "acme": {"tenants": ["acme"], "users": ["alice"], "claims": [{"name": "groups", "values": ["ml"]}]},
            "root": {"claims": [{"name": "groups", "values": ["admins"]}]},
        },
    }[identity]
    allowed = {"models": [ALIAS, "s*", "tiered", "canary"], "servers": ["default/llama"]}
    return {
        "rules": [
            {"from": [who["acme"]], **allowed},
            {"from": [who["acme"]], "action": "Deny", "models": ["secret"]},
            {"from": [who["root"]]},
        ]
    }


class Callers:
    """A stack, its callers, each with a client of its own, and where its two servers are."""

    def __init__(self, stack: Stack, callers: Mapping[str, httpx.AsyncClient]) -> None:
        self.stack = stack
        self.callers = callers
        self.small, self.large = (url.removeprefix("http://") for url in stack.engines)

    async def close(self) -> None:
        for one in self.callers.values():
            await one.aclose()

    async def ask(
        self,
        caller: str,
        model: str = ALIAS,
        path: str = CHAT,
        *,
        content: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        prompt: dict[str, object] = {"messages": [{"role": "user", "content": "hello"}]}
        if path.startswith("/v1/completions"):
            prompt = {"prompt": "hello"}
        text = json.dumps({"model": model, "max_tokens": 1, **prompt}) if content is None else content
        return await self.callers[caller].post(path, content=text, headers=headers)

    async def get(self, caller: str, path: str) -> httpx.Response:
        return await self.callers[caller].get(path)


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Issuer]:
    """It is there."""
    one = Issuer(tmp_path_factory.mktemp("issuer"))
    one.start()
    yield one
    one.stop()


class Certificates:
    """A listener that asks for certificates, and those of its clients."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._servers, self._clients = Authority("servers"), Authority("clients")
        (self._port,) = free_ports(1)

    def listener(self) -> dict[str, object]:
        authorities = self._folder / "clients.pem"
        authorities.write_bytes(self._clients.cert)
        shown = self._servers.issue(ips=["127.0.0.1"]).write(self._folder, "server")
        tls = {"certificates": [shown], "clientCertificates": {"caFile": str(authorities)}}
        return {"name": "https", "address": f"127.0.0.1:{self._port}", "tls": tls}

    def client(self, tenant: str) -> httpx.AsyncClient:
        pair = self._clients.issue(uris=[f"spiffe://example.com/{tenant}/alice"])
        context = client_context(self._servers, pair, self._folder)
        return httpx.AsyncClient(base_url=f"https://127.0.0.1:{self._port}", verify=context, timeout=30)


def authentication(identity: str, issuer: Issuer) -> dict[str, object]:
    if identity == "certificate":
        names = {"name": "spiffe", "field": "URI", "pattern": "spiffe://example.com/{tenant}/{user}"}
        return {"clientCertificates": [names]}
    if identity == "key":
        return {"apiKeys": [{"name": name, "key": key, "tenant": name} for name, key in KEYS.items()]}
    remote = {"uri": issuer.uri, "caFile": str(issuer.ca_file), "cacheDuration": "1s", "timeout": "2s"}
    return {"jwt": [{"name": "login", "issuer": ISSUER, "audiences": [AUDIENCE], "remoteJwks": remote}]}


def credentials(identity: str, issuer: Issuer) -> dict[str, dict[str, str]]:
    """By caller, the headers that say who it is."""
    if identity == "key":
        return {name: {"authorization": f"Bearer {key}"} for name, key in KEYS.items()}
    return {
        name: {"authorization": f"Bearer {issuer.key.token(tenant=name, **claims)}"} for name, claims in CLAIMS.items()
    }


def clients(url: str, headers: Mapping[str, dict[str, str]]) -> dict[str, httpx.AsyncClient]:
    """A client for each caller, by what it sends."""
    return {name: httpx.AsyncClient(base_url=url, headers=one, timeout=30) for name, one in headers.items()}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["key", "token", "certificate"])
async def scene(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, issuer: Issuer
) -> AsyncIterator[Callers]:
    """Two engines, a server on each, and a policy for callers with keys, with tokens or with certificates."""
    identity: str = request.param
    folder = tmp_path_factory.mktemp(identity)
    shows_certificates = identity == "certificate"
    # the listener that asks for certificates comes later: whether the stack is up, is asked without one
    given = {} if shows_certificates else {"authentication": authentication(identity, issuer)}
    sent = {} if shows_certificates else credentials(identity, issuer)
    async with running_stack(
        folder / "stack",
        EngineFlags(count=2, speed=20.0, adapters=("sql", "law")),
        gateway={**given, "servedHeader": "x-served"},
        headers=sent.get("root"),
        watch=True,
    ) as stack:
        if shows_certificates:
            certificates = Certificates(folder)
            more = {"listeners": [certificates.listener()], "authentication": authentication(identity, issuer)}
            edit(stack, "GatewayConfig", **more)
            one = Callers(stack, {name: certificates.client(name) for name in KEYS})
        else:
            one = Callers(stack, clients(stack.url, sent))
        # of the small server's two addresses nobody listens on the first: requests fall back to the second
        (dead,) = free_ports(1)
        edit(stack, "ModelServer", endpoints=[{"address": f"127.0.0.1:{dead}"}, {"address": one.small}])
        new = stack.config / "models.new"
        new.write_text(models(one.large, policy_for(identity)))
        new.rename(stack.config / "models.yaml")

        async def is_followed() -> bool:
            try:
                served, refused = await one.ask("root", "secret"), await one.ask("nobody")
            except httpx.ConnectError:
                return False
            return (served.status_code, refused.status_code) == (200, 403)

        await eventually(is_followed)
        yield one
        await one.close()


def is_refused(answer: httpx.Response) -> bool:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return (answer.status_code, error["code"]) == (403, "model_not_allowed")


@pytest.mark.parametrize("model", [ALIAS, "sql", "tiered", "canary"])
async def test_what_is_allowed_is_served_by_the_server_that_is_allowed(scene: Callers, model: str) -> None:
    for _ in range(4):
        answer = await scene.ask("acme", model)
        assert (answer.status_code, answer.headers["x-served"]) == (200, scene.small)


@pytest.mark.parametrize(
    ("model", "path", "headers"),
    [
        ("secret", CHAT, {}),
        ("law", CHAT, {}),
        (MODEL, CHAT, {}),
        ("unheard-of", CHAT, {}),
        ("tiered", CHAT, {"x-tier": "gold"}),
        ("tiered", "/v1/completions", {}),
        ("tiered", "/v1/completions?path=/v1/chat/completions", {}),
    ],
)
async def test_neither_name_header_nor_path_opens_another_model(
    scene: Callers, model: str, path: str, headers: dict[str, str]
) -> None:
    assert is_refused(await scene.ask("acme", model, path, headers=headers))
    assert is_refused(await scene.ask("nobody", model, path, headers=headers))
    everything = await scene.ask("root", model, path, headers=headers)
    if model in {MODEL, "unheard-of"}:
        assert (everything.status_code, everything.json()["error"]["code"]) == (404, "model_not_found")
    else:
        assert everything.status_code == 200
        assert everything.headers["x-served"] == (scene.small if model == "law" else scene.large)


@pytest.mark.parametrize(
    "headers",
    [
        {"x-attache-server": "default/large"},
        {"x-attache-tenant": "root", "x-attache-client": "root", "x-attache-user": "root"},
        {"x-gateway-model-name": "secret", "model": "secret"},
        {"x-envoy-original-path": "/v1/completions"},
    ],
)
async def test_no_header_of_a_client_changes_the_decision(scene: Callers, headers: dict[str, str]) -> None:
    answer = await scene.ask("acme", "tiered", headers=headers)
    assert (answer.status_code, answer.headers["x-served"]) == (200, scene.small)
    assert is_refused(await scene.ask("acme", "secret", headers=headers))
    steered = await scene.ask("acme", "tiered", headers={"x-gateway-destination-endpoint": scene.large})
    assert (steered.status_code, steered.headers["x-served"]) == (200, scene.small)


BODY = '{"max_tokens": 1, "messages": [{"role": "user", "content": "x"}], %s}'


@pytest.mark.parametrize(
    "members",
    [
        '"model": "llama", "model": "secret"',
        '"model": "llama", "m\\u006fdel": "secret"',
        '"mod\\u0065l": "llama", "model": "s\\u0065cret"',
        '"model": "\\u0073\\u0065\\u0063\\u0072\\u0065\\u0074"',
    ],
)
async def test_no_second_or_escaped_name_in_the_body_opens_another_model(scene: Callers, members: str) -> None:
    assert is_refused(await scene.ask("acme", content=BODY % members))
    allowed = await scene.ask("root", content=BODY % members)
    assert (allowed.status_code, allowed.headers["x-served"]) == (200, scene.large)


async def test_a_name_that_engines_would_read_otherwise_is_decided_as_they_read_it(scene: Callers) -> None:
    answer = await scene.ask("acme", content=BODY % '"model": "secret", "model": "llama"')
    assert (answer.status_code, answer.headers["x-served"]) == (200, scene.small)


@pytest.mark.parametrize("query", ["?model=secret", "?model=llama&model=secret"])
async def test_a_model_in_the_query_is_not_read(scene: Callers, query: str) -> None:
    answer = await scene.ask("acme", path=CHAT + query)
    assert (answer.status_code, answer.headers["x-served"]) == (200, scene.small)
    assert is_refused(await scene.ask("acme", "secret", path=f"{CHAT}?model=llama"))


async def test_the_list_is_what_the_caller_may_use(scene: Callers) -> None:
    async def listed(caller: str) -> list[str]:
        return sorted(one["id"] for one in (await scene.get(caller, "/v1/models")).json()["data"])

    assert await listed("acme") == sorted([ALIAS, "sql", "tiered", "canary"])
    assert await listed("root") == sorted([ALIAS, "sql", "law", "tiered", "canary", "secret"])
    assert await listed("nobody") == []
    for name in ("secret", "unheard-of"):
        assert (await scene.get("acme", f"/v1/models/{name}")).status_code == 404


async def test_what_is_hidden_and_what_is_not_there_are_answered_alike(scene: Callers) -> None:
    hidden, unknown = await scene.ask("acme", "secret"), await scene.ask("acme", "sekret")
    assert hidden.text.replace("secret", "sekret") == unknown.text
    assert hidden.headers.keys() == unknown.headers.keys()


async def test_requests_without_a_credential_get_nothing(scene: Callers) -> None:
    if scene.callers["acme"].base_url.scheme == "https":
        with pytest.raises((httpx.TransportError, ssl.SSLError)):
            # the server is not looked at: it is the server who asks for a certificate
            async with httpx.AsyncClient(verify=False, timeout=60) as nobody:  # noqa: S501
                await nobody.get(f"{scene.callers['acme'].base_url}/v1/models")
        return
    assert (await scene.ask("acme", headers={"authorization": ""})).status_code == 401
    assert (await scene.ask("acme", headers=bearer("sk-another-0123"))).status_code == 401


async def test_a_changed_policy_holds_on_connections_that_are_open(scene: Callers) -> None:
    file = scene.stack.config / "models.yaml"
    before = file.read_text()
    *others, policy = list(yaml.safe_load_all(before))
    policy["spec"]["rules"].append({"models": ["law"]})
    new = file.with_suffix(".new")
    new.write_text(yaml.safe_dump_all([*others, policy]))
    new.rename(file)

    async def law() -> int:
        return (await scene.ask("nobody", "law")).status_code

    await eventually(lambda: _is(law, 200))
    new.write_text(before)
    new.rename(file)
    await eventually(lambda: _is(law, 403))


async def _is(status: Any, expected: int) -> bool:  # noqa: ANN401 - a coroutine function
    return bool(await status() == expected)


async def _are(count: Any, least: int) -> bool:  # noqa: ANN401 - a coroutine function
    return bool(await count() >= least)


# Tokens, with a key set that Envoy fetches.


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tokens(tmp_path_factory: pytest.TempPathFactory, issuer: Issuer) -> AsyncIterator[Callers]:
    """Any token of the issuer will do. Another issuer's keys come from one whose certificate is not good."""
    callers = credentials("token", issuer)
    other = Issuer(tmp_path_factory.mktemp("other"))
    issuers: Any = authentication("token", issuer)["jwt"]
    remote = {**issuers[0]["remoteJwks"], "caFile": str(other.ca_file)}
    issuers.append({**issuers[0], "name": "unvouched", "issuer": UNVOUCHED, "remoteJwks": remote})
    async with running_stack(
        tmp_path_factory.mktemp("tokens") / "stack",
        EngineFlags(count=2, speed=20.0),
        gateway={"authentication": {"jwt": issuers}},
        headers=callers["acme"],
    ) as stack:
        one = Callers(stack, clients(stack.url, callers))
        yield one
        await one.close()


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def test_good_and_bad_tokens(tokens: Callers, issuer: Issuer) -> None:
    key, another = issuer.key, SigningKey("first")
    modulus = key.jwk()["n"].encode()
    cases = {
        "good": (bearer(key.token()), 200),
        "one of two audiences": (bearer(key.token(aud=["another", AUDIENCE])), 200),
        "expired": (bearer(key.token(exp=1_000_000_000)), 401),
        "without exp": (bearer(key.token(exp=None)), 401),
        "not yet good": (bearer(key.token(nbf=3_900_000_000)), 401),
        "another audience": (bearer(key.token(aud="another")), 403),
        "no audience": (bearer(key.token(aud=None)), 403),
        "another issuer": (bearer(key.token(iss="https://another.example")), 401),
        "an issuer whose certificate nobody vouches for": (bearer(key.token(iss=UNVOUCHED)), 401),
        "another key of that name": (bearer(another.token()), 401),
        "alg none": (bearer(key.token_with("none", None)), 401),
        "alg none, in capitals": (bearer(key.token_with("NONE", None)), 401),
        "HS256 with the public key": (bearer(key.token_with("HS256", key.public_pem)), 401),
        "HS256 with the modulus": (bearer(key.token_with("HS256", modulus)), 401),
        "HS256 under the name of RS256": (bearer(key.token_with("RS256", key.public_pem)), 401),
        "changed": (bearer(key.token()[:-4] + "AAAA"), 401),
        "missing": ({"authorization": ""}, 401),
        "in the query": ({"authorization": ""}, 401),
    }
    answered = {}
    for name, (headers, _) in cases.items():
        path = f"{CHAT}?access_token={key.token()}" if name == "in the query" else CHAT
        answer = await tokens.ask("acme", path=path, headers=headers)
        assert answer.status_code == 200 or answer.json()["error"]["message"]
        answered[name] = answer.status_code
    assert answered == {name: expected for name, (_, expected) in cases.items()}


async def test_keys_are_followed_and_hold_while_the_issuer_is_away(tokens: Callers, issuer: Issuer) -> None:
    old = issuer.key

    async def status(key: SigningKey) -> int:
        return (await tokens.ask("acme", headers=bearer(key.token()))).status_code

    async def fetches() -> int:
        async with httpx.AsyncClient(timeout=60) as admin:
            stats = (await admin.get(f"{tokens.stack.admin}/stats", params={"filter": "jwks_fetch_success"})).text
        return int(stats.split(":")[1])

    # a set that a request has waited for holds for cacheDuration; those that are fetched beside requests, without an
    # end
    first = await fetches()
    await eventually(lambda: _are(fetches, first + 2))
    issuer.stop()
    fetched = issuer.fetches
    # three times as long as a set is kept
    await asyncio.sleep(3)
    assert await status(old) == 200
    issuer.key = SigningKey("second")
    issuer.start()
    # a key that the issuer has taken back is no longer good, and the new one is
    await eventually(lambda: _is(lambda: status(old), 401))
    assert await status(issuer.key) == 200
    assert issuer.fetches > fetched

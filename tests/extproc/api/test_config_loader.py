# SPDX-License-Identifier: Apache-2.0
"""A directory of YAML becomes one snapshot, or every mistake with its place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import load_directory, load_snapshot
from extproc.api.config_snapshot import failure_mode_of, missing_redis_warnings, settings_enforced_by_extproc

if TYPE_CHECKING:
    from pathlib import Path

SERVER = b"""
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec:
  model: llama-3.1-8b
  endpoints:
    - address: 127.0.0.1:8001
    - address: "[::1]:8002"
"""
ROUTE = b"""
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: chat}
spec:
  modelName: chat
  loraAdapters: [sql]
  rules:
    - targetModels: [{modelServerName: llama}]
"""


def mistakes_of(*files: bytes) -> list[str]:
    with pytest.raises(ConfigInvalid) as caught:
        load_snapshot({f"{number}.yaml": content for number, content in enumerate(files)})
    return [str(mistake) for mistake in caught.value.mistakes]


def test_a_route_and_a_server_make_a_snapshot() -> None:
    snapshot = load_snapshot({"server.yaml": SERVER, "route.yaml": ROUTE})

    (route,), (server,) = snapshot.routes, snapshot.servers
    assert (route.spec.model_name, route.spec.lora_adapters) == ("chat", ("sql",))
    assert [endpoint.address for endpoint in server.spec.endpoints] == ["127.0.0.1:8001", "[::1]:8002"]
    assert server.spec.traffic_policy.timeout == 1800
    assert snapshot.gateway.max_body_size == 16 << 20


def test_several_documents_may_share_a_file() -> None:
    snapshot = load_snapshot({"all.yaml": SERVER + b"---\n" + ROUTE})

    assert [server.metadata.key for server in snapshot.servers] == ["default/llama"]
    assert [route.metadata.key for route in snapshot.routes] == ["default/chat"]


def test_equal_content_has_an_equal_version_and_any_change_another() -> None:
    files = {"a.yaml": SERVER, "b.yaml": ROUTE}

    assert load_snapshot(files).version == load_snapshot(dict(reversed(files.items()))).version
    assert load_snapshot(files).version != load_snapshot({**files, "b.yaml": ROUTE.replace(b"sql", b"sqm")}).version


def test_hidden_files_folders_and_other_suffixes_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(SERVER + b"---\n" + ROUTE)
    (tmp_path / ".b.yaml").write_bytes(b"{")
    (tmp_path / "notes.txt").write_bytes(b"{")
    (tmp_path / "c.yaml").mkdir()

    assert len(load_directory(tmp_path).servers) == 1


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="does not exist; name a directory"):
        load_directory(tmp_path / "missing")


@pytest.mark.parametrize(
    ("content", "mistake"),
    [
        (SERVER.replace(b"model:", b"modle:"), "0.yaml:6: spec.modle: there is no such field; did you mean 'model'?"),
        (SERVER.replace(b"127.0.0.1:8001", b"engine_1:8001"), "write IP:PORT or NAME:PORT"),
        (
            SERVER.replace(b'"[::1]:8002"', b"127.0.0.1:8001"),
            "0.yaml:9: spec.endpoints[1].address: '127.0.0.1:8001' is",
        ),
        (SERVER + b"  picker: Best\n", "0.yaml:10: spec.picker:"),
        (SERVER + b"  trafficPolicy: {timeout: 30}\n", "0.yaml:10: spec.trafficPolicy.timeout:"),
        (SERVER + b"  trafficPolicy: {timeout: 30 minutes}\n", "is not a duration; write 30m"),
        (SERVER.replace(b"ModelServer", b"ModelSrever"), "did you mean 'ModelServer'?"),
        (SERVER.replace(b"v1alpha1", b"v1"), "0.yaml:2: apiVersion: write apiVersion: attache.dev/v1alpha1"),
        (SERVER + ROUTE, "a second document begins here"),
        (b"[1, 2]", "is not a mapping"),
        (b"spec: [", "not YAML"),
        (b"a: \xff", "not UTF-8 at byte 3"),
    ],
)
def test_a_mistake_in_a_document_says_what_to_write(content: bytes, mistake: str) -> None:
    assert any(mistake in found for found in mistakes_of(content)), mistakes_of(content)


@pytest.mark.parametrize(
    ("route", "mistake"),
    [
        (ROUTE.replace(b"Name: llama", b"Name: lama"), "no ModelServer is called 'lama'; did you mean 'llama'?"),
        (ROUTE.replace(b"llama}", b"llama, weight: 0}"), "all weights are 0"),
        (ROUTE.replace(b"  modelName: chat\n  loraAdapters: [sql]\n", b""), "no client can ask for this route"),
        (ROUTE + b"    - targetModels: [{modelServerName: llama}]\n", "are never reached"),
        (ROUTE + b"      modelMatch: {headers: {x-a: {regex: '('}}}\n", "not a regular expression"),
        (ROUTE + b"      modelMatch: {uri: {exact: /a, prefix: /b}}\n", "write exactly one of exact, prefix, regex"),
        (ROUTE + b"---" + ROUTE.replace(b"name: chat", b"name: other"), "is already in 1.yaml"),
    ],
)
def test_a_mistake_between_documents_says_what_to_write(route: bytes, mistake: str) -> None:
    assert any(mistake in found for found in mistakes_of(SERVER, route)), mistakes_of(SERVER, route)


def test_every_mistake_is_told_at_once() -> None:
    found = mistakes_of(SERVER.replace(b"model:", b"modle:"), ROUTE.replace(b"rules", b"rulez"))

    assert {mistake.partition(":")[0] for mistake in found} == {"0.yaml", "1.yaml"}


def test_mistakes_in_limits_queues_and_authentication_are_all_said() -> None:
    server = SERVER.replace(
        b"  endpoints:",
        b"""  flowControl:
    timeout: soon
    saturation: {maxWait: 0s}
    bands:
      - {name: high, priority: 5, share: 1}
      - {name: high, priority: 0, share: 1, maxBytes: lots}
  endpoints:""",
    )
    route = ROUTE.replace(
        b"  rules:",
        b"""  rateLimits:
    - {unit: minute}
    - {per: Header, requests: 5}
    - {requests: 5, withoutRedis: Refuse}
  rules:""",
    ).replace(b"modelServerName: llama}]", b"modelServerName: llama}]\n      ttftTarget: later")
    gateway = b"""
apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {name: g}
spec:
  authentication:
    apiKeys: [{name: a, key: sk-the-same-key, tenant: t}, {name: a, key: sk-the-same-key, tenant: u}]
    jwt: [{name: i, issuer: x, jwksFile: /f}]
  tenants: [{name: t}, {name: t}]
"""
    objective = b"""
apiVersion: attache.dev/v1alpha1
kind: InferenceObjective
metadata: {name: urgent}
spec: {priority: high}
"""
    found = "\n".join(mistakes_of(server, route, gateway, objective))
    for expected in (
        "spec.flowControl.timeout: 'soon' is not a duration",
        "spec.flowControl.saturation.maxWait: nothing could ever go",
        "spec.flowControl.bands[1]: another band has this name",
        "spec.flowControl.bands[1].maxBytes: 'lots' is not a size",
        "spec.rateLimits[0]: limits nothing",
        "spec.rateLimits[1]: per: Header and the field 'header' go together",
        "spec.rateLimits[2].withoutRedis: has no effect on a Local limit",
        "spec.rules[0].ttftTarget: 'later' is not a duration",
        "spec.authentication: write apiKeys (or apiKeySecrets, or virtualKeys), jwt or clientCertificates",
        "spec.authentication.apiKeys[1].name: 'a' is there already",
        "spec.authentication.apiKeys[1].key: another name has this key",
        "spec.tenants[1].name: 't' is there already",
        "apiVersion: write apiVersion: inference.networking.x-k8s.io/v1alpha2 or llm-d.ai/v1alpha2",
        "spec.priority",
    ):
        assert expected in found


def gateway(spec: str) -> bytes:
    return f"apiVersion: attache.dev/v1alpha1\nkind: GatewayConfig\nmetadata: {{name: g}}\nspec: {spec}\n".encode()


@pytest.mark.parametrize(
    ("spec", "mode"),
    [
        ("{tenants: [{name: t}]}", "Open"),
        ("{tenants: [{name: t, models: [chat]}]}", "Close"),
        ("{authentication: {apiKeys: [{name: a, key: sk-01234567, tenant: t, models: [chat]}]}}", "Close"),
        ("{tenants: [{name: t, models: [chat]}], failureMode: Close}", "Close"),
    ],
)
def test_models_that_not_everybody_may_use_are_not_left_to_envoy_alone(spec: str, mode: str) -> None:
    found = load_snapshot({"server.yaml": SERVER, "route.yaml": ROUTE, "gateway.yaml": gateway(spec)})
    assert failure_mode_of(found) == mode
    assert ("GatewayConfig: models of tenants or keys" in settings_enforced_by_extproc(found)) == ("models" in spec)


@pytest.mark.parametrize(
    "fields",
    [
        "tenants: [{name: t, models: [chat]}]",
        "authentication: {apiKeys: [{name: a, key: sk-01234567, tenant: t, models: [chat]}]}",
    ],
)
def test_open_is_refused_where_not_everybody_may_use_every_model(fields: str) -> None:
    (found,) = mistakes_of(gateway(f"{{{fields}, failureMode: Open}}"))
    assert (
        "spec.failureMode: without extproc, requests would get round GatewayConfig: models of tenants or keys" in found
    )


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("{name: a, tenant: t}", "apiKeys[0]: write one of key, keyFile, keyEnv and keySHA256"),
        ("{name: a, tenant: t, key: sk-01234567, keyEnv: X}", "apiKeys[0]: write one of key, keyFile, keyEnv"),
        ("{name: a, tenant: t, keySHA256: abc}", "apiKeys[0].keySHA256: is not a SHA-256; write 64 hexadecimal digits"),
    ],
)
def test_a_key_is_given_in_one_way(key: str, said: str) -> None:
    found = mistakes_of(gateway(f"{{authentication: {{apiKeys: [{key}]}}}}"))
    assert any(said in one for one in found), found


def test_global_limits_without_a_redis_are_warned_of() -> None:
    limits = (
        b"  rateLimits: [{requests: 1, scope: Global}, {requests: 1}, {requests: 1, scope: Global, withoutRedis:"
        b" Refuse}]\n"
    )
    found = load_snapshot({"server.yaml": SERVER, "route.yaml": ROUTE + limits})
    first, second = missing_redis_warnings(found)
    assert first.startswith("ModelRoute default/chat: rateLimits[0] is Global")
    assert second.endswith("all its requests get 503")


@pytest.mark.parametrize(
    ("secret", "said"),
    [
        ("short", "the value has 5 characters; write at least 16"),
        ("x" * 513, "the value has 513 characters; write at most 512"),
    ],
)
def test_the_length_of_a_secret_is_told_and_the_secret_is_not(secret: str, said: str) -> None:
    text = (
        f"apiVersion: attache.dev/v1alpha1\nkind: GatewayConfig\nmetadata: {{name: g}}\nspec: {{cacheSecret: {secret}}}"
    )
    with pytest.raises(ConfigInvalid) as caught:
        load_snapshot({"a.yaml": text.encode()})
    (mistake,) = caught.value.mistakes
    assert (mistake.path, mistake.message) == ("spec.cacheSecret", said)

# SPDX-License-Identifier: Apache-2.0
"""Keys from files and the environment become digests; nothing says what they are."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from controller.bundle.envoy.bundle import BundleWriter, build
from controller.bundle.key_files import SIGNS_NOTHING, KeyFiles
from controller.bundle.publish import remove_orphans, steps, write
from controller.bundle.sync import Follower, write_once
from extproc.api.authentication import has_usable_key
from extproc.api.errors import ConfigInvalid
from extproc.api.load import ConfigDirectory, load

if TYPE_CHECKING:
    from pathlib import Path

    from extproc.api.snapshot import Snapshot

NOW = datetime(2030, 1, 1, tzinfo=UTC)
JWKS = '{"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}'
KEY = "sk-0123456789"


def configured(authentication: str) -> Snapshot:
    text = f"""
apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {{name: g}}
spec: {{authentication: {authentication}}}
---
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {{name: s}}
spec: {{model: m, endpoints: []}}
"""
    return load({"a.yaml": text.encode()})


def with_key(**fields: object) -> Snapshot:
    return configured(json.dumps({"apiKeys": [{"name": "a", "tenant": "t", **fields}]}))


def filled(files: KeyFiles, snapshot: Snapshot, now: datetime = NOW) -> dict[str, str | None]:
    """Digests by name."""
    authentication = files.fill(snapshot, now).gateway.authentication
    assert authentication is not None
    assert not [one for one in authentication.api_keys if one.key or one.key_file or one.key_env]
    return {one.name: one.key_sha256 for one in authentication.api_keys}


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def no_secret_in(*texts: str) -> bool:
    return not [text for text in texts if KEY in text]


def test_all_ways_to_give_a_key_end_in_its_digest(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"  {KEY}\n")
    for given in ({"key": KEY}, {"keyFile": str(file)}, {"keyEnv": "A_KEY"}, {"keySHA256": digest(KEY).upper()}):
        assert filled(KeyFiles({"A_KEY": f"{KEY}\n"}), with_key(**given)) == {"a": digest(KEY)}


def test_an_unchanged_configuration_gives_the_same_object() -> None:
    files, snapshot = KeyFiles({}), with_key(key=KEY)
    assert files.fill(snapshot, NOW).gateway is files.fill(snapshot, NOW).gateway


def test_a_key_is_left_out_from_the_moment_it_expires_and_its_file_need_not_stay() -> None:
    files = KeyFiles({})
    snapshot = with_key(keyFile="/nowhere", expiresAt="2029-12-31T23:59:59Z")
    assert filled(files, snapshot) == {}
    text = build(files.fill(snapshot, NOW), "/x")["keys.json"]
    assert "local CLIENTS = {}" in text


def test_envoy_itself_knows_when_a_key_expires() -> None:
    text = build(with_key(key=KEY, expiresAt="2030-01-01T00:00:01Z"), "/x")["keys.json"]
    assert json.dumps(f'["{digest(KEY)}"]=1893456001000').strip('"') in text


def test_a_replaced_file_is_followed_and_a_broken_one_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, files = tmp_path / "key", KeyFiles({})
    snapshot = with_key(keyFile=str(file))
    file.write_text(KEY)
    file.chmod(0o600)
    filled(files, snapshot)
    file.write_text("sk-9876543210")
    assert filled(files, snapshot) == {"a": digest("sk-9876543210")}
    for broken in ("short", f"{KEY}\nsk-second-line", "x" * 2000):
        file.write_text(broken)
        assert filled(files, snapshot) == {"a": digest("sk-9876543210")}
    file.unlink()
    assert filled(files, snapshot) == {"a": digest("sk-9876543210")}
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"{file}: is not what it must be; its last keys stay",
        f"{file}: No such file or directory; its last keys stay",
    ]


def test_a_file_that_everybody_can_read_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, files = tmp_path / "key", KeyFiles({})
    file.write_text(KEY)
    file.chmod(0o640)
    filled(files, with_key(keyFile=str(file)))
    assert not caplog.records
    file.chmod(0o644)
    for _ in range(3):
        filled(files, with_key(keyFile=str(file)))
    (record,) = caplog.records
    assert record.levelno >= logging.WARNING
    assert "chmod 600" in record.getMessage()
    assert no_secret_in(record.getMessage())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"keyFile": "/nowhere"}, "/nowhere: No such file or directory; name a file that holds one key"),
        ({"keyEnv": "NOT_SET"}, "the environment variable NOT_SET: is not set; set it to one key"),
        ({"keyEnv": "TWO_LINES"}, "the environment variable TWO_LINES: is not what it must be"),
        ({"keyEnv": "NO_TEXT"}, "the environment variable NO_TEXT: is not what it must be"),
    ],
)
def test_a_key_that_cannot_be_had_is_a_mistake_that_does_not_repeat_it(given: dict[str, str], said: str) -> None:
    environment = {"TWO_LINES": f"{KEY}\n{KEY}", "NO_TEXT": f"{KEY}\udcff"}
    with pytest.raises(ConfigInvalid) as caught:
        KeyFiles(environment).fill(with_key(**given), NOW)
    assert said in str(caught.value)
    assert no_secret_in(str(caught.value))


def test_a_key_that_is_not_there_is_left_out_until_it_comes(tmp_path: Path) -> None:
    file = tmp_path / "key"
    keys = [{"name": "late", "tenant": "t", "keyFile": str(file)}, {"name": "here", "tenant": "t", "key": KEY}]
    snapshot, files = configured(json.dumps({"apiKeys": keys})), KeyFiles({})
    found, mistakes = files.fill_available(snapshot, NOW)
    assert [one.file for one in mistakes] == [str(file)]
    assert found.gateway.authentication is not None
    assert [one.name for one in found.gateway.authentication.api_keys] == ["here"]
    file.write_text("sk-9876543210")
    assert files.fill_available(snapshot, NOW)[1] == []
    assert filled(files, snapshot) == {"late": digest("sk-9876543210"), "here": digest(KEY)}


def test_an_issuer_without_its_key_set_stays_and_none_of_its_tokens_is_good(tmp_path: Path) -> None:
    file = tmp_path / "jwks.json"
    snapshot = configured(
        json.dumps({"jwt": [{"name": "l", "issuer": "i", "audiences": ["a"], "jwksFile": str(file)}]})
    )
    files = KeyFiles({})
    found, mistakes = files.fill_available(snapshot, NOW)
    assert [one.file for one in mistakes] == [str(file)]
    assert found.gateway.authentication is not None
    (issuer,) = found.gateway.authentication.jwt
    assert issuer.jwks == SIGNS_NOTHING
    assert has_usable_key(SIGNS_NOTHING)
    assert "signs-nothing" in build(found, "/x")["tokens.json"]
    file.write_text(JWKS)
    found, mistakes = files.fill_available(snapshot, NOW)
    assert mistakes == []
    assert "signs-nothing" not in build(found, "/x")["tokens.json"]


def test_a_missing_key_keeps_no_pod_from_being_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, file, now = tmp_path / "config", tmp_path / "key", itertools.count()
    config.mkdir()
    gateway = f"{{authentication: {{apiKeys: [{{name: a, tenant: t, keyFile: {file}}}]}}}}"
    head = "apiVersion: attache.dev/v1alpha1\nmetadata: {name: g}\n"
    (config / "gateway.yaml").write_text(f"{head}kind: GatewayConfig\nspec: {gateway}\n")
    follower = Follower(ConfigDirectory(config), tmp_path / "out", "/x")
    follower.start(lambda: next(now))
    assert [one.file for one in follower.missing_keys] == [str(file)]
    assert "local CLIENTS = {}" in (tmp_path / "out" / "keys.json").read_text(), "everybody is refused"
    (config / "server.yaml").write_text(f"{head}kind: ModelServer\nspec: {{model: m, endpoints: []}}\n")
    follower.follow_once(lambda: next(now))
    assert (tmp_path / "out" / "eds" / "default" / "g.json").exists()
    file.write_text(KEY)
    follower.follow_once(lambda: next(now))
    assert follower.missing_keys == ()
    assert digest(KEY) in (tmp_path / "out" / "keys.json").read_text()
    said = [one.getMessage() for one in caplog.records if "refused until they are there" in one.getMessage()]
    assert len(said) == 1


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigInvalid) as caught:
        KeyFiles({}).fill(with_key(keyFile=str(pipe)), NOW)
    assert "is not a regular file; name a file that holds one key" in str(caught.value)


def test_of_two_with_the_same_key_the_first_has_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "key"
    file.write_text(KEY)
    file.chmod(0o600)
    snapshot = configured(f"{{apiKeys: [{{name: a, tenant: t, key: {KEY}}}, {{name: b, tenant: u, keyFile: {file}}}]}}")
    assert filled(KeyFiles({}), snapshot) == {"a": digest(KEY)}
    assert [one.getMessage() for one in caplog.records] == [
        "b: has the key of a, and is not used; keys tell callers apart"
    ]


@pytest.mark.parametrize(
    "written",
    [
        f"{{apiKeys: [{{name: a, tenant: t, key: {KEY}, keyEnv: X}}]}}",
        f"{{apiKeys: [{{name: a, tenant: t, keySHA256: {KEY}}}]}}",
        f"{{apiKeys: [{{name: a, tenant: t, keySHA256: {digest(KEY)}}}, {{name: b, tenant: t, key: {KEY}}}]}}",
        f"{{apiKeys: [{{name: a, tenant: t, key: {KEY}, expiresAt: {KEY}}}]}}",
        f"{{apiKeys: [{{name: a, tenant: t, key: {KEY}, models: [{KEY}, []]}}]}}",
        f"{{apiKeys: [{{name: a, tenant: t, sk-0123456789: {KEY}}}]}}",
        f"{{apiKeys: [{{name: a, tenant: t, key: {KEY}, expiresAt: 2030-01-01T00:00:00}}]}}",
    ],
)
def test_a_refused_configuration_does_not_repeat_keys(written: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        configured(written)
    assert str(caught.value)
    assert no_secret_in(str(caught.value).replace("spec.authentication.apiKeys[0].sk-0123456789", ""))


def test_no_struct_shows_its_key() -> None:
    snapshot = with_key(key=KEY)
    assert no_secret_in(repr(snapshot), repr(snapshot.gateway), str(snapshot.gateway.authentication))


def test_files_with_credentials_are_their_owners_alone(tmp_path: Path) -> None:
    for authentication, secret in (
        (f"{{apiKeys: [{{name: a, tenant: t, key: {KEY}}}]}}", {"keys.json"}),
        (
            f"{{jwt: [{{name: l, issuer: i, audiences: [a], jwks: '{JWKS}'}}]}}",
            {"tokens.json", "callers.json"},
        ),
    ):
        out = tmp_path / secret.copy().pop()
        write_once(configured(authentication), out, str(out))
        files = [file for file in out.rglob("*") if file.is_file()]
        assert {file.name for file in files if file.stat().st_mode & 0o077 == 0} == secret
        assert no_secret_in(*(file.read_text() for file in files))


def test_files_of_credentials_that_are_not_used_any_more_go(tmp_path: Path) -> None:
    keys, tokens = with_key(key=KEY), configured(f"{{jwt: [{{name: l, issuer: i, audiences: [a], jwks: '{JWKS}'}}]}}")
    without = load({"a.yaml": b"apiVersion: attache.dev/v1alpha1\nkind: GatewayConfig\nmetadata: {name: g}\nspec: {}"})
    writer = BundleWriter("/x")
    for before, after, present in (
        (None, keys, {"keys"}),
        (keys, tokens, {"tokens", "callers"}),
        (tokens, without, set()),
    ):
        for step in steps(before, after, writer):
            write(tmp_path, step)
        assert {file.stem for file in tmp_path.glob("*.json")} == {"bootstrap", "cds", "lds", "rds", *present}
    write(tmp_path, steps(None, keys, writer)[0])
    remove_orphans(tmp_path, without)
    assert not (tmp_path / "keys.json").exists()

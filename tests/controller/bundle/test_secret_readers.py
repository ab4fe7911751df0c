# SPDX-License-Identifier: Apache-2.0
"""Certificates and keys from files: the last good ones stay, and bad ones cost their own listener or server alone."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import logging
import os
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from controller.bundle.envoy.bundle import BundleWriter, build_bundle
from controller.bundle.envoy.secrets import Authorities, AwsCredentials, Certificate, EngineKey, SystemAuthorities
from controller.bundle.secret_readers import SIGNS_NOTHING, AuthKeyReader, SecretFileReader
from controller.bundle.sync import (
    BundleSync,
    publish_steps,
    remove_orphans,
    remove_unused_secrets,
    write_bundle_once,
    write_secrets,
    write_step,
)
from extproc.api.authentication import jwks_has_usable_key
from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import ConfigDirectory, load_snapshot
from tests.certificates import Authority

if TYPE_CHECKING:
    from pathlib import Path

    from extproc.api.config_snapshot import Snapshot

TODAY = datetime.now(UTC)
AUTHORITY = Authority()


def content(text: str, kind: str, field: str) -> bytes:
    """Of a file of the bundle."""
    (resource,) = json.loads(text)["resources"]
    return base64.b64decode(resource[kind][field]["inline_bytes"])


def pair_in(folder: Path) -> Certificate:
    files = AUTHORITY.issue(dns=["a.example"]).write(folder, "one")
    return Certificate(files["certFile"], files["keyFile"])


def test_a_certificate_and_its_key_become_one_secret(tmp_path: Path) -> None:
    source = pair_in(tmp_path)
    (file,) = SecretFileReader({}).read([source, source], TODAY).items()
    assert file[0] == source.file
    assert content(file[1], "tls_certificate", "private_key") == (tmp_path / "one.key").read_bytes()
    assert json.loads(file[1])["resources"][0]["name"] == source.name


def test_names_are_relative_to_the_folder_of_the_configuration(tmp_path: Path) -> None:
    pair_in(tmp_path)
    source = Certificate("one.crt", "one.key")
    ((_, text),) = SecretFileReader({}, tmp_path).read([source], TODAY).items()
    assert content(text, "tls_certificate", "private_key") == (tmp_path / "one.key").read_bytes()


def test_half_of_a_new_pair_leaves_the_last_one_in_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = pair_in(tmp_path)
    secrets = SecretFileReader({})
    before = secrets.read([source], TODAY)
    fresh = AUTHORITY.issue(dns=["a.example"])
    (tmp_path / "one.crt").write_bytes(fresh.cert)
    assert secrets.read([source], TODAY) == secrets.read([source], TODAY) == before
    assert secrets.stale == 1
    assert caplog.text.count("the private key is of another certificate") == 1
    (tmp_path / "one.crt").unlink()
    assert secrets.read([source], TODAY) == before
    assert "No such file or directory" in caplog.text
    (tmp_path / "one.crt").write_bytes(fresh.cert)
    (tmp_path / "one.key").write_bytes(fresh.key)
    assert content(secrets.read([source], TODAY)[source.file], "tls_certificate", "certificate_chain") == fresh.cert
    assert secrets.stale == 0


def test_what_is_put_back_as_it_was_is_said_no_more(tmp_path: Path) -> None:
    source = pair_in(tmp_path)
    secrets = SecretFileReader({})
    before = secrets.read([source], TODAY)
    good = (tmp_path / "one.key").read_bytes()
    (tmp_path / "one.key").write_text("")
    secrets.read([source], TODAY)
    assert secrets.stale == 1
    (tmp_path / "one.key").write_bytes(good)
    assert secrets.read([source], TODAY) == before
    assert secrets.stale == 0


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("one.key", "", "the key file has no private key"),
        ("one.crt", "", "the certificate file has no certificate, or only part of one"),
        ("one.crt", None, "No such file or directory"),
    ],
)
def test_what_was_never_good_is_refused_without_its_content(
    tmp_path: Path, name: str, text: str | None, said: str
) -> None:
    source = pair_in(tmp_path)
    (tmp_path / name).unlink()
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigInvalid, match=said) as caught:
        SecretFileReader({}).read([source], TODAY)
    assert "PRIVATE" not in str(caught.value)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ca")
    with pytest.raises(ConfigInvalid, match="is not a regular file"):
        SecretFileReader({}).read([Authorities(str(tmp_path / "ca"))], TODAY)


def test_authorities_come_with_what_they_have_revoked(tmp_path: Path) -> None:
    (tmp_path / "ca").write_bytes(AUTHORITY.cert)
    (tmp_path / "crl").write_bytes(AUTHORITY.revoked(AUTHORITY.issue()))
    source = Authorities(str(tmp_path / "ca"), str(tmp_path / "crl"))
    text = SecretFileReader({}).read([source], TODAY)[source.file]
    assert content(text, "validation_context", "crl") == (tmp_path / "crl").read_bytes()
    (tmp_path / "crl").write_text("nothing")
    with pytest.raises(ConfigInvalid, match="has no list"):
        SecretFileReader({}).read([source], TODAY)


def test_the_authorities_of_the_machine_are_found_as_openssl_finds_them(tmp_path: Path) -> None:
    file = tmp_path / "roots.pem"
    file.write_bytes(AUTHORITY.cert + Authority("another").cert)
    files = SecretFileReader({"SSL_CERT_FILE": str(file)})
    (text,) = files.read([SystemAuthorities()], TODAY).values()
    assert content(text, "validation_context", "trusted_ca") == file.read_bytes()
    # of some hundred, one or the other ends soon
    assert files.ends_at == {}
    file.write_bytes(b"none")
    with pytest.raises(ConfigInvalid, match="the authorities that this machine trusts"):
        SecretFileReader({"SSL_CERT_FILE": str(file)}).read([SystemAuthorities()], TODAY)


def test_engines_keys_come_from_files_or_the_environment(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-one\n")
    filed, named, missing = (
        EngineKey(str(tmp_path / "key"), None),
        EngineKey(None, "ENGINE_KEY"),
        EngineKey(None, "NO_KEY"),
    )
    found = SecretFileReader({"ENGINE_KEY": "sk-two"}).read([filed, named], TODAY)
    assert content(found[filed.file], "generic_secret", "secret") == b"Bearer sk-one"
    assert content(found[named.file], "generic_secret", "secret") == b"Bearer sk-two"
    with pytest.raises(ConfigInvalid, match="the environment variable NO_KEY: is not set"):
        SecretFileReader({}).read([missing], TODAY)


def test_certificates_that_end_soon_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = AUTHORITY.issue(ends_in=timedelta(days=3)).write(tmp_path, "soon")
    secrets = SecretFileReader({})
    for _ in range(2):
        secrets.read([Certificate(files["certFile"], files["keyFile"])], TODAY)
    assert caplog.text.count("is good until") == 1
    assert secrets.ends_at[files["certFile"]] - TODAY < timedelta(days=4)


def test_a_start_between_a_certificate_and_its_key_goes_on_with_what_the_last_writer_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = pair_in(tmp_path)
    before = SecretFileReader({}).read([source], TODAY)
    left = tmp_path / "out" / source.file
    left.parent.mkdir(parents=True)
    left.write_text(before[source.file])
    fresh = AUTHORITY.issue(dns=["a.example"])
    (tmp_path / "one.crt").write_bytes(fresh.cert)
    secrets = SecretFileReader({}, bundle=tmp_path / "out")
    assert secrets.read([source], TODAY) == secrets.read([source], TODAY) == before
    assert caplog.text.count("what was there before stays in use") == 1
    (tmp_path / "one.key").write_bytes(fresh.key)
    assert content(secrets.read([source], TODAY)[source.file], "tls_certificate", "certificate_chain") == fresh.cert


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
    return load_snapshot({"a.yaml": text.encode()})


def with_key(**fields: object) -> Snapshot:
    return configured(json.dumps({"apiKeys": [{"name": "a", "tenant": "t", **fields}]}))


def filled(files: AuthKeyReader, snapshot: Snapshot, now: datetime = NOW) -> dict[str, str | None]:
    """Digests by name."""
    authentication = files.fill_keys(snapshot, now).gateway.authentication
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
        assert filled(AuthKeyReader({"A_KEY": f"{KEY}\n"}), with_key(**given)) == {"a": digest(KEY)}


def test_names_of_files_are_relative_to_the_configuration_wherever_the_writer_runs(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "set.json").write_text(JWKS)
    config = tmp_path / "config"
    config.mkdir()
    remote = {"uri": "https://b/jwks", "caFile": "../ca.pem"}
    issuers = [
        {"name": "a", "issuer": "a", "jwksFile": "../set.json", "anyAudience": True},
        {"name": "b", "issuer": "b", "remoteJwks": remote, "anyAudience": True},
    ]
    assert filled(AuthKeyReader({}, config), with_key(keyFile="../key")) == {"a": digest(KEY)}
    given = configured(json.dumps({"jwt": issuers}))
    authentication = AuthKeyReader({}, config).fill_keys(given, NOW).gateway.authentication
    assert authentication is not None
    local, fetched = authentication.jwt
    assert local.jwks == JWKS
    assert fetched.referenced_file == str(config / "../ca.pem")


def test_an_unchanged_configuration_gives_the_same_object() -> None:
    files, snapshot = AuthKeyReader({}), with_key(key=KEY)
    assert files.fill_keys(snapshot, NOW).gateway is files.fill_keys(snapshot, NOW).gateway


def test_a_key_is_left_out_from_the_moment_it_expires_and_its_file_need_not_stay() -> None:
    files = AuthKeyReader({})
    snapshot = with_key(keyFile="/nowhere", expiresAt="2029-12-31T23:59:59Z")
    assert filled(files, snapshot) == {}
    text = build_bundle(files.fill_keys(snapshot, NOW), "/x")["keys.json"]
    assert "local CLIENTS = {}" in text


def test_envoy_itself_knows_when_a_key_expires() -> None:
    text = build_bundle(with_key(key=KEY, expiresAt="2030-01-01T00:00:01Z"), "/x")["keys.json"]
    assert json.dumps(f'["{digest(KEY)}"]=1893456001000').strip('"') in text


def test_a_replaced_file_is_followed_and_a_broken_one_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, files = tmp_path / "key", AuthKeyReader({})
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
    file, files = tmp_path / "key", AuthKeyReader({})
    file.write_text(KEY)
    file.chmod(0o640)
    filled(files, with_key(keyFile=str(file)))
    assert not caplog.records
    file.chmod(0o644)
    for _ in range(3):
        filled(files, with_key(keyFile=str(file)))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
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
        AuthKeyReader(environment).fill_keys(with_key(**given), NOW)
    assert said in str(caught.value)
    assert no_secret_in(str(caught.value))


def test_a_key_that_is_not_there_is_left_out_until_it_comes(tmp_path: Path) -> None:
    file = tmp_path / "key"
    keys = [{"name": "late", "tenant": "t", "keyFile": str(file)}, {"name": "here", "tenant": "t", "key": KEY}]
    snapshot, files = configured(json.dumps({"apiKeys": keys})), AuthKeyReader({})
    found, mistakes = files.fill_available_keys(snapshot, NOW)
    assert [one.file for one in mistakes] == [str(file)]
    assert found.gateway.authentication is not None
    assert [one.name for one in found.gateway.authentication.api_keys] == ["here"]
    file.write_text("sk-9876543210")
    assert files.fill_available_keys(snapshot, NOW)[1] == []
    assert filled(files, snapshot) == {"late": digest("sk-9876543210"), "here": digest(KEY)}


def test_an_issuer_without_its_key_set_stays_and_none_of_its_tokens_is_good(tmp_path: Path) -> None:
    file = tmp_path / "jwks.json"
    snapshot = configured(
        json.dumps({"jwt": [{"name": "l", "issuer": "i", "audiences": ["a"], "jwksFile": str(file)}]})
    )
    files = AuthKeyReader({})
    found, mistakes = files.fill_available_keys(snapshot, NOW)
    assert [one.file for one in mistakes] == [str(file)]
    assert found.gateway.authentication is not None
    (issuer,) = found.gateway.authentication.jwt
    assert issuer.jwks == SIGNS_NOTHING
    assert jwks_has_usable_key(SIGNS_NOTHING)
    assert "signs-nothing" in build_bundle(found, "/x")["tokens.json"]
    file.write_text(JWKS)
    found, mistakes = files.fill_available_keys(snapshot, NOW)
    assert mistakes == []
    assert "signs-nothing" not in build_bundle(found, "/x")["tokens.json"]


def test_a_missing_key_keeps_no_pod_from_being_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, file, now = tmp_path / "config", tmp_path / "key", itertools.count()
    config.mkdir()
    gateway = f"{{authentication: {{apiKeys: [{{name: a, tenant: t, keyFile: {file}}}]}}}}"
    head = "apiVersion: attache.dev/v1alpha1\nmetadata: {name: g}\n"
    (config / "gateway.yaml").write_text(f"{head}kind: GatewayConfig\nspec: {gateway}\n")
    follower = BundleSync(ConfigDirectory(config), tmp_path / "out", "/x")
    follower.write_first_bundle(lambda: next(now))
    assert [one.file for one in follower.missing_keys] == [str(file)]
    assert "local CLIENTS = {}" in (tmp_path / "out" / "keys.json").read_text(), "everybody is refused"
    (config / "server.yaml").write_text(f"{head}kind: ModelServer\nspec: {{model: m, endpoints: []}}\n")
    follower.sync_once(lambda: next(now))
    assert (tmp_path / "out" / "eds" / "default" / "g.json").exists()
    file.write_text(KEY)
    follower.sync_once(lambda: next(now))
    assert follower.missing_keys == ()
    assert digest(KEY) in (tmp_path / "out" / "keys.json").read_text()
    said = [one.getMessage() for one in caplog.records if "refused until they are there" in one.getMessage()]
    assert len(said) == 1


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigInvalid) as caught:
        AuthKeyReader({}).fill_keys(with_key(keyFile=str(pipe)), NOW)
    assert "is not a regular file; name a file that holds one key" in str(caught.value)


def test_of_two_with_the_same_key_the_first_has_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "key"
    file.write_text(KEY)
    file.chmod(0o600)
    snapshot = configured(f"{{apiKeys: [{{name: a, tenant: t, key: {KEY}}}, {{name: b, tenant: u, keyFile: {file}}}]}}")
    assert filled(AuthKeyReader({}), snapshot) == {"a": digest(KEY)}
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
        write_bundle_once(configured(authentication), out, str(out))
        files = [file for file in out.rglob("*") if file.is_file()]
        assert {file.name for file in files if file.stat().st_mode & 0o077 == 0} == secret
        assert no_secret_in(*(file.read_text() for file in files))


def test_files_of_credentials_that_are_not_used_any_more_go(tmp_path: Path) -> None:
    keys, tokens = with_key(key=KEY), configured(f"{{jwt: [{{name: l, issuer: i, audiences: [a], jwks: '{JWKS}'}}]}}")
    without = load_snapshot(
        {"a.yaml": b"apiVersion: attache.dev/v1alpha1\nkind: GatewayConfig\nmetadata: {name: g}\nspec: {}"}
    )
    writer = BundleWriter("/x")
    for before, after, present in (
        (None, keys, {"keys"}),
        (keys, tokens, {"tokens", "callers"}),
        (tokens, without, set()),
    ):
        for step in publish_steps(before, after, writer):
            write_step(tmp_path, step)
        assert {file.stem for file in tmp_path.glob("*.json")} == {"bootstrap", "cds", "lds", "rds", *present}
    write_step(tmp_path, publish_steps(None, keys, writer)[0])
    remove_orphans(tmp_path, without)
    assert not (tmp_path / "keys.json").exists()


GATEWAY = """\
apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {name: g}
spec:
  listeners:
  - {name: plain, address: "127.0.0.1:8080"}
  - name: api
    address: 127.0.0.1:8443
    tls: {certificates: [{certFile: api.crt, keyFile: api.key}]}
"""
SERVER = """\
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: NAME}
spec: {model: m, endpoints: [{address: "10.0.0.1:8000"}], connection: CONNECTION}
"""
TLS = "{tls: {caFile: NAME.pem, serverName: a.b}}"


def clock() -> float:
    return 0.0


def server(name: str, connection: str = "{}") -> str:
    return SERVER.replace("CONNECTION", connection).replace("NAME", name)


class Written:
    """A directory, the writer that follows it, and what is in its bundle."""

    def __init__(self, folder: Path) -> None:
        self.config, self.out = folder / "config", folder / "out"
        self.config.mkdir()
        self.follower = BundleSync(ConfigDirectory(self.config), self.out, "/x")

    def put(self, **documents: str) -> None:
        for name, text in documents.items():
            (self.config / f"{name}.yaml").write_text(text)

    def follow(self) -> None:
        self.follower.sync_once(clock)

    def listeners(self) -> set[int]:
        found = json.loads((self.out / "lds.json").read_text())["resources"]
        return {one["address"]["socket_address"]["port_value"] for one in found}

    def engines(self, name: str) -> int:
        (file,) = (self.out / "eds" / "default").glob(f"{name}*.json")
        found = json.loads(file.read_text())["resources"][0].get("endpoints", [])
        return sum(len(one.get("lb_endpoints", [])) for one in found)


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path)


def test_half_a_certificate_keeps_no_other_listener_from_being_served(
    written: Written, caplog: pytest.LogCaptureFixture
) -> None:
    written.put(gateway=GATEWAY, one=server("one"))
    caplog.set_level("INFO")
    pair = AUTHORITY.issue(dns=["a.example"])
    (written.config / "api.crt").write_bytes(pair.cert)
    written.follower.write_first_bundle(clock)
    assert written.listeners() == {8080}
    assert written.follower.secrets.stale == 1
    for _ in range(3):
        written.follow()
    assert caplog.text.count("are not served until they are good") == 1
    assert "api.key: No such file or directory" in caplog.text
    (written.config / "api.key").write_bytes(pair.key)
    written.follow()
    assert written.listeners() == {8080, 8443}
    assert written.follower.secrets.stale == 0
    assert "all certificates and keys are good" in caplog.text


def test_a_server_whose_authority_is_missing_has_no_endpoints_and_no_plain_cluster_has_them(written: Written) -> None:
    written.put(gateway=GATEWAY.partition("  - name: api")[0], one=server("one", TLS), two=server("two"))
    written.follower.write_first_bundle(clock)
    assert (written.engines("one"), written.engines("two")) == (0, 1)
    (written.config / "one.pem").write_bytes(AUTHORITY.cert)
    written.follow()
    assert (written.engines("one"), written.engines("two")) == (1, 1)
    assert "transport_socket" in (written.out / "cds.json").read_text()


def test_without_any_good_listener_nothing_is_written(written: Written) -> None:
    """No listener at all would be a plain one on the default address."""
    plain = '  - {name: plain, address: "127.0.0.1:8080"}\n'
    written.put(gateway=GATEWAY.replace(plain, ""), one=server("one"))
    with pytest.raises(ConfigInvalid, match=r"api\.crt"):
        written.follower.write_first_bundle(clock)
    assert not written.out.exists()


def test_other_changes_are_taken_while_a_certificate_is_waited_for(written: Written) -> None:
    written.put(gateway=GATEWAY, one=server("one"))
    written.follower.write_first_bundle(clock)
    written.put(two=server("two"))
    written.follow()
    assert written.follower.is_valid
    assert written.engines("two") == 1


def test_what_is_served_is_not_replaced_by_what_cannot_be(written: Written) -> None:
    AUTHORITY.issue(dns=["a.example"]).write(written.config, "api")
    written.put(gateway=GATEWAY, one=server("one"))
    written.follower.write_first_bundle(clock)
    before = (written.out / "lds.json").read_text()
    written.put(gateway=GATEWAY.replace("api.crt", "new.crt"))
    written.follow()
    assert not written.follower.is_valid
    assert (written.out / "lds.json").read_text() == before


AWS_FILE = """[default]
aws_access_key_id = AKIDEXAMPLE
aws_secret_access_key = wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY
aws_session_token = IQoJb3JpZ2luX2VjE==
region = eu-west-1

[other]
aws_access_key_id = AKIDOTHER
"""


def test_of_aws_credentials_envoy_gets_what_it_reads(tmp_path: Path) -> None:
    (tmp_path / "aws").write_text(AWS_FILE)
    source = AwsCredentials("aws")
    assert SecretFileReader({}, tmp_path).read([source], TODAY) == {
        f"secrets/{source.name}.ini": "[default]\naws_access_key_id=AKIDEXAMPLE\n"
        "aws_secret_access_key=wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY\naws_session_token=IQoJb3JpZ2luX2VjE==\n"
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sk-of-the-gateway",
        "[default]\naws_access_key_id = A\n",
        AWS_FILE.replace("[default]", "[mine]"),
        AWS_FILE.replace("AKIDEXAMPLE", "AKID EXAMPLE"),
        AWS_FILE.replace("AKIDEXAMPLE", ""),
        AWS_FILE.replace("IQoJ", "IQoJ" * 1024),
        AWS_FILE.replace("=", ":"),
        AWS_FILE.replace("AKIDEXAMPLE", "\u00fc"),
        "\udcff",
    ],
)
def test_other_files_sign_nothing_and_are_not_repeated(tmp_path: Path, text: str) -> None:
    (tmp_path / "aws").write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigInvalid, match="is no credentials file of AWS; write one") as caught:
        SecretFileReader({}, tmp_path).read([AwsCredentials("aws")], TODAY)
    assert not [secret for secret in ("AKID", "wJalr", "sk-of") if secret in str(caught.value)]


def test_credentials_that_are_named_no_more_are_removed(tmp_path: Path) -> None:
    (tmp_path / "aws").write_text(AWS_FILE)
    files = SecretFileReader({}, tmp_path).read([AwsCredentials("aws")], TODAY)
    write_secrets(tmp_path, files)
    (written,) = (tmp_path / "secrets").iterdir()
    assert written.stat().st_mode & 0o777 == 0o600
    remove_unused_secrets(tmp_path, files)
    assert written.exists()
    remove_unused_secrets(tmp_path, {})
    assert not written.exists()

# SPDX-License-Identifier: Apache-2.0
"""Certificates and keys from files: what is good, what is said, and what stays."""

from __future__ import annotations

import base64
import json
import os
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from controller.bundle.envoy.secrets import Authorities, Certificate, EngineKey
from controller.bundle.secret_files import SecretFiles
from extproc.api.errors import ConfigInvalid
from tests.certificates import Authority

if TYPE_CHECKING:
    from pathlib import Path

NOW = datetime.now(UTC)
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
    (file,) = SecretFiles({}).read([source, source], NOW).items()
    assert file[0] == source.file
    assert content(file[1], "tls_certificate", "private_key") == (tmp_path / "one.key").read_bytes()
    assert json.loads(file[1])["resources"][0]["name"] == source.name


def test_names_are_relative_to_the_folder_of_the_configuration(tmp_path: Path) -> None:
    pair_in(tmp_path)
    source = Certificate("one.crt", "one.key")
    ((_, text),) = SecretFiles({}, tmp_path).read([source], NOW).items()
    assert content(text, "tls_certificate", "private_key") == (tmp_path / "one.key").read_bytes()


def test_half_of_a_new_pair_leaves_the_last_one_in_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = pair_in(tmp_path)
    secrets = SecretFiles({})
    before = secrets.read([source], NOW)
    fresh = AUTHORITY.issue(dns=["a.example"])
    (tmp_path / "one.crt").write_bytes(fresh.cert)
    assert secrets.read([source], NOW) == secrets.read([source], NOW) == before
    assert secrets.stale == 1
    assert caplog.text.count("the private key is of another certificate") == 1
    (tmp_path / "one.crt").unlink()
    assert secrets.read([source], NOW) == before
    assert "No such file or directory" in caplog.text
    (tmp_path / "one.crt").write_bytes(fresh.cert)
    (tmp_path / "one.key").write_bytes(fresh.key)
    assert content(secrets.read([source], NOW)[source.file], "tls_certificate", "certificate_chain") == fresh.cert
    assert secrets.stale == 0


def test_what_is_put_back_as_it_was_is_said_no_more(tmp_path: Path) -> None:
    source = pair_in(tmp_path)
    secrets = SecretFiles({})
    before = secrets.read([source], NOW)
    good = (tmp_path / "one.key").read_bytes()
    (tmp_path / "one.key").write_text("")
    secrets.read([source], NOW)
    assert secrets.stale == 1
    (tmp_path / "one.key").write_bytes(good)
    assert secrets.read([source], NOW) == before
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
        SecretFiles({}).read([source], NOW)
    assert "PRIVATE" not in str(caught.value)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ca")
    with pytest.raises(ConfigInvalid, match="is not a regular file"):
        SecretFiles({}).read([Authorities(str(tmp_path / "ca"))], NOW)


def test_authorities_come_with_what_they_have_revoked(tmp_path: Path) -> None:
    (tmp_path / "ca").write_bytes(AUTHORITY.cert)
    (tmp_path / "crl").write_bytes(AUTHORITY.revoked(AUTHORITY.issue()))
    source = Authorities(str(tmp_path / "ca"), str(tmp_path / "crl"))
    text = SecretFiles({}).read([source], NOW)[source.file]
    assert content(text, "validation_context", "crl") == (tmp_path / "crl").read_bytes()
    (tmp_path / "crl").write_text("nothing")
    with pytest.raises(ConfigInvalid, match="has no list"):
        SecretFiles({}).read([source], NOW)


def test_engines_keys_come_from_files_or_the_environment(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-one\n")
    filed, named, missing = (
        EngineKey(str(tmp_path / "key"), None),
        EngineKey(None, "ENGINE_KEY"),
        EngineKey(None, "NO_KEY"),
    )
    found = SecretFiles({"ENGINE_KEY": "sk-two"}).read([filed, named], NOW)
    assert content(found[filed.file], "generic_secret", "secret") == b"Bearer sk-one"
    assert content(found[named.file], "generic_secret", "secret") == b"Bearer sk-two"
    with pytest.raises(ConfigInvalid, match="the environment variable NO_KEY: is not set"):
        SecretFiles({}).read([missing], NOW)


def test_certificates_that_end_soon_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = AUTHORITY.issue(ends_in=timedelta(days=3)).write(tmp_path, "soon")
    secrets = SecretFiles({})
    for _ in range(2):
        secrets.read([Certificate(files["certFile"], files["keyFile"])], NOW)
    assert caplog.text.count("is good until") == 1
    assert secrets.ends_at[files["certFile"]] - NOW < timedelta(days=4)


def test_a_start_between_a_certificate_and_its_key_goes_on_with_what_the_last_writer_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = pair_in(tmp_path)
    before = SecretFiles({}).read([source], NOW)
    left = tmp_path / "out" / source.file
    left.parent.mkdir(parents=True)
    left.write_text(before[source.file])
    fresh = AUTHORITY.issue(dns=["a.example"])
    (tmp_path / "one.crt").write_bytes(fresh.cert)
    secrets = SecretFiles({}, bundle=tmp_path / "out")
    assert secrets.read([source], NOW) == secrets.read([source], NOW) == before
    assert caplog.text.count("what was there before stays in use") == 1
    (tmp_path / "one.key").write_bytes(fresh.key)
    assert content(secrets.read([source], NOW)[source.file], "tls_certificate", "certificate_chain") == fresh.cert

# SPDX-License-Identifier: Apache-2.0
"""The file of virtual keys: written whole, by one at a time, with a line for each change."""

from __future__ import annotations

import json
import multiprocessing
import stat
from typing import TYPE_CHECKING, Any

import pytest

from attache.__main__ import main
from controller.keys import api_key_store as module
from controller.keys.api_key_changes import KeyRefused, parse_key_request
from controller.keys.api_key_store import AUDIT_FILE, KeyAdmin, KeyStoreFile
from extproc.api.config_loader import load_directory
from extproc.api.key_store import KEYS_FILE

if TYPE_CHECKING:
    from pathlib import Path

    from controller.keys.api_key_changes import KeyRequest

CONFIG = """\
apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {name: gateway}
spec:
  authentication: {apiKeys: [{name: ops, tenant: ops, key: sk-ops-0123}], virtualKeys: {}}
"""
NOON_S = 1_795_435_200.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "all.yaml").write_text(CONFIG)
    return tmp_path


@pytest.fixture
def admin(folder: Path) -> KeyAdmin:
    return KeyAdmin(KeyStoreFile(folder), lambda: NOON_S)


def asked(name: str = "web", **fields: object) -> KeyRequest:
    return parse_key_request({"name": name, "tenant": "acme", **fields})


def audit(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / AUDIT_FILE).read_text().splitlines()]


def test_the_key_is_nowhere_but_in_the_answer(folder: Path, admin: KeyAdmin) -> None:
    made = admin.create(asked(), "user me")
    for file in folder.iterdir():
        assert made.key not in file.read_text()
    authentication = load_directory(folder).gateway.authentication
    assert authentication is not None
    assert [one.name for one in authentication.api_keys] == ["ops", "web"]
    assert authentication.api_keys[1].key_sha256 == made.record.key_sha256
    assert stat.S_IMODE((folder / KEYS_FILE).stat().st_mode) == 0o600
    assert len(made.key) > 40
    assert admin.create(asked("two"), "user me").key != made.key


def test_each_change_is_a_line_of_the_audit(folder: Path, admin: KeyAdmin, monkeypatch: pytest.MonkeyPatch) -> None:
    admin.create(asked(), "user me")
    admin.rotate("web", "api 10.0.0.1", overlap_s=60.0)
    admin.revoke("web", "user me")
    # changes nothing
    admin.revoke("web", "user me")
    monkeypatch.setattr(module, "_MOST_AUDIT_BYTES", 0)
    key = admin.delete("web", "user me")
    lines = [json.loads(line) for line in (folder / f"{AUDIT_FILE}.1").read_text().splitlines()] + audit(folder)
    assert [(one["action"], one["actor"]) for one in lines] == [
        ("create", "user me"),
        ("rotate", "api 10.0.0.1"),
        ("revoke", "user me"),
        ("delete", "user me"),
    ]
    assert {(one["id"], one["name"], one["tenant"]) for one in lines} == {(key.id, "web", "acme")}


def test_a_change_that_cannot_be_written_leaves_the_last_file_and_says_so(
    folder: Path, admin: KeyAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin.create(asked(), "user me")
    before = (folder / KEYS_FILE).read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "replace_file", full)
    with pytest.raises(OSError, match="No space left"):
        admin.revoke("web", "user me")
    assert (folder / KEYS_FILE).read_bytes() == before
    assert [one.get("failed") for one in audit(folder)] == [None, None, "No space left on device"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\x00", b"[]", b'{"apiVersion": "attache.dev/v1alpha1", "kind": "Key', b'{"kind": "ModelRoute"}'],
)
def test_a_broken_file_is_never_written_over(folder: Path, admin: KeyAdmin, content: bytes) -> None:
    (folder / KEYS_FILE).write_bytes(content)
    for change in (lambda: admin.revoke("web", "me"), lambda: admin.create(asked(), "me"), admin.place.read):
        with pytest.raises(KeyRefused):
            change()
    assert (folder / KEYS_FILE).read_bytes() == content


def test_a_directory_that_is_not_there_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for mode in (["list"], ["create", "web", "--tenant", "a"], ["revoke", "web"]):
        assert main(["keys", *mode, "--config", str(tmp_path / "none")]) == 2
        assert "none is no directory" in capsys.readouterr().err


def test_a_gateway_that_takes_no_virtual_keys_gets_none(folder: Path, admin: KeyAdmin) -> None:
    with pytest.raises(KeyRefused, match="there is a key 'ops' already"):
        admin.create(asked("ops"), "me")
    (folder / "all.yaml").write_text(CONFIG.replace(", virtualKeys: {}", ""))
    with pytest.raises(KeyRefused, match="takes no virtual keys; write authentication"):
        admin.create(asked(), "me")


def test_without_a_gateway_config_the_refusal_has_the_document_to_write(folder: Path, admin: KeyAdmin) -> None:
    (folder / "all.yaml").write_text(
        CONFIG.replace("GatewayConfig", "ModelAccessPolicy").partition("authentication")[0]
        + 'rules: [{from: [{tenants: [acme]}], models: ["*"]}]'
    )
    with pytest.raises(KeyRefused) as refused:
        admin.create(asked(), "me")
    (folder / "gateway.yaml").write_text(str(refused.value).partition("a file with ")[2])
    assert admin.create(asked(), "me").key.startswith("sk-")


def test_who_revokes_learns_that_a_broken_directory_keeps_the_key(
    folder: Path, admin: KeyAdmin, capsys: pytest.CaptureFixture[str]
) -> None:
    admin.create(asked(), "me")
    assert admin.place.why_unused() == ""
    (folder / "broken.yaml").write_text("kind: [")
    assert main(["keys", "revoke", "web", "--config", str(folder)]) == 0
    assert "not in use before the directory is valid: broken.yaml" in capsys.readouterr().err


def _create(folder: Path, writer: int, number: int) -> None:
    admin = KeyAdmin(KeyStoreFile(folder), lambda: NOON_S)
    for index in range(number):
        admin.create(asked(f"key-{writer}-{index}"), f"writer {writer}")


def test_two_writers_at_once_lose_no_key(folder: Path, admin: KeyAdmin) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_create, args=(folder, writer, 8)) for writer in range(2)]
    for one in writers:
        one.start()
    for one in writers:
        one.join(120)
        assert one.exitcode == 0
    assert {one.name for one in admin.place.read().keys} == {f"key-{w}-{i}" for w in range(2) for i in range(8)}
    assert len(audit(folder)) == 16


def test_a_lock_that_nobody_gives_back_is_told_of(
    folder: Path, admin: KeyAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOCK_TRIES", 2)
    other = KeyStoreFile(folder)
    with other._lock(), pytest.raises(KeyRefused, match="another process holds"):
        admin.create(asked(), "me")
    admin.create(asked(), "me")


def test_the_command_makes_shows_changes_and_deletes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str) -> str:
        assert main(["keys", *words, "--config", str(folder)]) == 0
        return capsys.readouterr().out

    out = run(
        *("create", "web", "--tenant", "acme", "--user", "ann", "--model", "llama", "--expires", "90d"),
        *("--rate", "minute:requests=60,burst=2", "--budget", "Month:money=25.5,currency=EUR,soft=0.8"),
        *("--reports", "Tenant"),
    )
    assert out.splitlines()[-1].startswith("key          sk-")
    shown = json.loads(run("show", "web", "--format", "json"))
    assert shown["rateLimits"] == [{"unit": "minute", "requests": 60, "burst": 2.0, "scope": "Local"}]
    assert shown["budgets"][0]["max"] == {"money": "25.5"}
    assert (shown["models"], shown["user"], shown["status"]) == (["llama"], "ann", "active")
    assert shown["reports"] == "Tenant"
    assert "reports" not in json.loads(run("update", "web", "--reports", "none", "--format", "json"))
    assert "key" not in shown
    assert [line.split()[1:5] for line in run("list").splitlines()] == [
        ["name", "tenant", "user", "status"],
        ["web", "acme", "ann", "active"],
    ]
    assert "sk-" in run("rotate", shown["id"], "--overlap", "1h")
    assert run("rotate", "web", "--format", "key").startswith("sk-")
    (alone,) = run("create", "two", "--tenant", "acme", "--format", "key").splitlines()
    assert alone.startswith("sk-")
    run("delete", "two")
    assert "models" not in json.loads(run("update", "web", "--model", "none", "--format", "json"))
    assert "revoked" in run("revoke", "web")
    run("delete", "web")
    assert json.loads(run("list", "--format", "json")) == {"keys": []}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["revoke", "none"], "there is no key 'none'"),
        (["create", "web", "--tenant", "a", "--budget", "Month"], "write it as Month:money=25"),
        (
            ["create", "web", "--tenant", "a", "--budget", "month:money=25"],
            "'month' is not a choice; did you mean 'Month'?",
        ),
        (["create", "web", "--tenant", "a", "--rate", "minute:requests=many"], "'many' is no number"),
        (["create", "web", "--tenant", "a", "--expires", "soon"], "is not a duration"),
    ],
)
def test_a_refused_change_is_told_of_in_a_line(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", *words, "--config", str(folder)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (folder / KEYS_FILE).exists()

# SPDX-License-Identifier: Apache-2.0
"""What Envoy does without extproc follows from what would not hold then, unless it is configured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from attache.__main__ import main
from extproc.api.config_loader import load_snapshot
from extproc.api.config_snapshot import failure_mode_of, settings_enforced_by_extproc

if TYPE_CHECKING:
    from pathlib import Path

KEYS = "authentication: {apiKeys: [{name: a, key: acme-secret, tenant: acme}]}"
LIMITS = "rateLimits: [{requests: 10}]"
BY_TENANT = (
    "rules: [{modelMatch: {headers: {X-Attache-Tenant: {exact: acme}}}, targetModels: [{modelServerName: llama}]}]"
)
BY_HEADER = "rules: [{modelMatch: {headers: {x-team: {exact: red}}}, targetModels: [{modelServerName: llama}]}]"
SETS = (
    "rules: [{set: {seed: 1}, targetModels: [{modelServerName: llama, maxOutputTokens: 5}, {modelServerName: llama}]}]"
)
PLAIN = "rules: [{targetModels: [{modelServerName: llama}]}]"


def directory(*, route: str = PLAIN, server: str = "", gateway: str = "") -> bytes:
    """One server, one route, one gateway, with these fields."""
    fields = route if "rules" in route else f"{PLAIN}, {route}"
    return f"""
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {{name: llama}}
spec: {{model: m, endpoints: [{{address: "10.0.0.1:8000"}}], {server}}}
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {{name: llama}}
spec: {{modelName: llama, {fields}}}
---
apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {{name: gateway}}
spec: {{{gateway}}}
""".encode()


UNDONE = [
    pytest.param(directory(route=LIMITS), "ModelRoute default/llama: rateLimits", id="limits"),
    pytest.param(directory(route=BY_TENANT), "ModelRoute default/llama: rules by tenant or user", id="rules"),
    pytest.param(directory(route=SETS), "ModelRoute default/llama: set and maxOutputTokens", id="parameters"),
    pytest.param(directory(gateway=KEYS), "ModelServer default/llama: cacheIsolation Tenant", id="keys"),
    pytest.param(
        directory(gateway="cacheIsolation: User"), "ModelServer default/llama: cacheIsolation User", id="users"
    ),
    pytest.param(
        directory(server="cacheScopeHeader: x-team"),
        "ModelServer default/llama: cacheIsolation Header:x-team",
        id="scope",
    ),
]
NOT_UNDONE = [
    pytest.param(directory(), id="nothing"),
    pytest.param(directory(route=BY_HEADER), id="Envoy knows the header"),
    pytest.param(directory(gateway=f"{KEYS}, cacheIsolation: Shared"), id="shared caches"),
    pytest.param(directory(gateway=KEYS, server="cacheIsolation: Shared"), id="shared caches of the server"),
]


@pytest.mark.parametrize(("text", "what"), UNDONE)
def test_a_directory_with_decisions_to_get_round_is_closed_by_default(text: bytes, what: str) -> None:
    snapshot = load_snapshot({"a.yaml": text})
    assert settings_enforced_by_extproc(snapshot) == [what]
    assert failure_mode_of(snapshot) == "Close"


@pytest.mark.parametrize("text", NOT_UNDONE)
def test_a_directory_without_them_is_open(text: bytes) -> None:
    snapshot = load_snapshot({"a.yaml": text})
    assert settings_enforced_by_extproc(snapshot) == []
    assert failure_mode_of(snapshot) == "Open"


@pytest.mark.parametrize("mode", ["Open", "Close"])
def test_what_is_configured_holds(mode: str) -> None:
    for fields in (f"failureMode: {mode}", f"failureMode: {mode}, {KEYS}"):
        assert failure_mode_of(load_snapshot({"a.yaml": directory(gateway=fields)})) == mode


@pytest.mark.parametrize(("text", "what"), UNDONE)
def test_check_says_what_open_gives_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: bytes, what: str
) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(text)
    assert main(["check", str(tmp_path)]) == 0
    assert "while extproc is down" not in capsys.readouterr().out
    file.write_bytes(
        text.replace(b"metadata: {name: gateway}\nspec: {", b"metadata: {name: gateway}\nspec: {failureMode: Open, ")
    )
    assert main(["check", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"note: {what} has no effect while extproc is down" in said
    assert "failureMode: Open" in said


def test_check_has_nothing_to_say_of_open_where_nothing_is_given_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_bytes(directory(gateway="failureMode: Open"))
    assert main(["check", str(tmp_path)]) == 0
    assert "note:" not in capsys.readouterr().out

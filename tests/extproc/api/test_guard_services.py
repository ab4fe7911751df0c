# SPDX-License-Identifier: Apache-2.0
"""Mistakes in guards, each with what to write; what Envoy does without extproc."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import load_snapshot
from extproc.api.config_snapshot import failure_mode_of

HEAD = "apiVersion: attache.dev/v1alpha1\nmetadata: {name: llama}\n"
SERVER = HEAD + "kind: ModelServer\nspec: {model: m, endpoints: [{address: '127.0.0.1:1'}]}\n"
GUARD: dict[str, Any] = {"name": "pii", "url": "http://127.0.0.1:1/"}


def files(guard: dict[str, Any] | None, *guards: dict[str, Any], **fields: Any) -> dict[str, bytes]:  # noqa: ANN401 - JSON
    rules = [{"targetModels": [{"modelServerName": "llama"}]}]
    route = {"modelName": "llama", "rules": rules} | ({} if guard is None else {"guard": guard})
    return {
        "a.yaml": SERVER.encode(),
        "b.yaml": f"{HEAD}kind: ModelRoute\nspec: {json.dumps(route)}\n".encode(),
        "c.yaml": f"{HEAD}kind: GatewayConfig\nspec: {json.dumps({'guards': guards, **fields})}\n".encode(),
    }


@pytest.mark.parametrize(
    ("guard", "said"),
    [
        ({"url": "ftp://a/"}, "is no URL of HTTP"),
        ({"url": "http://me:secret@a:1/"}, "is no URL of HTTP"),
        ({"timeout": "3s"}, "Envoy waits 5 s for extproc; write half of messageTimeout at most"),
        ({"timeout": "0s"}, "timeout"),
        ({"headers": ["a b"]}, "is no name of a header"),
        ({"headers": ["Authorization"]}, "'Authorization' of the call is extproc's own; leave it out"),
        ({"headers": ["ce-id"]}, "'ce-id' of the call is extproc's own; leave it out"),
        ({"headers": ["content-length"]}, "is extproc's own"),
        ({"headers": ["Proxy-Connection"]}, "'Proxy-Connection' of the call is extproc's own"),
        ({"apiKeyFile": "a", "apiKeyEnv": "B"}, "write apiKeyFile or apiKeyEnv, not both"),
        ({"caFile": "ca.crt"}, "the url has no TLS; write https, or leave it out"),
        ({"name": "A b"}, "name"),
    ],
)
def test_a_guard_that_cannot_be_called_is_refused(guard: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigInvalid, match=re.escape(said)):
        load_snapshot(files(None, GUARD | guard))


def test_two_guards_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigInvalid, match="'pii' is there already"):
        load_snapshot(files(None, GUARD, GUARD))


def test_a_longer_message_timeout_allows_a_slower_guard() -> None:
    loaded = load_snapshot(files(None, {**GUARD, "timeout": "10s"}, messageTimeout="20s"))
    assert loaded.gateway.guards[0].timeout == 10.0


def test_a_guard_that_fails_closed_makes_the_gateway_fail_closed_by_default() -> None:
    assert failure_mode_of(load_snapshot(files(None, GUARD))) == "Open"
    assert failure_mode_of(load_snapshot(files({"name": "pii"}, GUARD))) == "Close"
    assert failure_mode_of(load_snapshot(files({"name": "pii", "failureMode": "Open"}, GUARD))) == "Open"
    assert failure_mode_of(load_snapshot(files({"name": "pii"}, GUARD, failureMode="Open"))) == "Open"


def test_a_guard_by_https_has_the_systems_authorities_or_its_own() -> None:
    (plain,), (system,), (own,) = (
        load_snapshot(files(None, GUARD | fields)).gateway.guards
        for fields in ({}, {"url": "https://a/"}, {"url": "https://a/", "caFile": "ca.crt"})
    )
    assert plain.connection.tls is None
    assert system.connection.tls is not None
    assert (system.connection.referenced_files, own.connection.referenced_files) == ((), ("ca.crt",))

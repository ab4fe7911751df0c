# SPDX-License-Identifier: Apache-2.0
"""Mistakes in what routes log and in where it goes, each with what to write."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import load_snapshot
from extproc.api.payload_log import PayloadLog

HEAD = "apiVersion: attache.dev/v1alpha1\nmetadata: {name: llama}\n"
SERVER = HEAD + "kind: ModelServer\nspec: {model: m, endpoints: [{address: '127.0.0.1:1'}]}\n"


def files(log: Any, sink: Any) -> dict[str, bytes]:  # noqa: ANN401 - JSON
    rules = [{"targetModels": [{"modelServerName": "llama"}]}]
    route = json.dumps({"modelName": "llama", "rules": rules, "payloadLog": log})
    gateway = json.dumps({"payloadLog": sink})
    return {
        "a.yaml": SERVER.encode(),
        "b.yaml": f"{HEAD}kind: ModelRoute\nspec: {route}\n".encode(),
        "c.yaml": f"{HEAD}kind: GatewayConfig\nspec: {gateway}\n".encode(),
    }


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ({"sample": 1.5}, "sample"),
        ({"maxBytes": "2Mi"}, "write a size from 1 to 1Mi"),
        ({"maxBytes": "0"}, "write a size from 1 to 1Mi"),
        ({"redact": {"paths": ["messages"]}}, "is no path that is known; write one such as $.messages[*].content"),
        ({"redact": {"patterns": ["("]}}, "is no expression of RE2"),
        ({"redact": {"patterns": ["x*"]}}, "matches the empty text"),
        ({"redact": {"patterns": ["a" * 2000]}}, "patterns"),
    ],
)
def test_a_log_that_cannot_be_kept_is_refused(log: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigInvalid, match=re.escape(said)):
        load_snapshot(files(log, {"path": "/var/lib/attache/payload.log"}))


@pytest.mark.parametrize(
    ("sink", "said"),
    [
        ({}, "write path or url"),
        ({"path": "/a", "url": "http://a:1/"}, "write path or url"),
        ({"path": "payload.log"}, "is no absolute path of a file"),
        ({"path": "/var/log/"}, "is no absolute path of a file"),
        ({"path": "/var/../dev/stdout"}, "is no file that can be kept"),
        ({"url": "ftp://a/"}, "is no URL of HTTP"),
        ({"url": "http://me:secret@a:1/"}, "is no URL of HTTP"),
        ({"url": "http:///x"}, "is no URL of HTTP"),
        ({"url": "http://[::1"}, "is no URL of HTTP"),
        ({"url": "http://a:99999/"}, "is no URL of HTTP"),
    ],
)
def test_a_sink_that_cannot_be_used_is_refused(sink: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigInvalid, match=re.escape(said)):
        load_snapshot(files({}, sink))


@pytest.mark.parametrize("url", ["http://broker.team:8080/events?x=1", "https://broker", "http://[::1]:80/"])
def test_a_url_without_credentials_is_accepted(url: str) -> None:
    snapshot = load_snapshot(files({}, {"url": url}))
    assert snapshot.gateway.payload_log is not None
    assert snapshot.routes[0].spec.payload_log == PayloadLog()

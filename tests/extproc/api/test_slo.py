# SPDX-License-Identifier: Apache-2.0
"""Objectives of ModelRoutes as they are written, and mistakes in them."""

from __future__ import annotations

import pytest
import yaml

from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import load_snapshot
from extproc.api.slo import LOWEST_PRIORITY, Slo

CHAT = "{name: chat, ttft: 500ms, tpot: 40ms, e2e: 30s, share: 0.995, window: 7d}"


def read(slo: str) -> tuple[Slo, ...]:
    rules = [{"targetModels": [{"modelServerName": "llama"}]}]
    server = {"model": "m", "endpoints": [{"address": "10.0.0.1:8000"}]}
    specs = {"ModelServer": server, "ModelRoute": {"modelName": "m", "rules": rules, "slo": yaml.safe_load(slo)}}
    documents = [
        {"apiVersion": "attache.dev/v1alpha1", "kind": kind, "metadata": {"name": "llama"}, "spec": spec}
        for kind, spec in specs.items()
    ]
    (route,) = load_snapshot({"a.yaml": yaml.safe_dump_all(documents).encode()}).routes
    return route.spec.slo


def test_a_class_is_read() -> None:
    (found,) = read(f"[{CHAT}]")
    assert dict(found.targets()) == {"ttft": 0.5, "tpot": 0.04, "e2e": 30.0}
    assert (found.name, found.priority, found.share, float(found.window)) == ("chat", LOWEST_PRIORITY, 0.995, 604800.0)


@pytest.mark.parametrize(
    ("slo", "mistake"),
    [
        ("[{name: chat}]", "promises nothing; write ttft, tpot or e2e"),
        ("[{name: chat, ttft: 0s}]", "is 0, which no answer can keep"),
        ("[{name: chat, ttft: 10s, e2e: 5s}]", "10s is longer than e2e, 5s"),
        ("[{name: chat, ttft: 10s, window: 10m}]", "write one from 1h to 90d"),
        ("[{name: chat, ttft: 10s, window: 365d}]", "write one from 1h to 90d"),
        ("[{name: chat, ttft: 1s}, {name: chat, priority: 1, ttft: 1s}]", "give each class a name of its own"),
        ("[{name: chat, ttft: 1s}, {name: talk, ttft: 1s}]", "another class has this priority"),
        ("[{name: chat, tpot: 1s, unmeetable: Refuse}]", "would come too late; write ttft or e2e, too"),
        ("[{name: chat, ttft: 1s, unmeetable: Drop}]", "Drop"),
        ("[{name: chat, ttft: 1s, share: 1}]", "0.99999"),
        ("[{name: chat, ttft: 1s, share: 99}]", "0.99999"),
        ("[{name: chat, ttft: 1s, share: .nan}]", "share"),
        ("[{name: chat, ttft: -1s}]", "-1s"),
        (str([{"name": f"c{number}", "priority": number, "ttft": "1s"} for number in range(9)]), "8"),
    ],
)
def test_a_promise_that_cannot_be_kept_is_a_mistake(slo: str, mistake: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        read(slo)
    assert mistake in str(refused.value)

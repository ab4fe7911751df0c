# SPDX-License-Identifier: Apache-2.0
"""First engines of a server are used once Envoy knows them, each by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.config.load import load
from extproc.config.settling import Settling

if TYPE_CHECKING:
    from extproc.config.snapshot import Snapshot

SERVER = """
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: %s}
spec: {model: m, endpoints: [%s]}
---
"""


def snapshot(**servers: str) -> Snapshot:
    """``servers``: numbers of their engines, with a ``-`` before those that drain."""

    def one(number: str) -> str:
        return f"{{address: '10.0.0.{number.strip('-')}:80'{', draining: true' if number.startswith('-') else ''}}}"

    return load(
        {"a.yaml": "".join(SERVER % (name, ", ".join(map(one, s.split()))) for name, s in servers.items()).encode()}
    )


def used(settling: Settling, now: float, *known: str, **servers: str) -> dict[str, list[str]]:
    """The last numbers of the engines' addresses, by server. ``known``: servers that have engines."""
    found = settling.settled(snapshot(**servers), lambda name: name.partition("/")[2] in known, now)
    return {
        one.metadata.name: [each.address.split(":")[0].split(".")[-1] for each in one.spec.endpoints]
        for one in found.servers
    }


def test_a_first_engine_is_used_after_a_while_and_a_further_one_at_once() -> None:
    settling = Settling(3.0)
    assert used(settling, 0.0, "b", a="1", b="5 6") == {"a": [], "b": ["5", "6"]}
    assert not settling.is_due(2.9)
    assert settling.is_due(3.0)
    assert used(settling, 3.0, "b", a="1", b="5 6") == {"a": ["1"], "b": ["5", "6"]}
    assert used(settling, 3.1, "a", "b", a="1 2", b="5 6") == {"a": ["1", "2"], "b": ["5", "6"]}
    assert not settling.is_due(99.0)


def test_engines_that_drain_are_none_and_stay() -> None:
    settling = Settling(3.0)
    assert used(settling, 0.0, a="-1 2") == {"a": ["1"]}
    assert used(settling, 3.0, a="-1 2") == {"a": ["1", "2"]}


def test_changes_of_others_neither_delay_an_engine_nor_are_delayed() -> None:
    settling = Settling(3.0)
    used(settling, 0.0, a="1", b="")
    assert used(settling, 2.0, a="1", b="5") == {"a": [], "b": []}
    assert used(settling, 3.0, a="1", b="5") == {"a": ["1"], "b": []}
    assert used(settling, 5.0, "a", a="1", b="5") == {"a": ["1"], "b": ["5"]}


def test_an_engine_that_left_and_comes_again_waits_again() -> None:
    settling = Settling(3.0)
    used(settling, 0.0, a="1")
    assert used(settling, 2.0, a="") == {"a": []}
    assert used(settling, 3.0, a="1") == {"a": []}
    assert used(settling, 6.0, a="1") == {"a": ["1"]}

# SPDX-License-Identifier: Apache-2.0
"""First engines of a server are used once Envoy knows them, each by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.api.config_loader import load_snapshot
from extproc.api.make_before_break import WarmingEngines

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from extproc.api.config_snapshot import Snapshot

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

    return load_snapshot(
        {"a.yaml": "".join(SERVER % (name, ", ".join(map(one, s.split()))) for name, s in servers.items()).encode()}
    )


def used(
    warming: WarmingEngines,
    now: float,
    *known: str,
    in_envoy: Mapping[str, Collection[str]] | None = None,
    **servers: str,
) -> dict[str, list[str]]:
    """The last numbers of the engines' addresses, by server. ``known``: servers that have engines. ``in_envoy``:
    numbers that Envoy knows, if it can be asked.
    """
    told = {f"default/{name}": [(f"10.0.0.{one}", 80) for one in numbers] for name, numbers in (in_envoy or {}).items()}
    warming.on_envoy_endpoints(told, now)
    found = warming.without_warming(snapshot(**servers), lambda name: name.partition("/")[2] in known, now)
    return {
        one.metadata.name: [each.address.split(":")[0].split(".")[-1] for each in one.spec.endpoints]
        for one in found.servers
    }


def test_a_first_engine_is_used_after_a_while_and_a_further_one_at_once() -> None:
    warming = WarmingEngines(3.0)
    assert used(warming, 0.0, "b", a="1", b="5 6") == {"a": [], "b": ["5", "6"]}
    assert warming.servers_to_confirm(2.9) == frozenset()
    assert warming.servers_to_confirm(3.0) == warming.servers == {"default/a"}
    assert used(warming, 3.0, "b", a="1", b="5 6") == {"a": ["1"], "b": ["5", "6"]}
    assert warming.servers == frozenset()
    assert used(warming, 3.1, "a", "b", a="1 2", b="5 6") == {"a": ["1", "2"], "b": ["5", "6"]}
    assert warming.servers_to_confirm(99.0) == frozenset()


def test_engines_that_drain_are_none_and_stay() -> None:
    warming = WarmingEngines(3.0)
    assert used(warming, 0.0, a="-1 2") == {"a": ["1"]}
    assert used(warming, 3.0, a="-1 2") == {"a": ["1", "2"]}


def test_changes_of_others_neither_delay_an_engine_nor_are_delayed() -> None:
    warming = WarmingEngines(3.0)
    used(warming, 0.0, a="1", b="")
    assert used(warming, 2.0, a="1", b="5") == {"a": [], "b": []}
    assert used(warming, 3.0, a="1", b="5") == {"a": ["1"], "b": []}
    assert used(warming, 5.0, "a", a="1", b="5") == {"a": ["1"], "b": ["5"]}


def test_an_engine_that_left_and_comes_again_waits_again() -> None:
    warming = WarmingEngines(3.0)
    used(warming, 0.0, a="1")
    assert used(warming, 2.0, a="") == {"a": []}
    assert used(warming, 3.0, a="1") == {"a": []}
    assert used(warming, 6.0, a="1") == {"a": ["1"]}


def test_an_engine_that_envoy_does_not_know_yet_waits_longer() -> None:
    warming = WarmingEngines(3.0)
    used(warming, 0.0, a="1 2", b="5")
    assert warming.servers == {"default/a", "default/b"}
    assert used(warming, 3.0, in_envoy={"a": "2"}, a="1 2", b="5") == {"a": ["2"], "b": ["5"]}
    assert warming.servers == frozenset(), "one of two is enough"
    assert used(warming, 9.0, in_envoy={"a": ""}, a="1", b="5") == {"a": [], "b": ["5"]}
    assert warming.servers_to_confirm(9.0) == {"default/a"}
    assert used(warming, 9.1, in_envoy={"a": "1"}, a="1", b="5") == {"a": ["1"], "b": ["5"]}
    assert warming.servers_to_confirm(9.1) == frozenset()


def test_an_envoy_that_never_knows_an_engine_does_not_keep_it_from_use_for_ever() -> None:
    warming = WarmingEngines(3.0)
    used(warming, 0.0, a="1")
    assert used(warming, 59.0, in_envoy={"a": ""}, a="1") == {"a": []}
    assert used(warming, 60.0, in_envoy={"a": ""}, a="1") == {"a": ["1"]}

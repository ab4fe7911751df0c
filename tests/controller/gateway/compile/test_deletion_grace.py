# SPDX-License-Identifier: Apache-2.0
"""What was deleted a moment ago, or selects other pods, is served on; what restricts it ends that."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.gateway.compile.compiler import Compiler, CompileResult
from controller.kube.api_resources import key_of
from extproc.api.config_loader import load_snapshot
from tests.examples import examples
from tests.kube_objects import Object, pod, resource, route

GRACE_S = 10.0


class Served:
    """A compiler with grace, with one server, its route and two pods."""

    def __init__(self, *more: Object) -> None:
        self.compiler = Compiler(grace_s=GRACE_S)
        for thing in (server(uid="1"), route(uid="1"), pod("a", "10.0.0.1"), pod("b", "10.0.0.2"), *more):
            self.put(thing, 0.0)
        self.at(0.0)

    def put(self, thing: Object, now_s: float) -> None:
        self.compiler.update_object(thing["kind"], key_of(thing), thing, now_s)

    def delete(self, kind: str, now_s: float, key: str = "default/llama") -> None:
        self.compiler.update_object(kind, key, None, now_s)

    def at(self, now_s: float) -> CompileResult:
        return self.compiler.compile(now_s)

    def models(self, now_s: float) -> list[str | None]:
        """What clients may ask for."""
        return [one.spec.model_name for one in load_snapshot(self.at(now_s).files).routes]

    def engines(self, now_s: float) -> list[str]:
        (found,) = load_snapshot(self.at(now_s).files).servers
        return [one.address for one in found.spec.endpoints]

    def holds(self, now_s: float) -> bool:
        (found,) = load_snapshot(self.at(now_s).files).servers
        return found.spec.activation is not None

    def available(self, now_s: float) -> tuple[str, str, str]:
        conditions = self.at(now_s).statuses["ModelServer", "default/llama"].conditions
        (found,) = (one for one in conditions if one.type == "Available")
        return found.status, found.reason, found.message


def server(app: str = "llama", *, uid: str = "1", **spec: Any) -> Object:  # noqa: ANN401 - JSON
    selecting = {"workloadSelector": {"matchLabels": {"app": app}}, "workloadPort": {"port": 8000}}
    return resource("ModelServer", "llama", {"model": "org/llama", **selecting, **spec}, uid=uid)


def test_what_was_deleted_is_served_for_ten_seconds() -> None:
    served = Served()
    served.delete("ModelRoute", 100.0)
    served.delete("ModelServer", 100.0)
    assert served.at(100.0).again_s == 110.0
    assert served.models(109.9) == ["llama"]
    assert served.engines(109.9) == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert list(served.at(110.0).files) == ["gateway.json"]
    assert served.at(110.0).again_s == math.inf


def test_a_server_that_comes_back_holds_requests_until_its_engines_are_there_and_for_ten_minutes() -> None:
    served = Served()
    for kind in ("ModelRoute", "ModelServer"):
        served.delete(kind, 100.0)
    for name in ("a", "b"):
        served.delete("Pod", 101.0, f"default/{name}")
    assert served.holds(101.0), "it may come back"
    served.put(server(uid="2"), 105.0)
    served.put(route(uid="2"), 105.0)
    assert served.models(200.0) == ["llama"]
    assert served.engines(200.0) == []
    assert served.holds(704.9)
    assert not served.holds(705.0)


def test_a_server_that_was_deleted_and_made_again_between_two_looks_holds_requests_too() -> None:
    served = Served()
    assert not served.holds(0.0)
    served.put(server(uid="2"), 100.0)
    assert served.holds(100.0)


def test_activation_of_its_own_stays_as_it_is() -> None:
    served = Served()
    served.put(server(uid="2", activation={"holdTimeout": "5m"}), 100.0)
    (found,) = load_snapshot(served.at(100.0).files).servers
    assert found.spec.activation is not None
    assert found.spec.activation.hold_timeout == 300.0


def test_pods_of_the_selector_before_serve_for_ten_seconds_and_the_condition_says_so_at_once() -> None:
    served = Served()
    served.put(server("lama"), 100.0)
    assert served.engines(109.9) == ["10.0.0.1:8000", "10.0.0.2:8000"]
    status, reason, message = served.available(109.9)
    assert (status, reason) == ("False", "NoPods")
    nobody = "no pod of this namespace has the labels app=lama"
    before = f"{nobody}; before its last change it selected 2 pods with the labels app=llama"
    assert message == f"{before}, and 2 endpoints of these get its requests for some seconds more"
    assert served.engines(110.0) == []
    assert served.available(110.0)[2] == before
    served.put(server("llama"), 120.0)
    assert served.engines(120.0) == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert served.available(120.0)[:2] == ("True", "Available")


def test_a_second_mistake_does_not_prolong_the_grace_and_serves_the_pods_that_served() -> None:
    served = Served()
    served.put(server("lama"), 100.0)
    served.put(server("lamma"), 106.0)
    assert served.engines(109.9) == ["10.0.0.1:8000", "10.0.0.2:8000"]
    assert served.engines(110.0) == []


def test_ready_pods_of_the_new_selector_serve_alone() -> None:
    served = Served(pod("c", "10.0.0.3", app="green"))
    served.put(server("green"), 100.0)
    assert served.engines(100.0) == ["10.0.0.3:8000"]


def test_pods_of_the_selector_before_serve_while_those_of_the_new_one_start() -> None:
    served = Served(pod("c", "10.0.0.3", app="green", ready=False))
    served.put(server("green"), 100.0)
    assert served.engines(100.0) == ["10.0.0.1:8000", "10.0.0.2:8000"]
    served.put(pod("c", "10.0.0.3", app="green"), 103.0)
    assert served.engines(103.0) == ["10.0.0.3:8000"]


@pytest.mark.parametrize("deletes_first", [True, False])
@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("ModelAccessPolicy", "default/guard"),
        ("GatewayConfig", "system/main"),
        ("Gateway", "system/web"),
    ],
)
def test_without_what_guards_it_nothing_is_served_that_was_deleted(kind: str, key: str, *, deletes_first: bool) -> None:
    guard = {"targetRefs": [{"kind": "ModelRoute", "group": "attache.dev", "name": "llama"}], "rules": []}
    served = Served(resource("ModelAccessPolicy", "guard", guard))
    if deletes_first:
        served.delete("ModelRoute", 100.0)
    served.delete(kind, 100.1, key)
    if not deletes_first:
        served.delete("ModelRoute", 109.0)
    assert served.models(109.0) == []


def test_a_policy_of_another_namespace_ends_no_grace() -> None:
    served = Served()
    served.delete("ModelRoute", 100.0)
    served.delete("ModelAccessPolicy", 100.1, "other/guard")
    assert served.models(100.2) == ["llama"]


def test_a_route_with_the_name_of_a_deleted_one_has_it_at_once() -> None:
    served = Served()
    served.delete("ModelRoute", 100.0)
    other = route("other", "llama", model="llama", creationTimestamp="2026-11-02T00:00:00Z")
    served.put(other, 101.0)
    outcome = served.at(101.0)
    (found,) = load_snapshot(outcome.files).routes
    assert found.metadata.name == "other"
    accepted = next(one for one in outcome.statuses["ModelRoute", "default/other"].conditions if one.type == "Accepted")
    assert accepted.status == "True"


def test_what_was_not_served_is_not_served_when_it_is_deleted() -> None:
    served = Served()
    served.put(server(flowControl={"saturation": {"maxWait": "0s"}}), 100.0)
    served.delete("ModelServer", 101.0)
    assert served.at(101.0).again_s == math.inf


def test_without_grace_what_is_deleted_is_gone() -> None:
    compiler = Compiler()
    for thing in (server(), route()):
        compiler.update_object(thing["kind"], key_of(thing), thing, 0.0)
    compiler.update_object("ModelRoute", "default/llama", None, 1.0)
    assert load_snapshot(compiler.compile(1.0).files).routes == ()


THINGS = [server(), server("green"), server("nobody"), route(), pod("a", "10.0.0.1"), pod("c", "10.0.0.3", app="green")]
CHANGES = st.lists(st.tuples(st.sampled_from(THINGS), st.booleans(), st.sampled_from(["1", "2"]), st.integers(0, 20)))


@settings(max_examples=examples(200), deadline=None)
@given(changes=CHANGES)
def test_when_all_grace_is_over_the_objects_alone_decide(changes: list[tuple[Object, bool, str, int]]) -> None:
    compiler, now_s, last = Compiler(grace_s=GRACE_S), 0.0, dict[tuple[str, str], Object]()
    for thing, is_there, uid, pause_s in changes:
        now_s += pause_s
        now = {**thing, "metadata": {**thing["metadata"], "uid": uid}}
        where = thing["kind"], key_of(thing)
        compiler.update_object(*where, now if is_there else None, now_s)
        last[where] = now
        if not is_there:
            del last[where]
        compiler.compile(now_s)
    plain = Compiler()
    for (kind, key), thing in last.items():
        plain.update_object(kind, key, thing)
    late = compiler.compile(now_s + 1000.0)
    assert late.again_s == math.inf
    assert late.files == plain.compile().files

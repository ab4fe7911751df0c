# SPDX-License-Identifier: Apache-2.0
"""A Model is Ready once gateways confirm its route and an engine; without any gateway, after a while."""

from __future__ import annotations

from typing import Any

import pytest

from controller.kube.api_resources import timestamp_of
from controller.kube.conditions import status_to_write
from controller.kube.reconcile_plan import Plan
from controller.models.model.model_state import ModelSettings
from controller.models.model.reconcile import reconcile
from tests.controller.models.model.test_reconcile import NOW_S, condition, model, on_server, seen, told

Plain = dict[str, Any]
LIMIT_S = ModelSettings().gateway_wait_s
STEP = {"transformer": {"image": "units"}, "format": {"name": "sklearn"}}


class Life:
    """A Model whose statuses are written as the manager writes them. Its engines are ready; no gateway has reported."""

    def __init__(self, **spec: object) -> None:
        self.thing = model(**spec)
        self.children = told(on_server(reconcile(seen(self.thing, []), NOW_S)), is_served=False)
        self.plan = Plan()

    def at(self, passed_s: float) -> tuple[str, str]:
        """Status and reason of Ready after ``passed_s``."""
        now_s = NOW_S + passed_s
        self.plan = reconcile(seen(self.thing, self.children), now_s)
        assert self.plan.status is not None
        written = status_to_write("Model", self.thing, self.plan.status, timestamp_of(now_s))
        if written is not None:
            self.thing = {**self.thing, "status": written}
        return self.ready["status"], self.ready["reason"]

    @property
    def ready(self) -> Plain:
        (found,) = (one for one in self.thing["status"]["conditions"] if one["type"] == "Ready")
        return dict(found)

    def report(self, status: str = "True", reason: str = "Yes", message: str = "", **by_kind: Plain) -> None:
        """A gateway reports on ModelRoutes and ModelServers. ``by_kind``: what it says of Available of ModelServers."""
        for one in self.children:
            generation = one["metadata"]["generation"]
            said = {"status": status, "reason": reason, "message": message, "observedGeneration": generation}
            if one["kind"] == "ModelRoute":
                one["status"] = {"conditions": [{"type": "Programmed", **said}]}
            elif one["kind"] == "ModelServer":
                available = {**said, **by_kind.get("Available", {})}
                one["status"] = {"conditions": [{"type": "Programmed", **said}, {"type": "Available", **available}]}

    def report_on(self, server: str, status: str, reason: str, message: str = "") -> None:
        """A gateway reports on the engines of one ModelServer."""
        for one in self.children:
            if (one["kind"], one["metadata"]["name"]) == ("ModelServer", server):
                (available,) = (found for found in one["status"]["conditions"] if found["type"] == "Available")
                available |= {"status": status, "reason": reason, "message": message}

    def change(self, kind: str) -> None:
        """Objects of this kind are of another generation than what is reported."""
        for one in self.children:
            one["metadata"]["generation"] += one["kind"] == kind


def two_backends() -> Life:
    """A gateway has no engine of either."""
    life = Life(backends=[{"name": "a"}, {"name": "b"}])
    life.report(Available={"status": "False", "reason": "NoReadyPods"})
    return life


def test_it_waits_for_a_gateway_and_is_ready_once_one_confirms() -> None:
    life = Life()
    assert life.at(0) == ("False", "WaitingForGateway")
    assert life.ready["message"] == (
        "no gateway has reported on ModelRoute llama yet; no gateway has reported on ModelServer llama-default yet"
    )
    assert life.plan.requeue_at_s == NOW_S + LIMIT_S
    life.report("Unknown", "Pending", "Envoy does not use the newest cds.json yet")
    assert life.at(LIMIT_S - 1) == ("False", "WaitingForGateway")
    assert life.ready["message"].startswith("ModelRoute llama: Envoy does not use the newest cds.json yet; ")
    life.report()
    assert life.at(LIMIT_S - 1) == ("True", "Serving")
    assert life.plan.requeue_at_s is None


def test_a_gateway_that_has_not_an_engine_yet_is_waited_for() -> None:
    life = Life()
    life.report(Available={"status": "Unknown", "message": "extproc uses its first endpoints once Envoy has them"})
    assert life.at(0) == ("False", "WaitingForGateway")
    assert life.ready["message"] == "ModelServer llama-default: extproc uses its first endpoints once Envoy has them"
    # it says that it has none
    life.report(Available={"status": "False", "reason": "NoReadyPods"})
    for passed_s in (1, LIMIT_S, 10 * LIMIT_S):
        assert life.at(passed_s) == ("False", "NotAvailable")


def test_a_backend_that_no_gateway_has_reported_on_is_waited_for_though_another_has_failed_for_long() -> None:
    life = two_backends()
    assert life.at(0) == ("False", "NotAvailable")
    assert life.at(1000) == ("False", "NotAvailable")
    life.report_on("llama-b", "Unknown", "Pending", "extproc uses its first endpoints once Envoy has them")
    assert life.at(1001) == ("False", "WaitingForGateway")
    assert life.at(1000 + LIMIT_S) == ("False", "WaitingForGateway")
    life.report_on("llama-b", "True", "Yes")
    assert life.at(1002 + LIMIT_S) == ("True", "Serving")
    assert condition(life.plan, "ModelServersReady")["status"] == "False"


def test_a_backend_that_served_stays_ready_while_its_change_is_taken_up_though_another_has_failed_for_long() -> None:
    life = two_backends()
    life.report_on("llama-b", "True", "Yes")
    assert life.at(0) == ("True", "Serving")
    life.thing["metadata"]["generation"] = 2
    (server,) = (one for one in life.children if (one["kind"], one["metadata"]["name"]) == ("ModelServer", "llama-b"))
    server["metadata"]["generation"] += 1
    assert life.at(1000) == ("True", "Serving")
    assert life.ready["observedGeneration"] == 1, "kubectl wait waits"
    assert life.at(1000 + LIMIT_S) == ("True", "GatewayUnconfirmed")


@pytest.mark.parametrize("kind", ["ModelRoute", "ModelServer"])
def test_a_report_on_an_older_generation_confirms_nothing(kind: str) -> None:
    life = Life()
    life.report()
    life.change(kind)
    assert life.at(0) == ("False", "WaitingForGateway")
    life.report()
    assert life.at(1) == ("True", "Serving")


def test_without_a_gateway_it_is_ready_after_a_while_and_says_so() -> None:
    life = Life()
    life.at(0)
    assert life.at(LIMIT_S - 1) == ("False", "WaitingForGateway")
    assert life.plan.requeue_at_s == NOW_S + LIMIT_S, "the wait does not begin again"
    assert life.at(LIMIT_S) == ("True", "GatewayUnconfirmed")
    assert life.ready["message"].startswith("no gateway has confirmed that requests get to its engines: no gateway")
    assert life.plan.requeue_at_s is None
    # one that is installed later says what is
    life.report("False", "Conflict", "an older ModelRoute has its name")
    assert life.at(LIMIT_S + 1) == ("False", "ModelRouteNotReady")
    life.report()
    assert life.at(LIMIT_S + 2) == ("True", "Serving")


def test_it_waits_from_when_its_engines_are_ready() -> None:
    life = Life()
    ready, life.children = life.children, told(life.children, 0, is_served=False)
    assert life.at(0)[0] == "False"
    assert life.plan.requeue_at_s is None
    life.at(1000)
    life.children = ready
    assert life.at(1001) == ("False", "WaitingForGateway")
    assert life.at(1001 + LIMIT_S - 1) == ("False", "WaitingForGateway")
    assert life.at(1001 + LIMIT_S) == ("True", "GatewayUnconfirmed")


def test_what_a_gateway_refused_is_waited_for_once_it_has_changed() -> None:
    life = Life()
    life.report("False", "Conflict", "an older ModelRoute has its name", Available={"status": "True"})
    assert life.at(0) == ("False", "ModelRouteNotReady")
    assert life.at(10 * LIMIT_S) == ("False", "ModelRouteNotReady"), "no time makes it Ready"
    life.change("ModelRoute")
    assert life.at(10 * LIMIT_S + 1) == ("False", "WaitingForGateway")


def test_a_model_that_was_ready_stays_so_while_gateways_take_up_a_change() -> None:
    life = Life()
    life.report()
    assert life.at(0) == ("True", "Serving")
    life.thing["metadata"]["generation"] = 2
    life.thing["spec"]["aliases"] = ["chat"]
    assert life.at(100) == ("True", "Serving")
    assert life.ready["observedGeneration"] == 1, "kubectl wait waits"
    assert life.thing["status"]["observedGeneration"] == 2
    life.children += on_server(life.plan)
    assert life.at(101) == ("True", "Serving")
    assert life.ready["observedGeneration"] == 1
    life.report()
    assert life.at(102) == ("True", "Serving")
    assert life.ready["observedGeneration"] == 2
    assert life.plan.actions == ()


def test_a_model_that_was_ready_says_when_nobody_takes_up_its_change() -> None:
    life = Life()
    life.report()
    life.at(0)
    life.change("ModelRoute")
    assert life.at(100) == ("True", "Serving")
    assert life.plan.requeue_at_s == NOW_S + 100 + LIMIT_S
    assert life.at(100 + LIMIT_S) == ("True", "GatewayUnconfirmed")
    since = life.ready["lastTransitionTime"]
    life.report()
    assert life.at(101 + LIMIT_S) == ("True", "Serving")
    assert life.ready["lastTransitionTime"] == since, "it was Ready all the time"


def test_a_gateway_that_reports_again_after_a_restart_changes_nothing() -> None:
    life = Life()
    life.report()
    life.at(0)
    life.report("Unknown", "Pending", "no Envoy answers")
    assert life.at(1) == ("True", "Serving")
    life.report("False", "Refused", "extproc does not use it")
    assert life.at(2) == ("False", "ModelRouteNotReady"), "it serves it no more"


def test_a_route_that_nobody_has_made_is_no_matter_of_time() -> None:
    life = Life()
    life.children = [one for one in life.children if one["kind"] != "ModelRoute"]
    for passed_s in (0, 10 * LIMIT_S):
        assert life.at(passed_s) == ("False", "NotMade")


def test_a_step_waits_for_gateways_too() -> None:
    life = Life(**STEP)
    life.report()
    (step,) = (
        one for one in life.children if one["metadata"]["name"] == "llama-transformer" and "Server" in one["kind"]
    )
    del step["status"]
    assert life.at(0) == ("False", "WaitingForGateway")
    assert condition(life.plan, "TransformerReady")["status"] == "Unknown"
    assert life.at(LIMIT_S) == ("True", "GatewayUnconfirmed")


def test_a_model_that_is_deleted_waits_for_nobody() -> None:
    thing = model()
    thing["metadata"]["deletionTimestamp"] = "2026-11-29T00:00:00Z"
    assert reconcile(seen(thing, []), NOW_S) == Plan()


@pytest.mark.parametrize("back_s", [1, LIMIT_S])
def test_a_manager_whose_clock_is_behind_the_one_before_waits_on(back_s: float) -> None:
    life = Life()
    assert life.at(0) == ("False", "WaitingForGateway")
    assert life.at(-back_s) == ("False", "WaitingForGateway")
    assert life.plan.requeue_at_s == NOW_S + LIMIT_S
    assert life.at(LIMIT_S) == ("True", "GatewayUnconfirmed")


@pytest.mark.parametrize("at", ["9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z", "soon", ""])
def test_what_somebody_writes_into_statuses_neither_holds_it_for_ever_nor_fails(at: str) -> None:
    life = Life()
    life.at(0)
    for one in life.thing["status"]["conditions"]:
        one |= {"lastTransitionTime": at, "message": "x" * 32_768, "observedGeneration": 2**62}
    for one in ("phaseSince", "phase"):
        life.thing["status"][one] = at if one == "phaseSince" else "Loaded"
    life.report("Maybe", "X", "y" * 32_768)
    life.at(1)
    assert life.at(1 + LIMIT_S) == ("True", "GatewayUnconfirmed")
    assert max(len(one["message"]) for one in life.thing["status"]["conditions"]) <= 4096
    life.report()
    assert life.at(2 + LIMIT_S) == ("True", "Serving")
    assert life.ready["observedGeneration"] == 1

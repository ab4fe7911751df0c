# SPDX-License-Identifier: Apache-2.0
"""Which ModelRoute has a model's name, where Gateways have several listeners and namespaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.controller.gateway.compile.gateway_api.outcomes import compiled, conditions, snapshot, status
from tests.gateway_objects import Object, gateway, listener
from tests.kube_objects import route, server

if TYPE_CHECKING:
    from controller.gateway.compile.compiler import CompileResult

LONG_AGO = "2020-01-01T00:00:00Z"
SERVERS = server(), server(namespace="blue")


def model_route(name: str, *listeners: str, namespace: str = "default", **metadata: object) -> Object:
    """A route of the model ``m``."""
    made = route(name, "llama", namespace=namespace, model="m", **metadata)
    made["spec"]["parentRefs"] = [{"name": "web", "namespace": "default", "sectionName": one} for one in listeners]
    return made


def served(outcome: CompileResult) -> dict[str, list[str | None]]:
    """The listeners that serve each ModelRoute."""
    return {one.metadata.key: [ref.section_name for ref in one.spec.parent_refs] for one in snapshot(outcome).routes}


def test_a_route_that_no_listener_takes_keeps_no_name_from_others() -> None:
    # the listener takes routes of its own namespace alone
    claim = model_route("claim", "http", namespace="blue", creationTimestamp=LONG_AGO)
    nowhere = model_route("nowhere", "none", creationTimestamp=LONG_AGO)
    outcome = compiled(gateway("web"), *SERVERS, claim, nowhere, model_route("own", "http"))
    assert served(outcome) == {"default/own": ["default/web/http"]}
    assert conditions(status(outcome, "ModelRoute", "claim", "blue").conditions)["Programmed"][0] == "False"


def test_two_routes_may_have_a_name_on_listeners_of_their_own() -> None:
    web = gateway("web", listener("a", hostname="a.org"), listener("b", hostname="b.org"))
    outcome = compiled(web, *SERVERS, model_route("one", "a", creationTimestamp=LONG_AGO), model_route("two", "b"))
    assert served(outcome) == {"default/one": ["default/web/a"], "default/two": ["default/web/b"]}


def test_where_two_routes_meet_the_older_has_the_name_and_the_other_is_not_served_at_all() -> None:
    web = gateway("web", listener("a", hostname="a.org"), listener("b", hostname="b.org"))
    outcome = compiled(web, *SERVERS, model_route("one", "a", creationTimestamp=LONG_AGO), model_route("two", "a", "b"))
    assert served(outcome) == {"default/one": ["default/web/a"]}
    assert conditions(status(outcome, "ModelRoute", "two").conditions)["Accepted"] == ("False", "Conflict")

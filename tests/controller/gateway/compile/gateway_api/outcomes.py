# SPDX-License-Identifier: Apache-2.0
"""What objects come to, read as extproc reads it, for the tests of this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from controller.gateway.compile.compiler import Compiler
from controller.gateway.compile.gateway_api.gateways import GatewayApiSettings
from controller.kube.api_resources import key_of
from extproc.api.config_loader import load_snapshot
from tests.gateway_objects import Object, gateway_class

if TYPE_CHECKING:
    from collections.abc import Iterable

    from controller.gateway.compile.compiler import CompileResult
    from controller.kube.conditions import WantedCondition, WantedListItem, WantedStatus
    from extproc.api.config_snapshot import Snapshot

ONE_ADDRESS = GatewayApiSettings(bind=("10.0.0.1",))
Condition = tuple[str, str]


def feed(compiler: Compiler, things: Iterable[Object]) -> Compiler:
    for thing in things:
        compiler.update_object(thing["kind"], key_of(thing), thing)
    return compiler


def compiled(*things: Object, settings: GatewayApiSettings = ONE_ADDRESS, config: str | None = None) -> CompileResult:
    """With a GatewayClass of ours."""
    return feed(Compiler(config, settings), [gateway_class(), *things]).compile()


def snapshot(outcome: CompileResult) -> Snapshot:
    """What extproc makes of the directory: no mistakes."""
    return load_snapshot(
        {name: content for name, content in outcome.files.items() if name.endswith((".json", ".yaml"))}
    )


def conditions(wanted: Iterable[WantedCondition]) -> dict[str, Condition]:
    return {one.type: (one.status, one.reason) for one in wanted}


def status(outcome: CompileResult, kind: str, name: str, namespace: str = "default") -> WantedStatus:
    return outcome.statuses[kind, f"{namespace}/{name}" if namespace else name]


def gateway_says(outcome: CompileResult, name: str = "web", namespace: str = "default") -> dict[str, Condition]:
    return conditions(status(outcome, "Gateway", name, namespace).conditions)


def listeners_of(outcome: CompileResult, name: str = "web", namespace: str = "default") -> dict[str, WantedListItem]:
    (found,) = status(outcome, "Gateway", name, namespace).lists
    return {one.identity["name"]: one for one in found.entries}


def listener_says(outcome: CompileResult, listener: str, name: str = "web") -> dict[str, Condition]:
    return conditions(listeners_of(outcome, name)[listener].conditions)


def attached(outcome: CompileResult, name: str = "web") -> dict[str, int]:
    return {key: one.fields["attachedRoutes"] for key, one in listeners_of(outcome, name).items()}


def parents(outcome: CompileResult, kind: str, name: str, namespace: str = "default") -> list[dict[str, Any]]:
    """Conditions of each parent, with the Gateway's name."""
    found = next(one for one in status(outcome, kind, name, namespace).lists if one.name == "parents")
    return [{"name": one.identity["parentRef"]["name"], **conditions(one.conditions)} for one in found.entries]


def route_says(
    outcome: CompileResult, name: str = "app", namespace: str = "default", kind: str = "HTTPRoute"
) -> dict[str, Condition]:
    """Of a route with one Gateway of ours."""
    (found,) = parents(outcome, kind, name, namespace)
    del found["name"]
    return found


def served(outcome: CompileResult) -> dict[str, list[str]]:
    """The names of the listeners that each HTTPRoute and GRPCRoute is served by."""
    return {
        one.reference: [ref.section_name or "" for ref in one.spec.parent_refs]
        for one in snapshot(outcome).gateway_api_routes
    }


def addresses(outcome: CompileResult) -> dict[str, str]:
    """Where each listener is."""
    return {one.name: one.address for one in snapshot(outcome).gateway.listeners}


def backends(outcome: CompileResult) -> dict[str, list[str]]:
    """The endpoints of each Backend; ``unresolved`` in place of those of unresolved references."""
    return {
        one.metadata.key: ["unresolved"] if one.spec.unresolved else list(one.spec.endpoints)
        for one in snapshot(outcome).backends
    }


def targets(outcome: CompileResult, name: str = "app") -> list[tuple[str, str, int]]:
    """Kind, name and weight of what the first rule of a route goes to."""
    (found,) = (one for one in snapshot(outcome).http_routes if one.metadata.name == name)
    return [(one.kind, f"{one.namespace}/{one.name}", one.weight) for one in found.spec.rules[0].backend_refs]

# SPDX-License-Identifier: Apache-2.0
"""Which ModelRoutes are served, under which names, and what becomes of references to servers that are not there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from controller.gateway.compile.conditions import IN_DIRECTORY, NO_MISTAKE, Wanted, WantedStatus, fails, holds
from extproc.config.model_route import ModelRoute
from extproc.config.spec import object_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from controller.gateway.compile.sources import Source


class RouteResult(msgspec.Struct, frozen=True):
    """``document``: None if the route is not served. ``missing``: servers, by key, that a rule has no substitute for:
    requests of that rule are answered 503.
    """

    document: bytes | None
    missing: frozenset[str]
    status: WantedStatus


def compile_routes(routes: Iterable[Source], servers: Collection[str]) -> dict[str, RouteResult]:
    """Every route by its key. ``servers``: keys of the ModelServers that can be used.

    Of two routes with one model name, the older one has it, as in the Gateway API. The other is not served at all: it
    would be served in part otherwise.
    """
    owners: dict[str, str] = {}
    results = {}
    for source in sorted(routes, key=lambda one: one.age):
        problem = source.complaint() or _repeated(source)
        taken = [name for name in _names(source) if name in owners]
        if problem:
            results[source.key] = _refused(source, "Invalid", problem)
        elif taken:
            claims = "; ".join(f"'{name}' belongs to {owners[name]}" for name in taken)
            advice = "which is older; use another name, or delete that route"
            results[source.key] = _refused(source, "Conflict", f"{claims}, {advice}")
        else:
            results[source.key] = _compile(source, servers)
            owners.update(dict.fromkeys(_names(source), source.key))
    return results


def _names(source: Source) -> list[str]:
    """What clients may ask for."""
    if not isinstance(source.decoded, ModelRoute):
        return []
    spec = source.decoded.spec
    return [*([spec.model_name] if spec.model_name is not None else []), *spec.lora_adapters]


def _repeated(source: Source) -> str:
    names = _names(source)
    repeated = sorted({name for name in names if names.count(name) > 1})
    return f"{', '.join(repeated)} is there twice among modelName and loraAdapters" if repeated else ""


def _compile(source: Source, servers: Collection[str]) -> RouteResult:
    missing: set[str] = set()
    absent: list[str] = []
    rules = [_rule(source, rule, servers, missing, absent) for rule in source.spec["rules"]]
    resolved = holds("ResolvedRefs", "all its ModelServers are there")
    if absent:
        said = f"no usable ModelServer {', '.join(dict.fromkeys(absent))}"
        share = "rules without another target are answered 503" if missing else "the other targets serve its requests"
        resolved = fails("ResolvedRefs", "BackendNotFound", f"{said}; {share}")
    document = source.document({**source.spec, "rules": rules})
    return _result(
        source, document, (holds("Accepted", NO_MISTAKE), resolved, holds("Programmed", IN_DIRECTORY)), missing
    )


def _rule(
    source: Source, rule: Mapping[str, Any], servers: Collection[str], missing: set[str], absent: list[str]
) -> Mapping[str, Any]:
    """The rule with the targets that are there; with all of them if none is, for that must not make it a rule less."""
    targets = rule["targetModels"]
    keys = [object_key(source.namespace, target["modelServerName"]) for target in targets]
    absent.extend(key for key in keys if key not in servers)
    present = [target for target, key in zip(targets, keys, strict=True) if key in servers]
    if any(target.get("weight", 100) for target in present):
        return {**rule, "targetModels": present}
    missing.update(key for key in keys if key not in servers)
    return rule


def _refused(source: Source, reason: str, message: str) -> RouteResult:
    conditions = (fails("Accepted", reason, message), fails("Programmed", reason, "the route is not served"))
    return _result(source, None, conditions)


def _result(
    source: Source, document: bytes | None, conditions: tuple[Wanted, ...], missing: Collection[str] = ()
) -> RouteResult:
    status = WantedStatus(kind=source.kind, key=source.key, generation=source.generation, conditions=conditions)
    return RouteResult(document, frozenset(missing), status)

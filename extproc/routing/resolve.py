# SPDX-License-Identifier: Apache-2.0
"""From the model that a client asks for to the ModelServer that answers: ModelRoutes, their rules, their weights."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec

from extproc.errors import UnknownModel
from extproc.routing.match import Condition, compile_match

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Mapping

    from extproc.config.model_route import ModelRoute, RouteRule
    from extproc.config.snapshot import Snapshot

_SHOWN_CHARACTERS = 100


class Destination(msgspec.Struct, frozen=True):
    """Where a request goes: the ModelServer, and the model name that its engines know (base model or adapter).

    ``server`` and ``route``: ``namespace/name``; the route's limits hold. ``priority`` and ``ttft_s``: what the rule
    says of its requests. ``base_model``: the route's ``modelName``, empty if it has none.
    """

    server: str
    model: str
    route: str = ""
    priority: int = 0
    ttft_s: float | None = None
    base_model: str = ""


class ListedModel(msgspec.Struct, frozen=True):
    """A name that clients can ask for; ``parent`` is the base model's name if it is an adapter."""

    name: str
    parent: str | None


class _Rule(msgspec.Struct, frozen=True):
    holds: Condition
    destinations: tuple[Destination, ...]
    cumulative_weights: tuple[int, ...]


class _Route(msgspec.Struct, frozen=True):
    name: str
    rules: tuple[_Rule, ...]


class RoutingTable:
    """All ModelRoutes of a snapshot, by the names that clients ask for."""

    def __init__(self, snapshot: Snapshot) -> None:
        served = {server.metadata.key: server.spec.model for server in snapshot.servers}
        self._routes: dict[str, _Route] = {}
        self.models: list[ListedModel] = []
        for route in snapshot.routes:
            base = route.spec.model_name
            if base is not None:
                self._routes[base] = _compile(route, served, adapter=None)
                self.models.append(ListedModel(base, None))
            for adapter in route.spec.lora_adapters:
                self._routes[adapter] = _compile(route, served, adapter=adapter)
                self.models.append(ListedModel(adapter, base))
        self._adapters: dict[str, frozenset[str]] = {}
        for route in snapshot.routes:
            for server in {route.server_key(target) for rule in route.spec.rules for target in rule.target_models}:
                self._adapters[server] = self._adapters.get(server, frozenset()) | set(route.spec.lora_adapters)

    def knows(self, model: str) -> bool:
        """Whether a route serves that name."""
        return model in self._routes

    def adapters_of(self, server: str) -> frozenset[str]:
        """The adapters for which requests may reach ``server``."""
        return self._adapters.get(server, frozenset())

    def destinations(self, model: str) -> Iterator[Destination]:
        """All that requests for ``model`` can come to, whatever their headers and paths."""
        route = self._routes.get(model)
        for rule in () if route is None else route.rules:
            yield from rule.destinations

    def resolve(self, model: str, headers: Mapping[str, str], path: str, rng: random.Random) -> Destination:
        """The destination that the first matching rule's weights choose; raises UnknownModel."""
        return _choose(self._rule(model, headers, path), rng)

    def resolve_among(
        self,
        model: str,
        headers: Mapping[str, str],
        path: str,
        rng: random.Random,
        *,
        may: Callable[[Destination], bool],
    ) -> Destination | None:
        """The same among the destinations that ``may`` lets the caller use; None if there are none of them.

        A rule decides for everybody alike; only its weights are shared out anew.
        """
        rule = self._rule(model, headers, path)
        are_open = [may(one) for one in rule.destinations]
        if all(are_open):
            return _choose(rule, rng)
        bounds = rule.cumulative_weights
        weights = [bound - before for before, bound in zip((0, *bounds), bounds, strict=False)]
        found = [
            pair
            for pair, is_open in zip(zip(rule.destinations, weights, strict=True), are_open, strict=True)
            if is_open
        ]
        if not found:
            return None
        left = tuple(accumulate(weight for _, weight in found))
        return _choose(_Rule(rule.holds, tuple(one for one, _ in found), left), rng)

    def _rule(self, model: str, headers: Mapping[str, str], path: str) -> _Rule:
        route = self._routes.get(model)
        if route is None:
            shown = model if len(model) <= _SHOWN_CHARACTERS else model[:_SHOWN_CHARACTERS] + "..."
            message = f"The model '{shown}' does not exist; GET /v1/models lists those that do."
            raise UnknownModel(message, param="model")
        for rule in route.rules:
            if rule.holds is None or rule.holds(headers, path):
                return rule
        raise UnknownModel(f"No rule of the route '{route.name}' takes this request's headers and path.", param="model")


def _choose(rule: _Rule, rng: random.Random) -> Destination:
    if len(rule.destinations) == 1:
        return rule.destinations[0]
    drawn = rng.randrange(rule.cumulative_weights[-1])
    return next(
        destination
        for destination, bound in zip(rule.destinations, rule.cumulative_weights, strict=True)
        if drawn < bound
    )


def _compile(route: ModelRoute, served: Mapping[str, str], *, adapter: str | None) -> _Route:
    rules = tuple(_compile_rule(route, rule, served, adapter) for rule in route.spec.rules)
    return _Route(route.metadata.key, rules)


def _compile_rule(route: ModelRoute, rule: RouteRule, served: Mapping[str, str], adapter: str | None) -> _Rule:
    targets = [target for target in rule.target_models if target.weight]
    ttft_s = None if rule.ttft_target is None else float(rule.ttft_target)
    return _Rule(
        holds=compile_match(rule.model_match),
        destinations=tuple(
            Destination(
                server,
                adapter or served[server],
                route.metadata.key,
                rule.priority,
                ttft_s,
                route.spec.model_name or "",
            )
            for server in map(route.server_key, targets)
        ),
        cumulative_weights=tuple(accumulate(target.weight for target in targets)),
    )

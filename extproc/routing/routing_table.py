# SPDX-License-Identifier: Apache-2.0
"""From the model that a client asks for to the ModelServer that answers: ModelRoutes, their rules, their weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from itertools import accumulate, chain, compress
from typing import TYPE_CHECKING

import msgspec

from extproc.api.fallback import Fallback, FallbackRetry
from extproc.api.match_patterns import compile_expression
from extproc.api.spec import STEPS_LISTENER
from extproc.refusals import UnknownModel
from extproc.request.parameter_overrides import Overrides
from extproc.routing.body_match import BodyConditions, BodyFieldReader, compile_body_conditions
from extproc.routing.cost_tiers import CompiledTiers, compile_tiers
from extproc.routing.mirror import CompiledMirror
from extproc.routing.sticky_split import StickySplit

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Iterator

    from extproc.api.config_snapshot import Snapshot
    from extproc.api.model_route import ModelMatch, ModelRoute, RouteRule, StringMatch, TargetModel
    from extproc.request.inference_request import InferenceRequest

# Over headers (lower-case names) and path; None always holds.
Condition = Callable[[Mapping[str, str], str], bool] | None
# Of each ModelServer, the engines' name of its model, and their protocol.
_ServedModels = Mapping[str, tuple[str, str]]
_SHOWN_CHARACTERS = 100


def compile_match(match: ModelMatch | None) -> Condition:
    """The condition that a rule states."""
    if match is None:
        return None
    headers = [(name.lower(), compile_string_match(condition)) for name, condition in match.headers.items()]
    uri = compile_string_match(match.uri) if match.uri is not None else None

    def holds(given: Mapping[str, str], path: str) -> bool:
        if uri is not None and not uri(path):
            return False
        return all(name in given and condition(given[name]) for name, condition in headers)

    return holds


def compile_string_match(match: StringMatch) -> Callable[[str], bool]:
    """A predicate over a whole value, whose characters are the bytes that the client sent."""
    if match.exact is not None:
        return _as_sent(match.exact).__eq__
    if match.prefix is not None:
        prefix = _as_sent(match.prefix)
        return lambda value: value.startswith(prefix)
    matches = compile_expression(match.regex or "")
    return lambda value: matches(value.encode("latin-1", "replace"))


def _as_sent(text: str) -> str:
    """Headers are read byte by byte, as they have no encoding; what is configured is sent as UTF-8."""
    return text.encode().decode("latin-1")


class RuleSettings(msgspec.Struct, frozen=True):
    """What a rule has for all of its requests. ``title``: its place and name, empty if the route has one rule alone.
    ``ttft_s``: the target for the first token. ``tiers``: None if requests go by weight. ``mirror``: None without
    copies. ``renames_answers``: answers have the name that the client asked for, and not that of the engines.
    """

    title: str = ""
    priority: int = 0
    ttft_s: float | None = None
    tiers: CompiledTiers | None = None
    mirror: CompiledMirror | None = None
    renames_answers: bool = False


class FallbackSettings(msgspec.Struct, frozen=True):
    """When requests go to a fallback, and how it answers. ``takes``: after these classes of failures and refusals.
    ``after_queue_s``: after this wait, None: no wait is a reason. ``is_degraded``: its answers are marked.
    ``max_output_tokens``: of its answers, where that is less than clients may ask for.
    """

    takes: tuple[str, ...] = ()
    after_queue_s: float | None = None
    is_degraded: bool = False
    max_output_tokens: int | None = None


class Destination(msgspec.Struct, frozen=True):
    """Where a request goes: the ModelServer, and the model's name at its engines (base model or adapter).

    ``server`` and ``route``: ``namespace/name``; the route's limits hold. ``base_model``: the route's ``modelName``,
    empty if it has none. ``protocol``: that its engines speak. ``overrides``: what requests get that go here, None:
    nothing, and of a fallback nothing beyond what its target had. ``arm``: which of the targets with this ModelServer
    it is. ``fallbacks``: None if its rule has none. ``is_fallback``: it is one itself, ``as_fallback``, and its
    ``fallbacks`` are those behind it. ``is_copy``: it gets a copy, whose answer nobody reads.
    """

    server: str
    model: str
    route: str = ""
    base_model: str = ""
    protocol: str = "OpenAI"
    rule: RuleSettings = RuleSettings()
    overrides: Overrides | None = None
    arm: int = 0
    fallbacks: Fallbacks | None = None
    is_fallback: bool = False
    as_fallback: FallbackSettings = FallbackSettings()
    is_copy: bool = False


class Fallbacks(msgspec.Struct, frozen=True):
    """Where a request may go that its ModelServer cannot serve. ``chain``: in this order. ``fallback``, ``retry``: as
    the rule has them.
    """

    chain: tuple[Destination, ...]
    fallback: tuple[Fallback, ...]
    retry: FallbackRetry

    def budget(self, in_flight: float) -> float:
        """How many of the rule's requests one of ``chain`` may have that has ``in_flight`` in all."""
        return max(float(self.retry.min_concurrency), in_flight * self.retry.budget_percent / 100)


class ListedModel(msgspec.Struct, frozen=True):
    """A name that clients can ask for; ``parent`` is the base model's name if it is an adapter."""

    name: str
    parent: str | None


class RuleTargets(msgspec.Struct, frozen=True):
    """The destinations of a rule, or some of them. ``protocol``: that all of them speak, empty if they differ.
    ``sticky``: None if each request is drawn by itself.
    """

    destinations: tuple[Destination, ...]
    weights: tuple[int, ...]
    protocol: str
    sticky: StickySplit | None = None

    def sticky_destination(self, sticky: StickySplit, key: bytes) -> Destination:
        """The one of ``key``."""
        names = [f"{one.server}#{one.arm}" if one.arm else one.server for one in self.destinations]
        return self.destinations[sticky.choose(names, self.weights, key)]

    def draw(self, rng: random.Random, key_of: Callable[[StickySplit], bytes] = lambda _: b"") -> Destination:
        """One of them, by weight. ``key_of``: the key of the request, by ``sticky``; empty: it has none."""
        if len(self.destinations) == 1:
            return self.destinations[0]
        if self.sticky is not None and (key := key_of(self.sticky)):
            return self.sticky_destination(self.sticky, key)
        drawn, bounds = rng.randrange(sum(self.weights)), accumulate(self.weights)
        return next(one for one, bound in zip(self.destinations, bounds, strict=True) if drawn < bound)

    def filtered(self, may: Callable[[Destination], bool]) -> RuleTargets | None:
        """Those that ``may`` lets through, with their weights; None if there are none."""
        are_open = [may(one) for one in self.destinations]
        if all(are_open):
            return self
        found = tuple(compress(self.destinations, are_open))
        return _targets(found, compress(self.weights, are_open), self.sticky) if found else None

    def with_protocols(self, protocols: Collection[str]) -> RuleTargets | None:
        """Those that speak one of ``protocols``; None if there are none."""
        return self if self.protocol in protocols else self.filtered(lambda one: one.protocol in protocols)


def _targets(destinations: tuple[Destination, ...], weights: Iterable[int], sticky: StickySplit | None) -> RuleTargets:
    spoken = {one.protocol for one in destinations}
    return RuleTargets(destinations, tuple(weights), spoken.pop() if len(spoken) == 1 else "", sticky)


class _Rule(msgspec.Struct, frozen=True):
    """``body``: None if it has no conditions on bodies."""

    holds: Condition
    targets: RuleTargets
    body: BodyConditions | None = None


class _Route(msgspec.Struct, frozen=True):
    name: str
    base_model: str
    rules: tuple[_Rule, ...]
    # None if no rule has conditions on bodies
    reader: BodyFieldReader | None = None


class _Served(msgspec.Struct, frozen=True):
    """The routes of one listener by the names that clients ask for, and these names."""

    routes: dict[str, _Route]
    models: list[ListedModel]
    by_name: dict[str, ListedModel]


_NOTHING = _Served({}, [], {})


class RoutingTable:
    """All ModelRoutes of a snapshot, by the names that clients ask for."""

    def __init__(self, snapshot: Snapshot, before: RoutingTable | None = None) -> None:
        """``before``: the table in use; what has not changed since is not compiled again."""
        served = {server.metadata.key: (server.spec.model, server.spec.protocol) for server in snapshot.servers}
        known = {} if before is None or before.served_models != served else before.compiled
        self.served_models: _ServedModels = served
        # by identity: the loader gives a route that has not changed again as the same object
        self.compiled: Mapping[int, tuple[ModelRoute, list[tuple[ListedModel, _Route]]]] = {
            id(route): known.get(id(route)) or (route, _compile_all(route, served)) for route in snapshot.routes
        }
        compiled = list(self.compiled.values())
        # by listener; "": of all listeners, of which the first route for a name counts
        self._served = {"": _serve(found for route, found in compiled if route.serves_listener(None))}
        for name in (STEPS_LISTENER, *(one.name for one in snapshot.gateway.listeners)):
            self._served[name] = _serve(found for route, found in compiled if route.serves_listener(name))
        self._adapters: dict[str, frozenset[str]] = {}
        # ModelServers that routes ask for their own model, not for adapters alone
        self.asked_by_model: set[str] = set()
        for route in snapshot.routes:
            targets = {route.server_key(target) for rule in route.spec.rules for target in rule.target_models}
            if route.spec.model_name is not None:
                self.asked_by_model |= route.server_keys
            for server in targets:
                self._adapters[server] = self._adapters.get(server, frozenset()) | set(route.spec.lora_adapters)

    @property
    def models(self) -> list[ListedModel]:
        """The names that clients can ask for."""
        return self._served[""].models

    def models_on(self, listener: str) -> list[ListedModel]:
        """The same of one listener; an empty name: of all."""
        return self._of(listener).models

    def model_on(self, listener: str, name: str) -> ListedModel | None:
        """One of these."""
        return self._of(listener).by_name.get(name)

    def serves_model(self, model: str) -> bool:
        """Whether a route serves that name."""
        return model in self._served[""].routes

    def route_of(self, model: str, listener: str) -> tuple[str, str]:
        """The ModelRoute that serves that name on ``listener``, and its base model; two empty strings if none does."""
        route = self._of(listener).routes.get(model)
        return ("", "") if route is None else (route.name, route.base_model)

    def adapters_of(self, server: str) -> frozenset[str]:
        """The adapters for which requests may reach ``server``."""
        return self._adapters.get(server, frozenset())

    def destinations(self, model: str, listener: str = "") -> Iterator[Destination]:
        """All that requests for ``model`` can come to, whatever their headers and paths."""
        route = self._of(listener).routes.get(model)
        for rule in () if route is None else route.rules:
            yield from rule.targets.destinations

    def targets(
        self,
        model: str,
        headers: Mapping[str, str],
        path: str,
        request: InferenceRequest | None = None,
        body: bytes = b"",
        *,
        listener: str = "",
    ) -> RuleTargets:
        """Those of the first matching rule; raises UnknownModel. ``request``, ``body``: None and empty if the body is
        not read. ``listener``: that was asked; an empty name: the routes of all.
        """
        route = self._of(listener).routes.get(model)
        if route is None:
            shown = model if len(model) <= _SHOWN_CHARACTERS else model[:_SHOWN_CHARACTERS] + "..."
            message = f"The model '{shown}' does not exist; GET /v1/models lists those that do."
            raise UnknownModel(message, param="model")
        tops = None
        for rule in route.rules:
            if rule.holds is not None and not rule.holds(headers, path):
                continue
            if rule.body is None:
                return rule.targets
            if request is None or route.reader is None:
                continue
            tops = route.reader.read(request, body) if tops is None else tops
            if tops is not None and rule.body.are_met(request, tops):
                return rule.targets
        what = "headers and path" if route.reader is None else "headers, path and body"
        raise UnknownModel(f"No rule of the route '{route.name}' takes this request's {what}.", param="model")

    def _of(self, listener: str) -> _Served:
        """A listener that is not configured any more serves nothing."""
        return self._served.get(listener, _NOTHING)


def _compile_all(route: ModelRoute, served: _ServedModels) -> list[tuple[ListedModel, _Route]]:
    """All names of ``route``."""
    base = route.spec.model_name
    found = [] if base is None else [(ListedModel(base, None), _compile(route, served, adapter=None))]
    found.extend(
        (ListedModel(adapter, base), _compile(route, served, adapter=adapter)) for adapter in route.spec.lora_adapters
    )
    return found


def _serve(found: Iterable[list[tuple[ListedModel, _Route]]]) -> _Served:
    served = _Served({}, [], {})
    for listed, route in chain.from_iterable(found):
        if listed.name not in served.routes:
            served.routes[listed.name] = route
            served.models.append(listed)
            served.by_name[listed.name] = listed
    return served


def _compile(route: ModelRoute, served: _ServedModels, *, adapter: str | None) -> _Route:
    rules = tuple(_compile_rule(route, number, served, adapter) for number in range(len(route.spec.rules)))
    conditions = [rule.body for rule in rules if rule.body is not None]
    reader = BodyFieldReader(set().union(*(one.top_level_fields for one in conditions))) if conditions else None
    return _Route(route.metadata.key, route.spec.model_name or "", rules, reader)


def _compile_rule(route: ModelRoute, number: int, served: _ServedModels, adapter: str | None) -> _Rule:
    rule = route.spec.rules[number]
    # a ModelServer may stand there several times, with other parameters
    arms = Counter[tuple[str, Overrides | None]]()
    for target in rule.target_models:
        arms[route.server_key(target), _compile_overrides(rule, target)] += target.weight
    mirror = rule.mirror
    terms = RuleSettings(
        title=f"rules[{number}]{f' ({rule.name})' if rule.name else ''}" if len(route.spec.rules) > 1 else "",
        priority=rule.priority,
        ttft_s=None if rule.ttft_target is None else float(rule.ttft_target),
        tiers=compile_tiers(rule),
        mirror=None
        if mirror is None
        else CompiledMirror(route.server_key(mirror), mirror.percent, mirror.max_output_tokens),
        renames_answers=route.spec.response_model == "Requested",
    )

    def destination(server: str, fallbacks: Fallbacks | None) -> Destination:
        model, protocol = served[server]
        return Destination(
            server,
            adapter or model,
            route.metadata.key,
            base_model=route.spec.model_name or "",
            protocol=protocol,
            rule=terms,
            fallbacks=fallbacks,
        )

    fallbacks = _compile_fallbacks(route, rule, destination)
    found, weights, count = list[Destination](), list[int](), Counter[str]()
    for (server, overrides), weight in arms.items():
        if weight:
            own = destination(server, fallbacks)
            found.append(msgspec.structs.replace(own, overrides=overrides, arm=count[server]))
            weights.append(weight)
        count[server] += 1
    sticky = None if rule.sticky == "None" else StickySplit(rule.sticky, route.metadata.key)
    targets = _targets(tuple(found), weights, sticky)
    return _Rule(compile_match(rule.model_match), targets, compile_body_conditions(rule.model_match))


def _compile_overrides(rule: RouteRule, target: TargetModel) -> Overrides | None:
    """None if requests go there as they are."""
    fields = tuple((name, msgspec.json.encode(value)) for name, value in {**rule.set_, **target.set_}.items())
    limits = [one for one in (rule.max_output_tokens, target.max_output_tokens) if one is not None]
    return Overrides(fields, min(limits, default=None)) if fields or limits else None


def _compile_fallbacks(
    route: ModelRoute, rule: RouteRule, destination: Callable[[str, Fallbacks | None], Destination]
) -> Fallbacks | None:
    """From the last to the first: each has those behind it."""
    if not rule.fallback:
        return None
    found = Fallbacks((), rule.fallback, rule.fallback_retry)
    for one in reversed(rule.fallback):
        terms = FallbackSettings(
            takes=one.on,
            after_queue_s=None if one.after_queue is None else float(one.after_queue),
            is_degraded=one.degraded,
            max_output_tokens=None if one.degrade is None else one.degrade.max_output_tokens,
        )
        own = destination(route.server_key(one), found)
        # its place is given, whatever the price
        rule_terms = msgspec.structs.replace(own.rule, tiers=None)
        own = msgspec.structs.replace(own, rule=rule_terms, is_fallback=True, as_fallback=terms)
        found = msgspec.structs.replace(found, chain=(own, *found.chain))
    return found

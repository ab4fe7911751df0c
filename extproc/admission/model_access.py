# SPDX-License-Identifier: Apache-2.0
"""Authorisation of requests for models: one decision for keys, tenants and ModelAccessPolicies.

All of them are scopes. A scope denies what one of its ``Deny`` rules covers, and else allows what one of its ``Allow``
rules covers. A request is in scopes of its caller (its key and its tenant may have lists of models) and of its target
(its namespace, listener, HTTPRoute, ModelRoute and ModelServer may have policies). It is admitted if each of its scopes
allows it, or if it is in none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.admission.identity import CallerIdentity, CallerMatcher, caller_matcher
from extproc.api.grpc_route import GRPC_ROUTE
from extproc.api.spec import namespace_of, object_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from extproc.api.access_policy import AccessCallers, AccessRule, AccessTarget
    from extproc.api.authentication import ApiKey
    from extproc.api.config_snapshot import Snapshot

_Target = tuple[str, str]
_EVERY_LISTENER: Final = ("Listener", "*")


class NamePatterns(msgspec.Struct, frozen=True):
    """Names, of which some begin or end with ``*``."""

    exact: frozenset[str]
    prefixes: tuple[str, ...]
    suffixes: tuple[str, ...]
    is_anything: bool

    def __contains__(self, name: object) -> bool:
        if self.is_anything:
            return True
        if not isinstance(name, str):
            return False
        return name in self.exact or name.startswith(self.prefixes) or name.endswith(self.suffixes)


def compile_name_patterns(texts: Iterable[str]) -> NamePatterns:
    """``*`` stands for any text at the beginning or the end of one."""
    given = set(texts)
    return NamePatterns(
        exact=frozenset(one for one in given if "*" not in one),
        prefixes=tuple(sorted(one[:-1] for one in given if len(one) > 1 and one.endswith("*"))),
        suffixes=tuple(sorted(one[1:] for one in given if len(one) > 1 and one.startswith("*"))),
        is_anything="*" in given,
    )


class AccessRequest(msgspec.Struct, frozen=True):
    """An access request. ``model``: the name in the request; None: it could not be read. ``base_model``: the
    ``modelName`` of its route, or the server's own model where no route has part. ``server``, ``route``,
    ``http_route``: ``namespace/name``, of a GRPCRoute ``grpc:namespace/name``; ``route`` and ``http_route`` are
    empty where they have no part. ``listener``: its name.
    """

    model: str | None
    base_model: str
    server: str
    route: str = ""
    http_route: str = ""
    listener: str = ""


_NOTHING: Final = compile_name_patterns(())
_ANYTHING: Final = compile_name_patterns("*")


class _Callers(msgspec.Struct, frozen=True):
    names: CallerMatcher
    claims: tuple[tuple[str, frozenset[str]], ...]

    def matches(self, subject: CallerIdentity) -> bool:
        return self.names.matches(subject.tenant, subject.user, subject.api_key) and all(
            not values.isdisjoint(subject.claims.get(name, ())) for name, values in self.claims
        )


class _Rule(msgspec.Struct, frozen=True):
    """``callers``: empty for everybody."""

    callers: tuple[_Callers, ...]
    models: NamePatterns
    base_models: NamePatterns
    servers: NamePatterns

    @property
    def is_for_everything(self) -> bool:
        return (self.models.is_anything or self.base_models.is_anything) and self.servers.is_anything

    def is_about(self, subject: CallerIdentity) -> bool:
        return not self.callers or any(one.matches(subject) for one in self.callers)

    def covers(self, wish: AccessRequest, *, unread: bool) -> bool:
        """``unread``: what to assume of a name that could not be read, unless any name would do."""
        if wish.server not in self.servers:
            return False
        if wish.base_model in self.base_models or wish.model in self.models:
            return True
        return unread and wish.model is None and self.models != _NOTHING


class _Rules(msgspec.Struct, frozen=True):
    """Rules of one action. ``by_tenant``: rules for named tenants alone; a request is compared with those of its own
    tenant, however many there are.
    """

    by_tenant: Mapping[str, tuple[_Rule, ...]]
    others: tuple[_Rule, ...]

    def about(self, subject: CallerIdentity) -> Iterator[_Rule]:
        for one in self.by_tenant.get(subject.tenant, ()):
            if one.is_about(subject):
                yield one
        for one in self.others:
            if one.is_about(subject):
                yield one


class _Scope(msgspec.Struct, frozen=True):
    """Rules that deny and rules that allow."""

    denies: _Rules
    allows: _Rules

    def admits(self, subject: CallerIdentity, wish: AccessRequest) -> bool:
        """Whether the scope allows the request. One whose body cannot be read matches every ``Deny`` rule: fail
        closed.
        """
        if any(one.covers(wish, unread=True) for one in self.denies.about(subject)):
            return False
        return any(one.covers(wish, unread=False) for one in self.allows.about(subject))

    def admits_everything(self, subject: CallerIdentity) -> bool:
        """Whether no request of the caller's could be refused here, whatever it is for."""
        if any(True for _ in self.denies.about(subject)):
            return False
        return any(one.is_for_everything for one in self.allows.about(subject))


_NO_RULES: Final = _Rules({}, ())
_NOBODY: Final = _Scope(_NO_RULES, _NO_RULES)


class Authorizer:
    """Authorises requests by one configuration. ``restricts``: whether it can refuse any request. ``claims``: those
    that its rules name.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        gateway = snapshot.gateway
        keys = () if gateway.authentication is None else gateway.authentication.api_keys
        self._tenants = {one.name: _listed(one.models) for one in gateway.tenants if one.models is not None}
        self._keys = {one.name: _of_key(one) for one in keys}
        self._targets = _scopes(snapshot)
        # by server, the scopes of the ModelRoutes that lead to it
        self._leading_to = _leading_to(snapshot, self._targets)
        self.restricts = bool(self._tenants or self._targets or any(one.models is not None for one in keys))
        self.claims = frozenset(
            claim.name
            for policy in snapshot.access_policies
            for rule in policy.spec.rules
            for callers in rule.from_
            for claim in callers.claims
        )

    def may_use(self, subject: CallerIdentity, request: AccessRequest) -> bool:
        """Whether the request may go."""
        if not self.restricts:
            return True
        return all(one.admits(subject, request) for one in self._scopes_of(subject, request))

    def may_use_everything(self, subject: CallerIdentity) -> bool:
        """Whether no route refuses the caller anything: it may list all models."""
        if not self.restricts:
            return True
        scopes = [*self._scopes_of_subject(subject), *self._targets.values()]
        return all(one.admits_everything(subject) for one in scopes)

    def _scopes_of(self, subject: CallerIdentity, wish: AccessRequest) -> Iterator[_Scope]:
        yield from self._scopes_of_subject(subject)
        for target in _targets_of(wish):
            scope = self._targets.get(target)
            if scope is not None:
                yield scope
        if wish.model is None:
            # it may be for anything that a route to these engines serves
            yield from self._leading_to.get(wish.server, ())

    def _scopes_of_subject(self, subject: CallerIdentity) -> Iterator[_Scope]:
        scope = self._tenants.get(subject.tenant)
        if scope is not None:
            yield scope
        if subject.api_key:
            # a key that Envoy has and this configuration has not (yet, or any more) may use nothing
            key = self._keys.get(subject.api_key, _NOBODY)
            if key is not None:
                yield key


def _targets_of(wish: AccessRequest) -> Iterator[_Target]:
    yield "Namespace", namespace_of(wish.server)
    yield "ModelServer", wish.server
    if wish.route:
        yield "ModelRoute", wish.route
        if namespace_of(wish.route) != namespace_of(wish.server):
            yield "Namespace", namespace_of(wish.route)
    if wish.http_route:
        # a GRPCRoute is named with its kind
        kind = "GRPCRoute" if wish.http_route.startswith(GRPC_ROUTE) else "HTTPRoute"
        yield kind, wish.http_route.removeprefix(GRPC_ROUTE)
    if wish.listener:
        yield "Listener", wish.listener
    yield _EVERY_LISTENER


def _listed(models: Iterable[str]) -> _Scope:
    return _Scope(_NO_RULES, _Rules({}, (_Rule((), compile_name_patterns(models), _NOTHING, _ANYTHING),)))


def _of_key(key: ApiKey) -> _Scope | None:
    return None if key.models is None else _listed(key.models)


def _scopes(snapshot: Snapshot) -> dict[_Target, _Scope]:
    """By target."""
    rules: dict[_Target, list[AccessRule]] = {}
    for policy in snapshot.access_policies:
        namespace = policy.metadata.namespace
        targets = [_target(namespace, one) for one in policy.spec.target_refs] or [("Namespace", namespace)]
        for target in dict.fromkeys(targets):
            rules.setdefault(target, []).extend(policy.spec.rules)
    return {target: _scope(found) for target, found in rules.items()}


def _leading_to(snapshot: Snapshot, targets: Mapping[_Target, _Scope]) -> dict[str, list[_Scope]]:
    found: dict[str, list[_Scope]] = {}
    for route in snapshot.routes:
        scope = targets.get(("ModelRoute", route.metadata.key))
        if scope is not None:
            for server in route.server_keys:
                found.setdefault(server, []).append(scope)
    return found


def _target(namespace: str, one: AccessTarget) -> _Target:
    if one.kind in {"Gateway", "GatewayConfig"}:
        return _EVERY_LISTENER if one.section_name is None else ("Listener", one.section_name)
    return one.kind, object_key(namespace, one.name)


def _scope(rules: Iterable[AccessRule]) -> _Scope:
    compiled = [(one.action, _rule(one)) for one in rules]
    denies, allows = (_rules(rule for action, rule in compiled if action == wanted) for wanted in ("Deny", "Allow"))
    return _Scope(denies, allows)


def _rules(rules: Iterable[_Rule]) -> _Rules:
    by_tenant: dict[str, list[_Rule]] = {}
    others: list[_Rule] = []
    for rule in rules:
        tenants = [one.names.tenants for one in rule.callers if one.names.tenants is not None]
        if not rule.callers or len(tenants) < len(rule.callers):
            others.append(rule)
            continue
        for tenant in frozenset().union(*tenants):
            by_tenant.setdefault(tenant, []).append(rule)
    return _Rules({tenant: tuple(found) for tenant, found in by_tenant.items()}, tuple(others))


def _rule(one: AccessRule) -> _Rule:
    names_none = not one.models and not one.base_models
    return _Rule(
        callers=tuple(_callers(callers) for callers in one.from_),
        models=_ANYTHING if names_none else compile_name_patterns(one.models),
        base_models=compile_name_patterns(one.base_models),
        servers=compile_name_patterns(one.servers) if one.servers else _ANYTHING,
    )


def _callers(one: AccessCallers) -> _Callers:
    return _Callers(
        names=caller_matcher(one.tenants, one.users, one.api_keys),
        claims=tuple((claim.name, frozenset(claim.values)) for claim in one.claims),
    )

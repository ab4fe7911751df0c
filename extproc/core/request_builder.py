# SPDX-License-Identifier: Apache-2.0
"""From a message's headers and body to an arrival: refuse what can be refused, parse, authorize, route, identify."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.admission.access import Access, Wish
from extproc.admission.identity import ANONYMOUS_CALLER, ANONYMOUS_SUBJECT, Subject
from extproc.api.spec import namespace_of
from extproc.core.record import Arrival, Head
from extproc.errors import (
    BadRequest,
    MethodNotAllowed,
    ModelNotAllowed,
    NoEndpoint,
    Refusal,
    SteeringRefused,
    UnknownModel,
    UnknownPath,
)
from extproc.protocol import APIS_BY_PATH, MODEL_REWRITES, MODELS_PATH, Api, api_of_path
from extproc.request.model import STEERING_FIELDS, InferenceRequest, no_model
from extproc.request.parsing import api_by_body, no_body, parse, steering_of_unread
from extproc.routing.resolve import Destination, RoutingTable

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping

    from extproc.admission.identity import CacheIsolation, Identities
    from extproc.api.model_server import ModelServerSpec
    from extproc.core.queue import AdmissionController
    from extproc.routing.resolve import ListedModel
    from extproc.scheduling.pool import Pool

_SHOWN_CHARACTERS = 100


class WhoMay:
    """The decision by one configuration."""

    def __init__(self, access: Access, identities: Identities, routing: RoutingTable) -> None:
        self._access = access
        self._identities = identities
        self._routing = routing

    def visit(self, head: Head) -> Visit | None:
        """The caller of a request; None if nobody is refused anything."""
        if not self._access.restricts:
            return None
        subject = self._identities.subject(head.headers, head.claims) if head.is_trusted else ANONYMOUS_SUBJECT
        return Visit(self._access, self._routing, subject, head)


class Visit(msgspec.Struct, frozen=True):
    """One request's caller."""

    access: Access
    routing: RoutingTable
    subject: Subject
    head: Head

    def may(self, model: str | None, destination: Destination) -> bool:
        """Whether it may ask for ``model`` there. None: the body's model could not be read."""
        wish = Wish(
            model=model,
            base_model=destination.base_model,
            server=destination.server,
            route=destination.route,
            http_route=self.head.http_route,
            listener=self.head.listener,
        )
        return self.access.may_use(self.subject, wish)

    def may_list(self, model: str) -> bool:
        """Whether some request for ``model`` may go: it is listed, and its name is no secret."""
        return any(self.may(model, one) for one in self.routing.destinations(model, self.head.listener))

    def may_know(self, model: str) -> bool:
        """Whether the caller may be told that ``model`` does not exist.

        Others get the answer for models that they may not use, so that nobody finds models out by asking.
        """
        return self.may_list(model) or self.access.may_use_everything(self.subject)


def not_allowed(model: str | None) -> ModelNotAllowed:
    """The same words whether or not the model exists."""
    if model is None:
        return ModelNotAllowed("The model could not be read from this request, and you may not use every model.")
    return ModelNotAllowed(
        f"The model '{model[:_SHOWN_CHARACTERS]}' does not exist, or you may not use it; "
        f"GET {MODELS_PATH} lists those that you may.",
        param="model",
    )


# Lists of models that are kept, each of a caller.
_MOST_LISTS: Final = 64


class Intake:
    """Makes arrivals by one configuration: its routes, its servers' ``pools``, its callers."""

    def __init__(
        self,
        routing: RoutingTable,
        identities: Identities,
        isolation: CacheIsolation,
        who_may: WhoMay,
        pools: Mapping[str, Pool],
        admission: AdmissionController,
        rng: random.Random,
    ) -> None:
        self._routing = routing
        self._identities = identities
        self._isolation = isolation
        self._who_may = who_may
        self.pools = pools
        # the caller is identified only for servers with a queue or admitters, and routes with limits
        self._gated, self._limited = admission.gates, admission.routes
        self._rng = rng
        # of this configuration, by the caller
        self._lists: dict[tuple[str, ...], list[ListedModel]] = {}

    @property
    def models(self) -> list[ListedModel]:
        """The names that clients can ask for."""
        return self._routing.models

    def models_for(self, head: Head) -> list[ListedModel]:
        """Those of the listener's models that the caller may use."""
        listed, visit = self._routing.models_on(head.listener), self._who_may.visit(head)
        if visit is None:
            return listed
        subject = visit.subject
        # clients ask for the list at will, and thousands of models take long to judge
        key = (head.listener, head.http_route, subject.tenant, subject.user, subject.api_key)
        if not subject.claims and key in self._lists:
            return self._lists[key]
        found = [model for model in listed if visit.may_list(model.name)]
        if not subject.claims:
            if len(self._lists) >= _MOST_LISTS:
                del self._lists[next(iter(self._lists))]
            self._lists[key] = found
        return found

    def model_for(self, head: Head, name: str) -> ListedModel | None:
        """The listener's model of that name, if the caller may use it."""
        model, visit = self._routing.model_on(head.listener, name), self._who_may.visit(head)
        return model if model is None or visit is None or visit.may_list(name) else None

    @property
    def has_limits(self) -> bool:
        """Whether some route has: a request that cannot be read might be one of its requests."""
        return bool(self._limited)

    def admit(self, head: Head) -> Api:
        """Refuse what can be refused before the body is here."""
        api = APIS_BY_PATH.get(head.path)
        if api is None:
            known = ", ".join(APIS_BY_PATH)
            raise UnknownPath(
                f"Nothing is served under {head.method} {head.path[:100]}; there are {known}, {MODELS_PATH}."
            )
        if head.method != "POST":
            raise MethodNotAllowed(f"{head.path} takes POST, not {head.method[:20]}.")
        if not head.has_body:
            raise no_body(api)
        return api

    def take(self, head: Head, body: bytes, server: str = "") -> Arrival:
        """A whole request. ``server``: an HTTPRoute has chosen it; without one, by model. Raises a Refusal."""
        return self.receive_chosen(server, head, body) if server else self.receive(self.admit(head), head, body)

    def receive(self, api: Api, head: Head, body: bytes) -> Arrival:
        """Parse and route; raises a Refusal."""
        return self._by_route(parse(api, body, head.headers), head, body)

    def _by_route(self, request: InferenceRequest, head: Head, body: bytes) -> Arrival:
        if not request.model:
            raise no_model()
        visit = self._who_may.visit(head)
        found = self._routed(request.model, head, visit)
        return self._arrival(request, found, head, body, visit, is_routed=True)

    def elsewhere(self, arrival: Arrival) -> Arrival | None:
        """The same request at a ModelServer of its rule that has engines, if its own has none; None: there is none.

        Its route, rule and weights are those of the configuration in use.
        """
        head, model = arrival.head, arrival.request.model
        if not arrival.is_routed or not any(
            self._has_engines(one) for one in self._routing.destinations(model, head.listener)
        ):
            return None
        visit = self._who_may.visit(head)
        try:
            found = self._routed_to_engines(model, head, visit)
            if found is None:
                return None
            return self._arrival(arrival.request, found, head, arrival.body, visit, is_routed=True)
        except Refusal:
            # its route has left, or its caller may not use the other server: it stays where it is
            return None

    def receive_unread(self, server: str, head: Head, body: bytes) -> Arrival:
        """A request of no known API, for a gateway with a single pool: its body is only searched for steering fields.

        Raises a Refusal.
        """
        request = InferenceRequest(
            None,
            "",
            b"",
            is_streamed=False,
            stream_options={},
            max_output_tokens=None,
            internal_fields=steering_of_unread(body),
        )
        return self._direct(request, server, head, body)

    def receive_chosen(self, server: str, head: Head, body: bytes) -> Arrival:
        """A request for which an HTTPRoute has chosen ``server``, whatever its path and body; raises a Refusal.

        The model stays as the client wrote it. If a ModelRoute of the listener serves that model, its limits hold here,
        too: no request gets round them by another path.
        """
        api = api_of_path(head.path) if head.method == "POST" else None
        if api is None:
            return self.receive_unread(server, head, body)
        try:
            request = parse(api, body, head.headers)
        except BadRequest:
            # engines know more APIs and fields than we do, and say best what is wrong
            if self.has_limits:
                raise
            return self.receive_unread(server, head, body)
        return self._direct(request, server, head, body)

    def receive_for(self, server: str, api: Api, head: Head, body: bytes) -> Arrival:
        """Parse, and route to ``server`` unless a ModelRoute knows the model; raises a Refusal."""
        request = parse(api, body, head.headers)
        if self._routing.knows(request.model):
            return self._by_route(request, head, body)
        return self._direct(request, server, head, body)

    def receive_pooled(self, pool: str | None, head: Head, body: bytes) -> Arrival:
        """By our routes; what they do not know goes to ``pool``, whatever its path and body; raises a Refusal.

        None: the gateway has no pool.
        """
        if pool is None:
            return self.receive(self.admit(head), head, body)
        api = APIS_BY_PATH.get(head.path) if head.path else api_by_body(body, head.headers)
        if api is None:
            return self.receive_unread(pool, head, body)
        try:
            return self.receive_for(pool, api, head, body)
        except SteeringRefused:
            raise
        except BadRequest:
            # engines know more APIs and fields than we do, and say best what is wrong; but no request gets round a
            # limit so
            if self.has_limits:
                raise
            return self.receive_unread(pool, head, body)

    def _routed(self, model: str, head: Head, visit: Visit | None) -> Destination:
        """By the ModelRoutes, among what is open to the caller; raises a Refusal.

        Where the weights name a server without engines whose requests wait for one, another of the rule is taken that
        has some.
        """
        found = self._routed_by_weights(model, head, visit)
        pool = self.pools.get(found.server)
        if pool is None or pool.spec.activation is None or pool.readiness.can_serve:
            return found
        return self._routed_to_engines(model, head, visit) or found

    def _routed_to_engines(self, model: str, head: Head, visit: Visit | None) -> Destination | None:
        """The same among servers with engines; None if there are none."""

        def may(one: Destination) -> bool:
            return self._has_engines(one) and (visit is None or visit.may(model, one))

        return self._routing.resolve_among(model, head.headers, head.path, self._rng, may=may, listener=head.listener)

    def _has_engines(self, destination: Destination) -> bool:
        pool = self.pools.get(destination.server)
        return pool is not None and pool.readiness.can_serve

    def _routed_by_weights(self, model: str, head: Head, visit: Visit | None) -> Destination:
        if visit is None:
            return self._routing.resolve(model, head.headers, head.path, self._rng, listener=head.listener)
        may = partial(visit.may, model)
        try:
            found = self._routing.resolve_among(
                model, head.headers, head.path, self._rng, may=may, listener=head.listener
            )
        except UnknownModel:
            if visit.may_know(model):
                raise
            raise not_allowed(model) from None
        if found is None:
            raise not_allowed(model)
        return found

    def _direct(self, request: InferenceRequest, server: str, head: Head, body: bytes) -> Arrival:
        """To the ModelServer that the gateway asks for, under the name that the client asks for; raises a Refusal.

        If a ModelRoute of the listener serves that name, its limits and policies hold here, too.
        """
        pool, visit = self.pools.get(server), self._who_may.visit(head)
        route, base_model = self._routing.route_of(request.model, head.listener)
        if not route and pool is not None:
            base_model = pool.spec.model
        destination = Destination(server, _model_asked_of_engine(request, head), route, base_model=base_model)
        model = None if request.api is None else request.model
        if visit is not None and not visit.may(model, destination):
            raise not_allowed(model)
        return self._arrival(request, destination, head, body, visit)

    def _arrival(
        self,
        request: InferenceRequest,
        destination: Destination,
        head: Head,
        body: bytes,
        visit: Visit | None,
        *,
        is_routed: bool = False,
    ) -> Arrival:
        """Of a request that its caller may make."""
        pool = self.pools.get(destination.server)
        if pool is None:
            raise NoEndpoint(
                f"The ModelServer '{destination.server}' is not configured any more; "
                "add it, or send the request elsewhere."
            )
        _refuse_steering(request, pool.spec)
        caller = ANONYMOUS_CALLER
        if (
            visit is not None
            or pool.keeps_sessions
            or pool.admits is not None
            or self._isolation.asks_who
            or destination.server in self._gated
            or destination.route in self._limited
        ):
            caller = self._identities.caller(
                head.headers, namespace=namespace_of(destination.server), is_trusted=head.is_trusted
            )
        salt = self._isolation.salt(request, pool.spec, caller, head.headers)
        return Arrival(request, destination, pool, head, body, caller, salt, is_routed)


def _model_asked_of_engine(request: InferenceRequest, head: Head) -> str:
    """Where no ModelRoute decides: what a trusted gateway writes, else what the client asks for."""
    if head.is_trusted and request.api is not None:
        return next((head.headers[name] for name in MODEL_REWRITES if head.headers.get(name)), request.model)
    return request.model


def _refuse_steering(request: InferenceRequest, spec: ModelServerSpec) -> None:
    """Raise SteeringRefused if the client says where an engine connects or where the request runs, and may not."""
    for name in request.internal_fields:
        if name in STEERING_FIELDS and name not in spec.allowed_fields:
            raise SteeringRefused(f"The field '{name}' is for gateways, not for clients; leave it out.", param=name)

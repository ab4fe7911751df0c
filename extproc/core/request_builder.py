# SPDX-License-Identifier: Apache-2.0
"""From a message's headers and body to an arrival: refuse what can be refused, parse, authorize, route, identify."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

import msgspec

from extproc.admission.identity import ANONYMOUS_CALLER, ANONYMOUS_SUBJECT, Caller, CallerIdentity
from extproc.admission.model_access import AccessRequest, Authorizer
from extproc.api.spec import STEPS_LISTENER
from extproc.core.request_record import AllowedTargets, Arrival, RequestHead
from extproc.core.usage_log import usage_of_unrouted_refusal
from extproc.refusals import (
    BadRequest,
    MethodNotAllowed,
    ModelNotAllowed,
    ModelRepositoryRefused,
    NoEndpoint,
    Refusal,
    ReservedFieldRefused,
    UnknownModel,
    UnknownPath,
)
from extproc.request.body_parser import api_by_body, missing_body_refusal, parse_body, steering_fields_of_unread_body
from extproc.request.grpc_call import api_of_call, check_headers, read_call, refuse_repository_call
from extproc.request.inference_request import STEERING_FIELDS, InferenceRequest, ModelPath, missing_model_refusal
from extproc.request.json_rewrite import raw_top_level_fields, with_changes
from extproc.request.model_in_path import check_method, read_model_path, request_by_path, wrong_protocol_refusal
from extproc.request.parameter_overrides import Overrides, override_changes
from extproc.routing.mirror import read_directive
from extproc.routing.routing_table import Destination, RoutingTable, RuleSettings
from extproc.translate.directive import translation_target_api
from extproc.wire_names import (
    APIS_BY_CALL,
    APIS_BY_PATH,
    MIRROR,
    MIRRORED_TENANT,
    MODEL_REWRITES,
    MODELS_PATH,
    REPOSITORY_PATH,
    SERVER_CALLS,
    UNREAD_PROTOCOLS,
    Api,
    api_of_path,
    paths_of_apis,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from extproc.admission.identity import CacheIsolation, IdentityResolver
    from extproc.api.model_server import ModelRewrite, ModelServerSpec
    from extproc.api.usage_log import UsageContext
    from extproc.routing.routing_table import ListedModel, RuleTargets
    from extproc.routing.sticky_split import StickySplit
    from extproc.scheduling.pool import Pool

_SHOWN_CHARACTERS = 100
_VERSION: Final = "/v1"
_REPOSITORY: Final = re.compile(f"{REPOSITORY_PATH.replace('/', '/+')}(/|$)")
# Lists of models that are kept, each of a caller.
_MOST_LISTS: Final = 64
# Whose answers nobody reads: below all others.
_COPY_TERMS: Final = RuleSettings(priority=-(2**31))
_NOBODY: Final = Caller(tenant=MIRRORED_TENANT)


class CallerAccess(msgspec.Struct, frozen=True):
    """The access of one request's caller."""

    authorizer: Authorizer
    routing: RoutingTable
    subject: CallerIdentity
    head: RequestHead

    def may_use(self, model: str | None, destination: Destination) -> bool:
        """Whether the caller may use ``model`` there. None: the body's model could not be read."""
        wish = AccessRequest(
            model=model,
            base_model=destination.base_model,
            server=destination.server,
            route=destination.route,
            http_route=self.head.http_route,
            listener=self.head.listener,
        )
        return self.authorizer.may_use(self.subject, wish)

    def may_list(self, model: str) -> bool:
        """Whether some request for ``model`` may go: it is listed, and its name is no secret."""
        return any(self.may_use(model, one) for one in self.routing.destinations(model, self.head.listener))

    def may_see_missing(self, model: str) -> bool:
        """Whether the caller may get the answer that ``model`` does not exist.

        Others get the answer for models that they may not use, so that requests do not reveal which models exist.
        """
        return self.may_list(model) or self.authorizer.may_use_everything(self.subject)


def model_not_allowed_refusal(model: str | None) -> ModelNotAllowed:
    """The refusal, in the same words whether or not the model exists."""
    if model is None:
        return ModelNotAllowed("The model could not be read from this request, and you may not use every model.")
    return ModelNotAllowed(
        f"The model '{model[:_SHOWN_CHARACTERS]}' does not exist, or you may not use it; "
        f"GET {MODELS_PATH} lists those that you may.",
        param="model",
    )


def _path_advice(path: str) -> str:
    """What to write instead of a path that is not served."""
    bare = path.rstrip("/")
    for known in (*APIS_BY_PATH, MODELS_PATH):
        if bare == known:
            return f"leave the slash at its end out: {known}"
        if bare and known == f"{_VERSION}{bare}":
            return f"write {_VERSION} before it: {known}, or end the client's base URL in {_VERSION}"
        if known.startswith(_VERSION) and bare.endswith(known):
            return f"write {known}"
    return f"there are {', '.join(APIS_BY_PATH)}, {MODELS_PATH}"


class RequestBuilder:
    """Makes arrivals by one configuration: its routes, its servers' ``pools``, its callers."""

    def __init__(
        self,
        routing: RoutingTable,
        identities: IdentityResolver,
        isolation: CacheIsolation,
        authorizer: Authorizer,
        pools: Mapping[str, Pool],
        rng: random.Random,
        *,
        has_limits: bool,
    ) -> None:
        """``has_limits``: some route has limits, budgets or a guard: a request that cannot be read might be one of its
        requests.
        """
        self._routing = routing
        self._identities = identities
        self._isolation = isolation
        self._authorizer = authorizer
        self.pools = pools
        self.has_limits = has_limits
        self._rng = rng
        # of this configuration, by the caller
        self._lists: dict[tuple[str, ...], list[ListedModel]] = {}

    @property
    def models(self) -> list[ListedModel]:
        """The names that clients can ask for."""
        return self._routing.models

    def models_for(self, head: RequestHead) -> list[ListedModel]:
        """Those of the listener's models that the caller may use."""
        listed, caller_access = self._routing.models_on(head.listener), self._access_of(head)
        if caller_access is None:
            return listed
        subject = caller_access.subject
        # clients may request the list often, and access checks of thousands of models take long
        key = (head.listener, head.http_route, subject.tenant, subject.user, subject.api_key)
        if not subject.claims and key in self._lists:
            return self._lists[key]
        found = [model for model in listed if caller_access.may_list(model.name)]
        if not subject.claims:
            if len(self._lists) >= _MOST_LISTS:
                del self._lists[next(iter(self._lists))]
            self._lists[key] = found
        return found

    def model_for(self, head: RequestHead, name: str) -> ListedModel | None:
        """The listener's model of that name, if the caller may use it."""
        model, caller_access = self._routing.model_on(head.listener, name), self._access_of(head)
        return model if model is None or caller_access is None or caller_access.may_list(name) else None

    def unconditional_chat_targets(self, head: RequestHead, model: str) -> RuleTargets | None:
        """Where chats of the caller go whose bodies meet no conditions; None if no rule takes them."""
        access = self._access_of(head)
        try:
            found = self._routing.targets(model, head.headers, Api.CHAT.spec.paths[0], listener=head.listener)
        except UnknownModel:
            return None
        return found if access is None else found.filtered(lambda one: access.may_use(model, one))

    def tenant_of(self, head: RequestHead) -> str:
        """Of the caller."""
        return self._subject_of(head).tenant

    def _access_of(self, head: RequestHead) -> CallerAccess | None:
        """None if every caller may use everything. A step calls for a client that has been admitted already."""
        if not self._authorizer.restricts or head.listener == STEPS_LISTENER:
            return None
        return CallerAccess(self._authorizer, self._routing, self._subject_of(head), head)

    def _subject_of(self, head: RequestHead) -> CallerIdentity:
        return self._identities.resolve_subject(head.headers, head.claims) if head.is_trusted else ANONYMOUS_SUBJECT

    def check_head(self, head: RequestHead) -> Api | ModelPath:
        """Refuse what can be refused before the body is here. Where the path names the model, the body is not read."""
        api = APIS_BY_PATH.get(head.path)
        if api is None:
            call = api_of_call(head.path, head.method, headers=head.headers, has_body=head.has_body)
            if call is not None:
                return call
            named = read_model_path(head.path)
            if named is not None:
                check_method(named, head.method, head.path, has_body=head.has_body)
                return named
            raise UnknownPath(f"Nothing is served under {head.method} {head.path[:100]}; {_path_advice(head.path)}.")
        if head.method != "POST":
            raise MethodNotAllowed(f"{head.path} takes POST, not {head.method[:20]}.")
        if not head.has_body:
            raise missing_body_refusal(api)
        return api

    def arrival_builder(self, *, server: str = "", pool: str | None = None) -> Callable[[RequestHead, bytes], Arrival]:
        """How requests of a gateway become arrivals: an HTTPRoute has chosen ``server``; or the gateway has a single
        ``pool``; or each goes by its model.
        """
        if server:
            return partial(self.build_for_server, server)
        return self.build_by_model if pool is None else partial(self.build_for_server, pool, is_pool=True)

    def reads_body(self, head: RequestHead, server: str) -> bool:
        """Whether a request cannot be decided without its body. ``server``: that an HTTPRoute has chosen; empty: none
        has. Raises a Refusal.
        """
        pool = self.pools.get(server)
        if pool is not None:
            return pool.spec.protocol not in UNREAD_PROTOCOLS
        return not server and isinstance(self.check_head(head), Api)

    def build_by_model(self, head: RequestHead, body: bytes) -> Arrival:
        """A request whose ModelServer a ModelRoute chooses; raises a Refusal."""
        admitted = self.check_head(head)
        if isinstance(admitted, ModelPath):
            return self._by_path(admitted, head)
        if admitted.spec.calls is not None:
            if head.path in SERVER_CALLS:
                raise UnknownPath(f"{head.path} is answered behind the gateway's own configuration of Envoy alone.")
            return self._routed(read_call(admitted, body), head, body)
        return self._routed(parse_body(admitted, body, head.headers), head, body)

    def _by_path(self, path: ModelPath, head: RequestHead) -> Arrival:
        """A request whose path names the model."""
        try:
            protocols = [api.spec.protocol for api in path.apis]
            candidates = self._candidates(path.model, protocols, head)
            targets, key_of = candidates.targets, partial(self._split_key, head)
            destination = self._serving(targets.draw(self._rng, key_of), targets, key_of)
            request = request_by_path(path, destination.protocol)
            return self._arrival(request, destination, head, b"", candidates)
        except Refusal as refusal:
            refusal.model = path.model
            raise

    def build_for_server(self, server: str, head: RequestHead, body: bytes, *, is_pool: bool = False) -> Arrival:
        """A request whose ModelServer its gateway has chosen, whatever its path and body; raises a Refusal.

        The model stays as the client wrote it. If a ModelRoute of the listener serves that model, its limits hold here,
        too: no request gets round them by another path. ``is_pool``: the gateway has no other ModelServer, so requests
        for models that ModelRoutes serve go by these.
        """
        pool = self.pools.get(server)
        if pool is not None and pool.spec.protocol != "OpenAI":
            return self._to_other_protocol(server, pool.spec, head, body)
        # some gateways do not send the path
        api = api_of_path(head.path) if head.path else api_by_body(body, head.headers)
        if api is None or not head.has_body:
            return self._unread(server, head, body)
        try:
            request = parse_body(api, body, head.headers)
        except BadRequest:
            # engines know more APIs and fields than we do, and say best what is wrong
            if self.has_limits:
                raise
            return self._unread(server, head, body)
        if is_pool and self._routing.serves_model(request.model):
            return self._routed(request, head, body)
        return self._direct(request, server, head, body)

    def build_mirror_copy(self, head: RequestHead, body: bytes) -> Arrival:
        """A copy of a request, to the ModelServer that its directive names; raises a Refusal. Nobody waits for its
        answer, and nobody is charged.
        """
        admitted = self.check_head(head)
        try:
            directive = read_directive(head.headers.get(MIRROR, ""))
        except ValueError:
            raise BadRequest("This listener has copies of requests alone.") from None
        if isinstance(admitted, ModelPath) or admitted.spec.calls is not None:
            raise BadRequest("The body of a copy must be JSON.")
        request, pool = parse_body(admitted, body, head.headers), self.pools.get(directive.server)
        if pool is None:
            raise NoEndpoint(f"The ModelServer '{directive.server}' is not configured any more.")
        overrides = None if directive.most is None else Overrides(max_output_tokens=directive.most)
        destination = Destination(
            directive.server, pool.spec.model, rule=_COPY_TERMS, overrides=overrides, is_copy=True
        )
        place, salt, _ = self._place(request, destination, head, _NOBODY, may_translate=False)
        found = Arrival(request, destination, place, head, body, _NOBODY, salt)
        return found if overrides is None else _with_overrides(found)

    def _to_other_protocol(self, server: str, spec: ModelServerSpec, head: RequestHead, body: bytes) -> Arrival:
        """To engines whose model is named by the path, or by a message of gRPC; raises a Refusal."""
        protocol = spec.protocol
        refuse_repository_path(spec.path_prefix + head.path)
        refuse_repository_call(head.path)
        api = APIS_BY_CALL.get(head.path)
        if api is not None and api.spec.protocol == protocol:
            check_headers(head.headers)
            return self._direct(read_call(api, body), server, head, body)
        path = read_model_path(head.path)
        if path is None or protocol not in [api.spec.protocol for api in path.apis]:
            # engines know more paths than we do
            return self._unread(server, head, b"")
        return self._direct(request_by_path(path, protocol), server, head, b"")

    def usage_of_refused(self, head: RequestHead, refusal: Refusal) -> UsageContext | None:
        """For the usage log: a request that was refused before it arrived; None if it asked for no inference."""
        return usage_of_unrouted_refusal(head, self._subject_of(head), refusal)

    def move_to_other_server(self, arrival: Arrival, suits: Callable[[Pool], bool] = lambda _: True) -> Arrival | None:
        """The same request at a ModelServer of its rule that has engines and ``suits``; None: there is none.

        Its route, rule and weights are those of the configuration in use.
        """
        # thousands may wait while no server has engines: their rules and access are not looked up again then
        destinations = self._routing.destinations(arrival.request.model, arrival.head.listener)

        def may_take(one: Destination) -> bool:
            return self._has_engines(one) and suits(self.pools[one.server])

        if arrival.candidates is None or not any(map(may_take, destinations)):
            return None
        try:
            candidates = self._candidates_of(arrival)
            targets = None if candidates is None else candidates.targets.filtered(may_take)
            if targets is None:
                return None
            drawn = targets.draw(self._rng, partial(self._split_key, arrival.head))
            return self._moved(arrival, candidates, drawn)
        except Refusal:
            # its route has left, or its caller may not use the other server: it stays where it is
            return None

    def arrivals_at_tiers(self, arrival: Arrival) -> Iterator[Arrival]:
        """The same request at each ModelServer of its rule that has engines and that its caller may use."""
        try:
            candidates = self._candidates_of(arrival)
        except Refusal:
            # its route has left
            return
        for one in () if candidates is None else candidates.targets.destinations:
            if self._has_engines(one):
                try:
                    yield self._moved(arrival, candidates, one)
                except Refusal:
                    # a field of it is not allowed there
                    continue

    def move_to_fallback(self, arrival: Arrival, to: Destination) -> Arrival:
        """The same request at a fallback of its rule, where it stays; raises a Refusal."""
        access = self._access_of(arrival.head)
        if access is not None and not access.may_use(arrival.request.model, to):
            raise model_not_allowed_refusal(arrival.request.model)
        return self._moved(arrival, None, to)

    def _candidates_of(self, arrival: Arrival) -> AllowedTargets | None:
        """Of the configuration in use; None if no ModelRoute has chosen its ModelServer. Raises a Refusal."""
        known, head = arrival.candidates, arrival.head
        if known is None or known.routing is self._routing:
            return known
        own = _with_fields(arrival, arrival.replaced)
        protocols = [_protocol_of(arrival.request)]
        return self._candidates(arrival.request.model, protocols, head, own.request, own.body)

    def _moved(self, arrival: Arrival, candidates: AllowedTargets | None, to: Destination) -> Arrival:
        """The same request elsewhere in its namespace, where its caller is the same; raises a Refusal."""
        pool, salt, engine_api = self._place(arrival.request, to, arrival.head, arrival.caller, may_translate=True)
        found = msgspec.structs.replace(
            arrival, destination=to, pool=pool, cache_salt=salt, candidates=candidates, engine_api=engine_api
        )
        # a fallback serves the request as it was for the target
        return found if to.is_fallback or to.overrides == arrival.destination.overrides else _with_overrides(found)

    def with_body(self, arrival: Arrival, body: bytes) -> Arrival:
        """The same request with the body that a guard has made of it; raises a Refusal."""
        before, spec = arrival.request, arrival.pool.spec
        if before.api is None or before.is_unread:
            raise BadRequest("This request has no body that can be changed.")
        request = parse_body(before.api, body, arrival.head.headers)
        for name, is_same in (
            ("model", request.model == before.model),
            ("stream", request.is_streamed == before.is_streamed),
        ):
            if not is_same:
                raise BadRequest(f"A guard may not change '{name}'.", param=name)
        _refuse_steering(request, spec)
        salt = self._isolation.salt(request, spec, arrival.caller, arrival.head.headers)
        return msgspec.structs.replace(arrival, request=request, body=body, cache_salt=salt, is_changed=True)

    def _unread(self, server: str, head: RequestHead, body: bytes) -> Arrival:
        """A request of no known API: its body is only searched for steering fields; raises a Refusal."""
        request = InferenceRequest(
            None,
            "",
            b"",
            is_streamed=False,
            stream_options={},
            max_output_tokens=None,
            internal_fields=steering_fields_of_unread_body(body),
        )
        return self._direct(request, server, head, body)

    def _routed(self, request: InferenceRequest, head: RequestHead, body: bytes) -> Arrival:
        if not request.model:
            raise missing_model_refusal()
        try:
            protocols = (_protocol_of(request),)
            candidates = self._candidates(request.model, protocols, head, request, body)
            targets, key_of = candidates.targets, partial(self._split_key, head)
            destination = self._serving(targets.draw(self._rng, key_of), targets, key_of, request.api)
            return self._arrival(request, destination, head, body, candidates)
        except Refusal as refusal:
            refusal.model = request.model
            raise

    def _candidates(
        self,
        model: str,
        protocols: Collection[str],
        head: RequestHead,
        request: InferenceRequest | None = None,
        body: bytes = b"",
    ) -> AllowedTargets:
        """By the ModelRoutes, what is open to the caller and speaks one of ``protocols``; raises a Refusal.
        ``request``, ``body``: as the client sent them, None and empty if the body is not read.
        """
        caller_access = self._access_of(head)
        try:
            targets = self._routing.targets(model, head.headers, head.path, request, body, listener=head.listener)
        except UnknownModel:
            if caller_access is None or caller_access.may_see_missing(model):
                raise
            raise model_not_allowed_refusal(model) from None
        if caller_access is not None:
            may_use = targets.filtered(partial(caller_access.may_use, model))
            if may_use is None:
                raise model_not_allowed_refusal(model)
            targets = may_use
        speaking = targets.with_protocols(protocols)
        if speaking is None:
            raise wrong_protocol_refusal(model, targets.destinations[0].protocol, head.path)
        return AllowedTargets(self._routing, speaking)

    def protocols_of(self, model: str, head: RequestHead) -> frozenset[str]:
        """Those of the ModelServers that the caller's requests for ``model`` may come to; empty: there are none."""
        return frozenset(one.protocol for one in self._open_destinations(model, head))

    def is_ready(self, model: str, protocol: str, head: RequestHead, now: float) -> bool:
        """Whether an engine could serve the caller's requests for ``model`` now. Of several rules with the protocol the
        one counts that takes the probe's path: an explainer makes no predictions.
        """
        speaking = [one for one in self._open_destinations(model, head) if one.protocol == protocol]
        try:
            own = self._routing.targets(model, head.headers, head.path, listener=head.listener).destinations
        except UnknownModel:
            own = ()
        return any(
            pool.is_ready(now, one.model)
            for one in [one for one in speaking if one in own] or speaking
            if (pool := self.pools.get(one.server)) is not None
        )

    def is_on_demand(self, model: str, head: RequestHead) -> bool:
        """Whether a request for ``model`` has an engine load it."""
        pools = [(self.pools.get(one.server), one.model) for one in self._open_destinations(model, head)]
        return any(pool is not None and pool.slots is not None and name in pool.slots.sources for pool, name in pools)

    def has_ready_engine(self, protocol: str, now: float) -> bool:
        """Whether an engine of some model of ``protocol`` could serve a request now."""
        return any(pool.spec.protocol == protocol and pool.is_ready(now) for pool in self.pools.values())

    def _open_destinations(self, model: str, head: RequestHead) -> Iterator[Destination]:
        caller_access = self._access_of(head)
        for one in self._routing.destinations(model, head.listener):
            if caller_access is None or caller_access.may_use(model, one):
                yield one

    def _split_key(self, head: RequestHead, sticky: StickySplit) -> bytes:
        """By which the targets are split; empty: the request is drawn by itself."""
        subject = self._subject_of(head)
        return sticky.key_of(head.headers, subject.tenant, subject.user)

    def _serving(
        self, drawn: Destination, targets: RuleTargets, key_of: Callable[[StickySplit], bytes], api: Api | None = None
    ) -> Destination:
        """The one that was drawn of ``targets``, or another one of them. Where it is a server without engines whose
        requests wait for one, that is one that has some. Where it does not take ``api``, one that does, or else one for
        which it is translated.
        """
        pool = self.pools.get(drawn.server)
        if pool is not None and api is not None and not _takes(pool.spec, api):
            for suits in (_takes, _engine_api):
                others = targets.filtered(partial(self._suits, api, suits))
                if others is not None:
                    return self._serving(others.draw(self._rng, key_of), others, key_of)
            return drawn
        if pool is None or pool.spec.activation is None or pool.readiness.can_serve:
            return drawn
        with_engines = targets.filtered(self._has_engines)
        return drawn if with_engines is None else with_engines.draw(self._rng, key_of)

    def _suits(self, api: Api, suits: Callable[[ModelServerSpec, Api], object], destination: Destination) -> bool:
        return destination.server in self.pools and bool(suits(self.pools[destination.server].spec, api))

    def _has_engines(self, destination: Destination) -> bool:
        pool = self.pools.get(destination.server)
        return pool is not None and pool.readiness.can_serve

    def _direct(self, request: InferenceRequest, server: str, head: RequestHead, body: bytes) -> Arrival:
        """To the ModelServer that the gateway names, under the model name that the client requests; raises a Refusal.

        If a ModelRoute of the listener serves that name, its limits and policies hold here, too.
        """
        pool, caller_access = self.pools.get(server), self._access_of(head)
        route, base_model = self._routing.route_of(request.model, head.listener)
        if not route and pool is not None:
            base_model = pool.spec.model
        asked = _model_asked_of_engine(request, head)
        if pool is not None and pool.spec.model_rewrites and request.api is not None and not request.is_unread:
            asked = rewritten_model(pool.spec.model_rewrites, request.model, self._rng) or asked
        destination = Destination(server, asked, route, base_model)
        model = None if request.api is None else request.model
        try:
            if caller_access is not None and not caller_access.may_use(model, destination):
                raise model_not_allowed_refusal(model)
            return self._arrival(request, destination, head, body)
        except Refusal as refusal:
            refusal.model = request.model
            raise

    def _arrival(
        self,
        request: InferenceRequest,
        destination: Destination,
        head: RequestHead,
        body: bytes,
        candidates: AllowedTargets | None = None,
    ) -> Arrival:
        """Of a request that its caller may make; raises a Refusal."""
        caller = ANONYMOUS_CALLER
        if head.is_trusted:
            caller = self._identities.resolve_caller(head.headers, server=destination.server)
        may_translate = candidates is not None
        pool, salt, engine_api = self._place(request, destination, head, caller, may_translate=may_translate)
        found = Arrival(request, destination, pool, head, body, caller, salt, candidates, engine_api=engine_api)
        return found if destination.overrides is None else _with_overrides(found)

    def _place(
        self,
        request: InferenceRequest,
        destination: Destination,
        head: RequestHead,
        caller: Caller,
        *,
        may_translate: bool,
    ) -> tuple[Pool, str | None, Api | None]:
        """The pool of the destination, and there the request's cache salt and the API to which it is translated, None
        for its own; raises a Refusal. ``may_translate``: the ModelServer was chosen here.
        """
        pool = self.pools.get(destination.server)
        if pool is None:
            raise NoEndpoint(
                f"The ModelServer '{destination.server}' is not configured any more; "
                "add it, or send the request elsewhere."
            )
        _refuse_steering(request, pool.spec)
        to = None
        if not _takes(pool.spec, request.api):
            to = _engine_api(pool.spec, request.api) if may_translate else None
            if to is None:
                raise api_not_served_refusal(request, pool.spec, head)
        salt = None
        if self._isolation.is_on or request.cache_salt is not None:
            salt = self._isolation.salt(request, pool.spec, caller, head.headers)
        return pool, salt, to


def _with_overrides(arrival: Arrival) -> Arrival:
    """The request as its destination is to have it, in place of one that another destination had; raises a Refusal."""
    restored = _with_fields(arrival, arrival.replaced)
    overrides = arrival.destination.overrides
    changes = {} if overrides is None else override_changes(overrides, restored.request, restored.body)
    given = raw_top_level_fields(restored.body, restored.request.contents) if changes else {}
    # copies: a view would keep the whole body
    replaced = {name: msgspec.Raw(bytes(given[name])) if name in given else None for name in changes}
    return msgspec.structs.replace(_with_fields(restored, changes), replaced=replaced)


def _with_fields(arrival: Arrival, fields: Mapping[str, msgspec.Raw | None]) -> Arrival:
    """With these fields in its body; those that are None are removed."""
    request = arrival.request
    if not fields or request.api is None:
        return arrival
    present = {name: value for name, value in fields.items() if value is not None}
    body = with_changes(arrival.body, dict(present), request.contents, without=fields.keys() - present.keys())
    read = parse_body(request.api, body, arrival.head.headers)
    return msgspec.structs.replace(arrival, request=read, body=body, is_changed=True)


def _takes(spec: ModelServerSpec, api: Api | None) -> bool:
    """Whether requests of ``api`` can go there as they are. None: of no known API, which a provider never gets: with
    its key, clients reach nothing else of it.
    """
    if api is None:
        return spec.provider is None
    return spec.apis is None or api.spec.name in spec.apis


def _engine_api(spec: ModelServerSpec, api: Api | None) -> Api | None:
    return translation_target_api(api, spec.apis or ()) if spec.accepts_translated_requests else None


def api_not_served_refusal(request: InferenceRequest, spec: ModelServerSpec, head: RequestHead) -> UnknownPath:
    """The refusal of a request of an API that its ModelServer does not have."""
    return UnknownPath(
        f"'{request.model[:_SHOWN_CHARACTERS]}' is not served under {head.path[:_SHOWN_CHARACTERS]};"
        f" write to {', '.join(paths_of_apis(spec.apis or ()))}."
    )


def _protocol_of(request: InferenceRequest) -> str:
    return "OpenAI" if request.api is None else request.api.spec.protocol


def refuse_repository_path(path: str) -> None:
    """Raise ModelRepositoryRefused for the verbs by which engines load and unload models, which the controller does."""
    # an engine decodes the path once
    if _REPOSITORY.search(unquote(path)):
        raise ModelRepositoryRefused(
            "Clients cannot list, load or unload the models of an engine; ask for the model that you want to use."
        )


def rewritten_model(rewrites: Sequence[ModelRewrite], model: str, rng: random.Random) -> str:
    """The model of the first rewrite for ``model``; empty if there is none."""
    found = next((one for one in rewrites if not one.models or model in one.models), None)
    if found is None:
        return ""
    if len(found.targets) == 1:
        return found.targets[0].model
    (drawn,) = rng.choices(found.targets, [one.weight for one in found.targets])
    return drawn.model


def _model_asked_of_engine(request: InferenceRequest, head: RequestHead) -> str:
    """Where no ModelRoute decides: what a trusted gateway writes, else what the client asks for."""
    if head.is_trusted and request.api is not None:
        return next((head.headers[name] for name in MODEL_REWRITES if head.headers.get(name)), request.model)
    return request.model


def _refuse_steering(request: InferenceRequest, spec: ModelServerSpec) -> None:
    """Raise ReservedFieldRefused if the body determines where an engine connects or where the request runs, and the
    server does not allow it.
    """
    for name in request.internal_fields:
        if name in STEERING_FIELDS and name not in spec.allowed_fields:
            raise ReservedFieldRefused(
                f"The field '{name}' is for gateways, not for clients; leave it out.", param=name
            )

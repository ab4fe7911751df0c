# SPDX-License-Identifier: Apache-2.0
"""ModelRoute: which models clients may ask for, and where such requests go."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

import msgspec

from extproc.api.admission import Priority, RateLimit, check_limits
from extproc.api.body_match import BodyCondition, TokenRange, check_body_conditions, check_range
from extproc.api.budgets import Budgets, check_budgets
from extproc.api.cost_tiers import NO_CHOICE, CostTierRouting, check_tiers
from extproc.api.fallback import Fallback, FallbackRetry, check_fallbacks
from extproc.api.guard_services import RouteGuard
from extproc.api.match_patterns import check_header_name, compile_expression
from extproc.api.mirror import IS_TARGET, Mirror, check_mirror
from extproc.api.parameter_overrides import MostTokens, Parameters, check_parameters
from extproc.api.payload_log import PayloadLog, check_payload_log
from extproc.api.quantities import Duration
from extproc.api.response_cache import ResponseCache, check_response_cache
from extproc.api.slo import Slos, check_slo
from extproc.api.spec import (
    STEPS_LISTENER,
    CelRule,
    DirectoryObject,
    Name,
    NonEmpty,
    ParentReference,
    Spec,
    exactly_one,
    is_attached,
    object_key,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.api.config_errors import Finding, Path


# By what the requests of a rule are divided among its targets.
Sticky = Literal["Session", "User", "Tenant", "None"]
STICKY_TIERS: Final = "sticky has no effect with tiers, which choose for each request; leave one of them out"
_DEFAULT_RETRY: Final = FallbackRetry()
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_NO_PARENTS: Final = "parentRefs have no effect with callers: Steps; remove them"
# What cannot be part of the path that conditions are compared with.
_NOT_IN_PATHS: Final = re.compile(r"[\x00-\x20\x7f?#]")


class StringMatch(Spec, frozen=True):
    """Exactly one of the three is set. ``exact``: the value. ``prefix``: its beginning. ``regex``: matches all of it
    (RE2).
    """

    CEL: ClassVar = (exactly_one("exact", "prefix", "regex"),)

    exact: str | None = None
    prefix: str | None = None
    regex: str | None = None


class ModelMatch(Spec, frozen=True):
    """All given conditions must hold. ``headers``: by name, which is case-insensitive. ``uri``: the request's path.
    ``body``: fields of the JSON body, by path, such as ``response_format.type``. ``input_tokens``: of the prompt, at 4
    bytes a token; exact if the prompt is tokens. ``output_tokens``: the most that the client allows for an answer,
    infinite if it sets no limit. Conditions on body and tokens hold for no request whose body is not read as JSON.
    """

    headers: Annotated[dict[str, StringMatch], msgspec.Meta(max_length=64)] = msgspec.field(default_factory=dict)
    uri: StringMatch | None = None
    body: Annotated[dict[str, BodyCondition], msgspec.Meta(max_length=16)] = msgspec.field(default_factory=dict)
    input_tokens: TokenRange | None = None
    output_tokens: TokenRange | None = None

    @property
    def reads_body(self) -> bool:
        """Whether it has conditions on the body."""
        return bool(self.body) or self.input_tokens is not None or self.output_tokens is not None


class TargetModel(Spec, frozen=True):
    """One weighted destination of a rule. ``model_server_name``: the name of a ModelServer. ``weight``: its share of
    the requests, relative to the other targets' weights.
    """

    model_server_name: Name
    weight: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 100
    # as in the rule, for requests that go here; a field of both has this value
    set_: Parameters = msgspec.field(default_factory=dict, name="set")
    # as in the rule; the smaller one holds
    max_output_tokens: MostTokens | None = None


class RouteRule(Spec, frozen=True):
    """The first rule whose match holds decides; a rule without a match always holds. ``target_models``: where requests
    go. ``name``: for people. ``model_match``: conditions on the request.
    """

    CEL: ClassVar = (
        CelRule("self.targetModels.exists(one, one.weight > 0)", "all weights are 0; give one a positive weight"),
        CelRule("!has(self.tiers) || self.targetModels.filter(one, one.weight > 0).size() > 1", NO_CHOICE),
        CelRule("!has(self.retry) || has(self.fallback)", "retry has no effect without fallback"),
        CelRule(
            "!has(self.mirror) || !self.targetModels.exists(one, one.modelServerName == self.mirror.modelServerName)",
            IS_TARGET,
        ),
        CelRule("!has(self.tiers) || !has(self.sticky) || self.sticky == 'None'", STICKY_TIERS),
    )

    target_models: Annotated[tuple[TargetModel, ...], msgspec.Meta(min_length=1, max_length=32)]
    name: str = ""
    model_match: ModelMatch | None = None
    # of requests without an InferenceObjective; those below 0 are refused first when engines are full
    priority: Priority = 0
    # target time to first token of these requests, for the order Deadline
    ttft_target: Duration | None = None
    # all requests of one session, user or tenant go to one target: the weights divide these, not requests
    sticky: Sticky = "None"
    # the cheapest target that holds the objective is taken, and not one by weight
    tiers: CostTierRouting | None = None
    # fields of the body, such as temperature, that engines get with these values, whatever the client writes
    set_: Parameters = msgspec.field(default_factory=dict, name="set")
    # of each answer: a client that asks for more, or sets no limit, gets this one
    max_output_tokens: MostTokens | None = None
    # other ModelServers, in this order, for requests that the target cannot serve
    fallback: Annotated[tuple[Fallback, ...], msgspec.Meta(max_length=4)] = ()
    # copies of requests go to another ModelServer, too, while it has capacity to spare; their answers are dropped
    mirror: Mirror | None = None
    # how much fallbacks may take, and when an attempt is given up
    retry: FallbackRetry | None = None

    @property
    def reads_body(self) -> bool:
        """Whether it has conditions on bodies."""
        return self.model_match is not None and self.model_match.reads_body

    @property
    def parameter_override_field(self) -> str:
        """Which of ``set`` and ``maxOutputTokens`` it has, or a target of it; empty: none."""
        holders: tuple[RouteRule | TargetModel, ...] = (self, *self.target_models)
        found = ["set"] if any(one.set_ for one in holders) else []
        found += ["maxOutputTokens"] if any(one.max_output_tokens for one in holders) else []
        return " and ".join(found)

    @property
    def all_targets(self) -> tuple[TargetModel | Fallback, ...]:
        """All that its requests can come to."""
        return (*self.target_models, *self.fallback)

    @property
    def fallback_retry(self) -> FallbackRetry:
        """``retry``, or its defaults."""
        return self.retry or _DEFAULT_RETRY


class ModelRouteSpec(Spec, frozen=True):
    """Which model names a client may ask for, and where such requests go.

    A request for ``model_name`` is sent on under the ModelServer's own model name; one for an adapter keeps its
    name.

    ``rules``: the first one that matches decides. ``model_name``: what clients ask for. ``lora_adapters``: adapters
    that clients may ask for; the engines have loaded them, or load them on demand (``adapterLoading`` of the
    ModelServer). ``rate_limits``: each request must pass all of them. ``parent_refs``: the gateways of a cluster that
    serve it; without them, all of its namespace.
    """

    CEL: ClassVar = (
        CelRule("has(self.modelName) || has(self.loraAdapters)", "write modelName, loraAdapters or both"),
        CelRule(
            "self.rules.filter(one, !has(one.modelMatch)).size() <= 1 && "
            "(self.rules.all(one, has(one.modelMatch)) || !has(self.rules[self.rules.size() - 1].modelMatch))",
            "a rule without modelMatch always holds; write it last",
        ),
        CelRule("!has(self.callers) || self.callers != 'Steps' || !has(self.parentRefs)", _NO_PARENTS),
    )

    rules: Annotated[tuple[RouteRule, ...], msgspec.Meta(min_length=1, max_length=16)]
    model_name: NonEmpty | None = None
    lora_adapters: Annotated[tuple[NonEmpty, ...], msgspec.Meta(max_length=1000)] = ()
    rate_limits: Annotated[tuple[RateLimit, ...], msgspec.Meta(max_length=16)] = ()
    # In calendar windows; each request must have room in all of them, and in those of the GatewayConfig.
    budgets: Budgets = ()
    # What is promised, by class of requests; answers are measured against it.
    slo: Slos = ()
    parent_refs: Annotated[tuple[ParentReference, ...], msgspec.Meta(max_length=256)] = ()
    # Requests and answers that are kept, if the GatewayConfig says where (payloadLog); without it, none.
    payload_log: PayloadLog | None = None
    # The model's name in answers: the one that the client asked for, or the one that the engine writes.
    response_model: Literal["Requested", "Served"] = "Requested"
    # The guard of the GatewayConfig that each request must pass, after its limits and before its engine is chosen.
    guard: RouteGuard | None = None
    # Whose requests it serves: those of clients, or those that transformers and explainers make for them, where the
    # GatewayConfig says (steps). No client can reach the latter, whatever the model is called.
    callers: Literal["Clients", "Steps"] = "Clients"
    # Answers are kept and sent again to equal requests; without it, none are. See "The response cache".
    cache: ResponseCache | None = None

    @property
    def model_names(self) -> tuple[str, ...]:
        """All that clients may ask for, the model's first."""
        return (*([] if self.model_name is None else [self.model_name]), *self.lora_adapters)


class ModelRoute(DirectoryObject, frozen=True, kw_only=True):
    """A ModelRoute document."""

    spec: ModelRouteSpec

    def serves_listener(self, listener: str | None) -> bool:
        """Whether requests at the listener of that name are its. None: clients have a single one, without a name."""
        if self.spec.callers == "Steps" or listener == STEPS_LISTENER:
            return self.spec.callers == "Steps" and listener == STEPS_LISTENER
        return listener is None or is_attached(self.spec.parent_refs, listener)

    def server_key(self, target: TargetModel | Fallback | Mirror) -> str:
        """The ModelServer that ``target`` names: one of this route's own namespace."""
        return object_key(self.metadata.namespace, target.model_server_name)

    @property
    def server_keys(self) -> set[str]:
        """All ModelServers that its requests and copies of them can come to."""
        named = [one for rule in self.spec.rules for one in (*rule.all_targets, rule.mirror) if one is not None]
        return {self.server_key(one) for one in named}


def check_route(spec: ModelRouteSpec) -> Iterator[Finding]:
    """A client can ask for it, every rule can be reached and has a target, and its expressions compile."""
    yield from _check_callers(spec)
    if spec.payload_log is not None:
        yield from check_payload_log(spec.payload_log, ("spec", "payloadLog"))
    yield from check_response_cache(spec.cache, ("spec", "cache"))
    yield from check_limits(spec.rate_limits)
    yield from check_budgets(spec.budgets)
    yield from check_slo(spec.slo)
    for index, limit in enumerate(spec.rate_limits):
        if limit.header is not None:
            yield from check_header_name(limit.header, ("spec", "rateLimits", index, "header"))
    for number, rule in enumerate(spec.rules):
        path: Path = ("spec", "rules", number)
        yield from _check_rule(rule, path)
        if rule.model_match is None and number < len(spec.rules) - 1:
            yield path, "has no modelMatch, so the rules after it are never reached; write it last"


def _check_callers(spec: ModelRouteSpec) -> Iterator[Finding]:
    if spec.model_name is None and not spec.lora_adapters:
        yield ("spec",), "no client can ask for this route; write modelName, loraAdapters or both"
    if spec.callers == "Steps" and spec.parent_refs:
        yield ("spec", "parentRefs"), "have no effect with callers: Steps; remove them"


def _check_rule(rule: RouteRule, path: Path) -> Iterator[Finding]:
    targets = [target.model_server_name for target in rule.target_models if target.weight]
    if not targets:
        yield (*path, "targetModels"), "all weights are 0, so nothing could be chosen; give one a positive weight"
    if rule.tiers is not None:
        yield from check_tiers(rule.tiers, (*path, "tiers"), len(targets))
        if rule.sticky != "None":
            yield (*path, "sticky"), STICKY_TIERS
    yield from check_fallbacks(rule.fallback, rule.retry, path, targets)
    yield from check_mirror(rule.mirror, [one.model_server_name for one in rule.target_models], path)
    yield from check_parameters(rule.set_, (*path, "set"))
    for number, target in enumerate(rule.target_models):
        yield from check_parameters(target.set_, (*path, "targetModels", number, "set"))
    if rule.model_match is not None:
        yield from check_matches(rule.model_match, (*path, "modelMatch"))


def check_matches(given: ModelMatch, path: Path) -> Iterator[Finding]:
    """Conditions that Envoy takes and that a request can meet."""
    for header, match in given.headers.items():
        yield from check_header_name(header, (*path, "headers", header))
        yield from _check_match(match, (*path, "headers", header))
        yield from _check_header_values(match, (*path, "headers", header))
    yield from check_body_conditions(given.body, (*path, "body"))
    yield from check_range(given.input_tokens, (*path, "inputTokens"))
    yield from check_range(given.output_tokens, (*path, "outputTokens"))
    if given.uri is not None:
        yield from _check_match(given.uri, (*path, "uri"))
        yield from _check_paths(given.uri, (*path, "uri"))


def _check_match(match: StringMatch, path: Path) -> Iterator[Finding]:
    given = [name for name in ("exact", "prefix", "regex") if getattr(match, name) is not None]
    if len(given) != 1:
        yield path, f"has {' and '.join(given) or 'no condition'}; write exactly one of exact, prefix, regex"
    if match.prefix == "":
        yield (*path, "prefix"), "is empty, so it always holds; write a prefix, or leave the condition out"
    if match.regex is not None:
        try:
            compile_expression(match.regex)
        except ValueError as error:
            yield (*path, "regex"), str(error)


def _check_header_values(match: StringMatch, path: Path) -> Iterator[Finding]:
    for field, value in (("exact", match.exact), ("prefix", match.prefix)):
        if value is None:
            continue
        if _CONTROL.search(value):
            yield (*path, field), f"{value[:100]!a} has a control character, which no header's value can have"
        elif value.lstrip(" ") != value or (field == "exact" and value.rstrip(" ") != value):
            yield (*path, field), f"'{value[:100]}' begins or ends with a space, which is cut off headers; leave it out"


def _check_paths(match: StringMatch, path: Path) -> Iterator[Finding]:
    for field, value in (("exact", match.exact), ("prefix", match.prefix)):
        if value is not None and (value[:1] != "/" or _NOT_IN_PATHS.search(value)):
            advice = "write a path such as /v1/chat/completions, without a query"
            yield (*path, field), f"{value[:100]!a} is not the beginning of a path; {advice}"

# SPDX-License-Identifier: Apache-2.0
"""ModelRoute: which models clients may ask for, and where such requests go."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from extproc.api.admission import Priority, RateLimit
from extproc.api.cel import Rule, exactly_one
from extproc.api.quantities import Duration
from extproc.api.spec import Metadata, Name, NonEmpty, Spec, object_key
from extproc.api.workload import ParentReference


class StringMatch(Spec, frozen=True):
    """Exactly one of the three is set. ``exact``: the value. ``prefix``: its beginning. ``regex``: matches all of it
    (RE2).
    """

    CEL: ClassVar = (exactly_one("exact", "prefix", "regex"),)

    exact: str | None = None
    prefix: str | None = None
    regex: str | None = None


class ModelMatch(Spec, frozen=True):
    """All given conditions must hold. ``headers``: by name, which is case-insensitive. ``uri``: the request's path."""

    headers: Annotated[dict[str, StringMatch], msgspec.Meta(max_length=64)] = msgspec.field(default_factory=dict)
    uri: StringMatch | None = None


class TargetModel(Spec, frozen=True):
    """One weighted destination of a rule. ``model_server_name``: the name of a ModelServer. ``weight``: its share of
    the requests, relative to the other targets' weights.
    """

    model_server_name: Name
    weight: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 100


class RouteRule(Spec, frozen=True):
    """The first rule whose match holds decides; a rule without a match always holds. ``target_models``: where requests
    go. ``name``: for people. ``model_match``: conditions on the request.
    """

    CEL: ClassVar = (
        Rule("self.targetModels.exists(one, one.weight > 0)", "all weights are 0; give one a positive weight"),
    )

    target_models: Annotated[tuple[TargetModel, ...], msgspec.Meta(min_length=1, max_length=16)]
    name: str = ""
    model_match: ModelMatch | None = None
    # of requests without an InferenceObjective; those below 0 are refused first when engines are full
    priority: Priority = 0
    # time to first token that these requests want, for the order Deadline
    ttft_target: Duration | None = None


class ModelRouteSpec(Spec, frozen=True):
    """Which model names a client may ask for, and where such requests go.

    A request for ``model_name`` is sent on under the ModelServer's own model name; one for an adapter keeps its
    name.

    ``rules``: the first one that matches decides. ``model_name``: what clients ask for. ``lora_adapters``: adapters
    that clients may ask for; the engines have loaded them, or load them when asked for (``adapterLoading`` of the
    ModelServer). ``rate_limits``: each request must pass all of them.
    ``parent_refs``: the gateways of a cluster that serve it; without them, all of its namespace.
    """

    CEL: ClassVar = (
        Rule("has(self.modelName) || has(self.loraAdapters)", "write modelName, loraAdapters or both"),
        Rule(
            "self.rules.filter(one, !has(one.modelMatch)).size() <= 1 && "
            "(self.rules.all(one, has(one.modelMatch)) || !has(self.rules[self.rules.size() - 1].modelMatch))",
            "a rule without modelMatch always holds; write it last",
        ),
    )

    rules: Annotated[tuple[RouteRule, ...], msgspec.Meta(min_length=1, max_length=16)]
    model_name: NonEmpty | None = None
    lora_adapters: Annotated[tuple[NonEmpty, ...], msgspec.Meta(max_length=1000)] = ()
    rate_limits: Annotated[tuple[RateLimit, ...], msgspec.Meta(max_length=16)] = ()
    parent_refs: Annotated[tuple[ParentReference, ...], msgspec.Meta(max_length=256)] = ()


class ModelRoute(msgspec.Struct, frozen=True, kw_only=True):
    """A ModelRoute document."""

    metadata: Metadata
    spec: ModelRouteSpec

    def server_key(self, target: TargetModel) -> str:
        """The ModelServer that ``target`` names: one of this route's own namespace."""
        return object_key(self.metadata.namespace, target.model_server_name)

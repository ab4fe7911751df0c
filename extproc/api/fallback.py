# SPDX-License-Identifier: Apache-2.0
"""Fallbacks of a ModelRoute's rule: other ModelServers that serve a request which its own cannot serve.

Envoy makes the attempts: first at endpoints of the ModelServer that the rule chose, then at each fallback in its order.
It has one list of reasons and one time limit for all attempts of a request, so all fallbacks of a rule have the same
classes of failures. Classes of refusals are each fallback's own: a filter reads them in the body of the answer, and
chooses which ModelServer is next.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from extproc.api.quantities import Duration, check_duration
from extproc.api.spec import Name, Spec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from extproc.api.config_errors import Finding, Path
    from extproc.api.model_server import TrafficPolicy

FailureClass = Literal["connect", "timeout", "overloaded", "server-error", "context-window", "content-policy"]
FAILURES: Final[tuple[FailureClass, ...]] = ("connect", "timeout", "overloaded", "server-error")
# Of one model, where another may take the request. They are no failures of an engine.
REFUSALS: Final[tuple[FailureClass, ...]] = ("context-window", "content-policy")
# By class: Envoy's conditions for another attempt, and the statuses that are one.
CONDITIONS: Final[Mapping[FailureClass, tuple[str, ...]]] = MappingProxyType(
    {
        "connect": ("connect-failure", "refused-stream", "reset-before-request"),
        "timeout": ("reset",),
        "overloaded": (),
        # an engine's redirects
        "server-error": ("retriable-headers",),
        **dict.fromkeys(REFUSALS, ("retriable-headers",)),
    }
)
STATUSES: Final[Mapping[FailureClass, tuple[int, ...]]] = MappingProxyType(
    {
        "connect": (),
        "timeout": (),
        "overloaded": (429, 503, 529),
        "server-error": (500, 502, 504),
        **dict.fromkeys(REFUSALS, ()),
    }
)


class FallbackAnswerLimits(Spec, frozen=True):
    """What a fallback gives less of. ``max_output_tokens``: of each answer."""

    max_output_tokens: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]


class Fallback(Spec, frozen=True):
    """Another ModelServer. ``model_server_name``: its name. ``on``: failures of an attempt after which the next one is
    made: ``connect``, ``timeout``, ``overloaded`` (429, 503, 529), ``server-error`` (500, 502, 504), ``context-window``
    (the prompt is too long), ``content-policy`` (its content was refused). ``degraded``: its answers have the header
    ``x-attache-degraded: model``.
    """

    model_server_name: Name
    on: Annotated[tuple[FailureClass, ...], msgspec.Meta(min_length=1, max_length=6)] = FAILURES
    degraded: bool = False
    # Its answers are shorter than clients may ask for; such answers have ``x-attache-degraded: max_tokens``.
    degrade: FallbackAnswerLimits | None = None
    # A request that has waited so long in extproc goes there, if an endpoint has room at once; without it, none.
    after_queue: Duration | None = None


class FallbackRetry(Spec, frozen=True):
    """How much fallbacks may take. ``budget_percent``: of the requests that a fallback has in flight, the share that
    may have come from other ModelServers. ``min_concurrency``: so many may in any case. ``idle_timeout``: an attempt
    that sends nothing for so long is given up. Before its answer begins, the next one is made; later the answer is cut.
    Without it, only the time limit of the whole answer ends an attempt, and no other one follows.
    """

    budget_percent: Annotated[int, msgspec.Meta(ge=0, le=100)] = 20
    min_concurrency: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 10
    idle_timeout: Duration | None = None


def retried_failures(fallbacks: Sequence[Fallback]) -> frozenset[FailureClass]:
    """After which an attempt of a request with these fallbacks may be followed by another."""
    return frozenset(one for fallback in fallbacks for one in fallback.on)


def attempts_route_name(policy: TrafficPolicy, fallbacks: Sequence[Fallback], retry: FallbackRetry) -> str:
    """Envoy's route for requests with these fallbacks at a ModelServer with this policy; it has all that they share."""
    classes = "+".join(one for one in (*FAILURES, *REFUSALS) if one in retried_failures(fallbacks))
    idle = "" if retry.idle_timeout is None else f"/{float(retry.idle_timeout)}s"
    return f"{float(policy.timeout)}s/{classes}{idle}"


def check_fallbacks(
    fallbacks: Sequence[Fallback], retry: FallbackRetry | None, path: Path, targets: Sequence[str]
) -> Iterator[Finding]:
    """Each can help, and all have the same reasons. ``targets``: the ModelServers of the rule that get requests."""
    if retry is not None:
        if not fallbacks:
            yield (*path, "retry"), "has no effect without fallback; write fallback, or leave it out"
        if retry.idle_timeout is not None:
            yield from check_duration(retry.idle_timeout, (*path, "retry", "idleTimeout"))
    seen: set[str] = set()
    for index, one in enumerate(fallbacks):
        where: Path = (*path, "fallback", index)
        name = one.model_server_name
        if name in seen:
            yield (*where, "modelServerName"), f"'{name}' is listed twice; write each fallback once"
        elif list(targets) == [name]:
            yield (*where, "modelServerName"), f"'{name}' is the rule's only target, so it never helps; write another"
        seen.add(name)
        if set(one.on).difference(REFUSALS) != set(fallbacks[0].on).difference(REFUSALS):
            yield (
                (*where, "on"),
                f"differs from the first fallback's in more than {' and '.join(REFUSALS)}; Envoy has one list of "
                "failures for a request: write the same",
            )

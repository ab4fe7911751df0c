# SPDX-License-Identifier: Apache-2.0
"""The response cache of a ModelRoute: which answers are kept, for whom, and for how long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from extproc.api.quantities import ByteSize, Duration
from extproc.api.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.api.config_errors import Finding, Path

# Envoy takes an answer of extproc in one message, and Lua holds what is stored.
MOST_BYTES: Final = 1 << 20
_LONGEST_S: Final = 30 * 86400.0


class ResponseCache(Spec, frozen=True):
    """Keep answers, and send them again to requests that are equal. ``ttl``: how long an answer is kept, up to 30
    days; by up to a tenth more or less. ``scope``: whose requests share answers: those of one Tenant, of one ApiKey, or
    all of the Route. ``max_answer_bytes``: longer answers are not kept; up to 1Mi. ``max_request_bytes``: longer
    requests are not looked up. ``any_temperature``: also requests with neither ``temperature: 0`` nor ``seed``, whose
    answers would differ without the cache. ``generation``: another number empties the cache.
    """

    ttl: Duration = Duration("1h")
    scope: Literal["Tenant", "ApiKey", "Route"] = "Tenant"
    max_answer_bytes: ByteSize = ByteSize("256Ki")
    max_request_bytes: ByteSize = ByteSize("256Ki")
    any_temperature: bool = False
    generation: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0


def check_response_cache(spec: ResponseCache | None, path: Path) -> Iterator[Finding]:
    """Times and sizes that can be kept."""
    if spec is None:
        return
    if not 1 <= spec.ttl <= _LONGEST_S:
        yield (*path, "ttl"), f"is {spec.ttl}; write a duration from 1s to 30d"
    for name, size in (("maxAnswerBytes", spec.max_answer_bytes), ("maxRequestBytes", spec.max_request_bytes)):
        if not 1 <= size <= MOST_BYTES:
            yield (*path, name), f"is {size}; write a size from 1 to 1Mi"

# SPDX-License-Identifier: Apache-2.0
"""A line of the usage log to the row of its request: who asked, what served it, how many tokens, and what it cost.

Pure. Whatever stands in a line, ``parse_usage_line`` returns a row or raises BadLine.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from extproc.api.charged_tokens import (
    CUTS,
    TIME_LIMITS,
    TIMEOUT_DETAILS,
    AnswerOutcome,
    expected_tokens_of,
    used_tokens,
)
from extproc.api.pricing import TokenCounts, cost_micros
from extproc.api.usage_log import UsageContext, UsageCounts, UsageLine, escape_name
from extproc.wire_names import (
    ANONYMOUS,
    CACHE_HIT,
    SERVER_CLUSTER,
    TRANSLATOR_CLUSTER,
    api_of_path,
    http_status,
    truncate_name,
)

# A line has some 2 KB, and one with all of its texts at their longest 32: what is longer is no line of Envoy's.
MOST_LINE_BYTES: Final = 256 * 1024
# Columns of texts have these lengths; longer texts end there.
MOST_NAME: Final = 256
MOST_CODE: Final = 64
# A database keeps no larger number, and no such cost is one of a request.
_MOST_MICROS: Final = 2**53
_MOST_ATTEMPTS: Final = 1_000_000
_OK: Final = 200
# Envoy's clock and ours may differ.
_FUTURE_S: Final = 86_400.0
_HUNDRED_YEARS_US: Final = 100 * 366 * 86_400 * 1_000_000
_NO_FLAGS: Final[frozenset[str]] = frozenset()
# Of Envoy's response flags: the client left, or sent what is no HTTP.
_LEFT: Final = frozenset({"DC", "DR", "DPE"})
# The engine's connection ended, or what came is no HTTP.
_LOST: Final = frozenset({"UC", "UR", "UF", "UPE"})
# No engine could be reached, or none gave an answer after all tries.
_NO_ENGINE: Final = frozenset({"UH", "URX"})
# Of ``refused`` of a context: the last one, that the response cache has answered.
_NO_REFUSALS: Final = frozenset({"", CACHE_HIT})
# How a request ended. ``refused``: by extproc. ``rejected``: an error that its client has caused (4xx). ``client``:
# its client left. ``engine``, ``timeout``, ``gateway``: what failed.
WHOLE, REFUSED, REJECTED, LEFT = "whole", "refused", "rejected", "client"
_FAILED: Final = frozenset({"engine", "timeout", "gateway"})
_LINES: Final = msgspec.json.Decoder(UsageLine, strict=False)
_CONTEXTS: Final = msgspec.json.Decoder(UsageContext)


class BadLine(Exception):
    """Nothing of the line can be kept; the message has no text of the line."""


class UsageRow(msgspec.Struct, frozen=True):
    """One request, as it is kept. ``at_us``, ``queued_us``, ``ttft_us``, ``duration_us``: microseconds.

    ``ticket``: extproc's name of the request, as in its decision log and traces. ``endpoint``: the engine's address.
    ``input`` has ``cached`` and ``written`` in it, ``output`` has ``reasoning``. ``cost_micros``: None if the request
    used engines and had no price; 0 if it cost nothing. ``price_id``: by which price, None without one.
    ``is_degraded``: extproc had no part in it, or a fallback served it that is marked so. ``is_estimated``: some of its
    tokens are estimates. ``ttft_us``: until the first content, else until the first byte; None without an answer.
    ``ended``: ``whole``, ``refused`` (by extproc), ``rejected`` (4xx), ``client`` (it left), ``engine``, ``timeout`` or
    ``gateway``; ``is_failed``: one of the last three. ``is_unpriced``: it used engines, and nobody knows what that
    costs. ``key_id``: of the API key with the name ``key``; empty without extproc.
    """

    id: str
    at_us: int
    request_id: str
    trace_id: str
    ticket: str
    tenant: str
    key: str
    user: str
    route: str
    server: str
    endpoint: str
    model: str
    served_model: str
    api: str
    priority: int
    band: str
    streamed: bool
    status: int
    ended: str
    finish: str
    refused: str
    input: int
    cached: int
    written: int
    output: int
    reasoning: int
    cost_micros: int | None
    price_id: str | None
    currency: str
    queued_us: int
    ttft_us: int | None
    duration_us: int
    attempts: int
    is_degraded: bool
    is_estimated: bool
    is_failed: bool
    is_unpriced: bool
    key_id: str
    service_class: str


def parse_usage_line(line: bytes, now_s: float) -> UsageRow:
    """The row of ``line``; raises BadLine. ``now_s``: seconds since 1970."""
    if len(line) > MOST_LINE_BYTES:
        raise BadLine("it is longer than any line of Envoy's")
    try:
        decoded = _LINES.decode(line)
        context = None if decoded.context is None else _CONTEXTS.decode(decoded.context)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        # the decoder's message names a place and a type, never a value
        raise BadLine(str(error)) from None
    return make_usage_row(decoded, context, now_s)


def make_usage_row(line: UsageLine, context: UsageContext | None, now_s: float) -> UsageRow:
    """The row of a request; raises BadLine if it has no id, no possible time, or a cost beyond all sense."""
    if not line.id:
        raise BadLine("it has no id")
    if not (math.isfinite(line.at) and 0 < line.at < now_s + _FUTURE_S):
        raise BadLine("its time is not possible")
    if not 0 <= line.status <= 999:
        raise BadLine("its status is not possible")
    if line.status == _OK and line.grpc_status is not None:
        # a call of gRPC fails with 200
        line = msgspec.structs.replace(line, status=http_status(line.grpc_status))
    known = _known_to_envoy(line) if context is None else context.as_served_by(_server_of(line))
    line = _as_at_engine(line)
    used = None if known.refused else used_tokens(expected_tokens_of(known), _answer(line, known))
    tokens, is_estimated = (TokenCounts(), False) if used is None else (used.counts, used.is_estimated)
    ended = _end_of(line, known)
    cost, price_id, currency = _cost(tokens, known, was_used=used is not None)
    return UsageRow(
        id=_text(line.id),
        at_us=round(line.at * 1_000_000),
        request_id=_text(line.request_id),
        trace_id=_text(line.trace_id, MOST_CODE),
        ticket=_text(known.ticket, MOST_CODE),
        tenant=bounded_caller_name(known.tenant or ANONYMOUS),
        key=bounded_caller_name(known.api_key),
        user=bounded_caller_name(known.user),
        route=_text(known.route),
        server=_text(known.server),
        endpoint=_text(line.served),
        model=bounded_caller_name(known.model),
        served_model=_text(known.served_model),
        api=_text(known.api or _api(line.path), MOST_CODE),
        priority=max(-(2**31), min(2**31 - 1, known.priority)),
        band=_text(known.band, MOST_CODE),
        streamed=known.streamed,
        status=line.status,
        ended=ended,
        finish=_text(line.usage.finish if line.usage is not None else None, MOST_CODE),
        refused=_text(known.refused, MOST_CODE),
        input=tokens.input,
        cached=tokens.cached,
        written=tokens.written,
        output=tokens.output,
        reasoning=tokens.reasoning,
        cost_micros=cost,
        price_id=price_id,
        currency=currency,
        queued_us=_duration(known.queued_ms * 1_000) or 0,
        ttft_us=_ttft_us(line),
        duration_us=_duration(line.duration_us) or _duration((line.duration_ms or 0) * 1_000) or 0,
        attempts=max(0, min(_MOST_ATTEMPTS, line.attempts or 0)),
        is_degraded=known.degraded or (context is None and bool(line.served) and _is_inference(line)),
        is_estimated=is_estimated,
        is_failed=ended in _FAILED,
        is_unpriced=cost is None,
        key_id=_text(known.key_id, MOST_CODE),
        service_class=_text(known.service_class),
    )


def _as_at_engine(line: UsageLine) -> UsageLine:
    """A line of a request that was translated, as one that was not."""
    found = line.translated
    if line.cluster != TRANSLATOR_CLUSTER:
        return line
    if found is None:
        # no answer has told which engine had it
        return msgspec.structs.replace(line, served=None)
    usage = line.usage
    if usage is not None and not usage.prompt_tokens:
        # messages and responses have numbers also where their engine has reported none, or does so at the end
        usage = msgspec.structs.replace(usage, prompt_tokens=None, completion_tokens=usage.completion_tokens or None)
    flags = {*_flags(line), *(("UT",) if found.details in TIMEOUT_DETAILS else ())}
    attempts = int(found.attempts) if found.attempts is not None and 0 <= found.attempts <= _MOST_ATTEMPTS else 0
    return msgspec.structs.replace(
        line,
        served=found.host,
        attempts=attempts,
        flags=",".join(sorted(flags)),
        details=found.details,
        usage=usage,
    )


def bounded_caller_name(name: str) -> str:
    """A name that clients or their token issuers choose, as rows and sums have it."""
    return _text(escape_name(truncate_name(name)))


def _known_to_envoy(line: UsageLine) -> UsageContext:
    """What Envoy alone has verified of a request without extproc."""
    return UsageContext(
        tenant=line.tenant or "",
        user=line.user or "",
        api_key=line.client or "",
        server=_server_of(line) if _is_inference(line) else "",
        model=line.model or "",
    )


def _server_of(line: UsageLine) -> str:
    """The ModelServer of its cluster."""
    return (line.cluster or "").removeprefix(SERVER_CLUSTER)


def _answer(line: UsageLine, context: UsageContext) -> AnswerOutcome:
    flags = _flags(line)
    duration_us = _duration(line.duration_us) if line.duration_ms is None else _duration(line.duration_ms * 1_000)
    reached = bool(line.served) and _is_inference(line)
    if line.cluster == TRANSLATOR_CLUSTER and line.translated is None:
        # a client that left had waited for an engine
        reached = not _LEFT.isdisjoint(flags)
    return AnswerOutcome(
        status=line.status,
        has_engine=reached or (bool(context.ticket) and 200 <= line.status < 300),
        is_cut=line.status == 0 or not flags.isdisjoint(CUTS),
        has_timed_out=not flags.isdisjoint(TIME_LIMITS),
        counts=line.usage or UsageCounts(),
        duration_ms=(duration_us or 0) // 1_000,
        first_byte_us=_duration(line.first_byte_us),
        bytes=line.answer_bytes,
    )


def _is_inference(line: UsageLine) -> bool:
    """Whether it asked a model, as far as Envoy alone knows: HTTPRoutes lead to other servers, too."""
    return bool(line.context or line.model or line.usage is not None or _api(line.path))


def _flags(line: UsageLine) -> frozenset[str]:
    """Envoy writes a hyphen where there are none."""
    return _NO_FLAGS if not line.flags or line.flags == "-" else frozenset(line.flags.split(","))


def _end_of(line: UsageLine, context: UsageContext) -> str:
    """How it ended: the first that fits."""
    flags = _flags(line)
    # the translator has ended, not the engine
    is_lost_on_the_way = line.cluster == TRANSLATOR_CLUSTER and not (line.translated and line.translated.cut)
    is_refused = context.refused not in _NO_REFUSALS
    if not flags and not is_refused and 200 <= line.status < 400:
        return WHOLE
    found = (
        (REFUSED, is_refused),
        ("timeout", not flags.isdisjoint(TIME_LIMITS)),
        (LEFT, line.status == 0 or not _LEFT.isdisjoint(flags)),
        (
            "engine",
            (not (_LOST | _NO_ENGINE).isdisjoint(flags) and not is_lost_on_the_way)
            or (line.status >= 500 and bool(line.served)),
        ),
        ("gateway", line.status >= 500 or not flags.isdisjoint(CUTS)),
        (REJECTED, line.status >= 400),
    )
    return next((name for name, fits in found if fits), WHOLE)


def _cost(tokens: TokenCounts, context: UsageContext, *, was_used: bool) -> tuple[int | None, str | None, str]:
    """Micro-units, the price's id, and the currency."""
    if not was_used:
        return 0, None, ""
    if context.price is None:
        return None, None, ""
    cost = cost_micros(context.price, tokens)
    if not 0 <= cost <= _MOST_MICROS:
        raise BadLine("its price gives no possible cost")
    return cost, _text(context.price.id), _text(context.price.currency, MOST_CODE)


def _ttft_us(line: UsageLine) -> int | None:
    first_content = line.usage.first_content_us if line.usage is not None else None
    found = _duration(first_content)
    return found if found is not None else _duration(line.first_byte_us)


def _duration(microseconds: float | None) -> int | None:
    """Whole microseconds; None for what is no duration."""
    if microseconds is None or not 0 <= microseconds <= _HUNDRED_YEARS_US:
        return None
    return round(microseconds)


def _text(text: str | None, most: int = MOST_NAME) -> str:
    """Without zeros, which PostgreSQL refuses."""
    return (text or "").replace("\0", "")[:most]


def _api(path: str | None) -> str:
    found = api_of_path((path or "").partition("?")[0])
    return "" if found is None else found.name

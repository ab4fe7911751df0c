# SPDX-License-Identifier: Apache-2.0
"""The usage log: one line of JSON for each request, which Envoy writes to a file when the request has ended.

extproc gives Envoy what it knows of a request at its decision (``UsageContext``), as dynamic metadata. Envoy adds what
happened. So a line is whole even if extproc dies meanwhile, and whoever reads the file needs no configuration. Of a
client that leaves while extproc has its prompt computed, Envoy knows nothing: extproc writes that line, to a file
beside Envoy's.
"""

from __future__ import annotations

from typing import Final

import msgspec

from extproc.api.pricing import Price

# Names in rows and sums that stand for many: no caller, model or route has such a name (see stored_name).
OTHERS: Final = "(others)"
# Requests that no route took: clients choose the names that they ask for, so those are not kept apart.
UNROUTED: Final = "(unknown)"
_RESERVED: Final = "("
# Of the file beside Envoy's to which extproc writes the lines of requests whose clients left before Envoy knew of them.
LEFT_SUFFIX: Final = ".left"
# Begins the name of an HTTPRoute, so that it is never taken for a ModelRoute of the same name.
HTTP_ROUTE: Final = "http:"


def escape_name(name: str) -> str:
    """``name`` as rows and sums have it: what begins with a parenthesis begins with one more."""
    return _RESERVED + name if name.startswith(_RESERVED) else name


def unescape_name(stored: str) -> str:
    """``stored`` as its caller is called; OTHERS and UNROUTED stay what they are."""
    return stored.removeprefix(_RESERVED) if stored.startswith(_RESERVED * 2) else stored


class FallbackContext(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is other than in the UsageContext if a fallback serves the request: ``server``, and the fields of that."""

    server: str
    served_model: str = ""
    price: Price | None = None
    degraded: bool = False


class UsageContext(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of a request when it is decided.

    ``ticket``: extproc's name for it, different in all processes and restarts. ``tenant``, ``user``, ``api_key``: its
    caller, verified. ``key_id``: of the API key. ``route``: ``namespace/name`` of its ModelRoute, or
    ``http:namespace/name`` of its HTTPRoute, ``grpc:namespace/name`` of its GRPCRoute. ``server``: of its ModelServer.
    ``model``: as the client asked for it. ``served_model``: as the engine was asked. ``api``: the name of an ``Api``.
    ``priority``: of its objective or rule; ``band``: the name of its queue's band. ``queued_ms``: how long extproc
    held it, for whatever reason. ``cached``: tokens of its prompt that the pick expected in the cache. What it is
    taken to use where its answer does not report it (``extproc.api.charged_tokens.ExpectedTokens``): ``input_tokens``,
    ``output_tokens``, ``answers``, ``most_output``, ``token_us``, ``tokens_per_event``, ``in_background``. ``price``:
    in force for it; None: the ModelServer has none. ``refused``: the code of extproc's refusal; empty if the request
    was sent on. ``service_class``: the name of its class of objectives; ``band`` if it has none. ``degraded``:
    ``server`` is a fallback that is marked so, or limits the answer. ``fallbacks``: those to which Envoy may go on.
    """

    ticket: str = ""
    tenant: str = ""
    user: str = ""
    api_key: str = ""
    route: str = ""
    server: str = ""
    model: str = ""
    served_model: str = ""
    api: str = ""
    priority: int = 0
    band: str = ""
    streamed: bool = False
    queued_ms: float = 0.0
    cached: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    answers: int = 1
    most_output: int | None = None
    token_us: int = 0
    tokens_per_event: float = 1.0
    in_background: bool = False
    price: Price | None = None
    refused: str = ""
    key_id: str = ""
    service_class: str = ""
    degraded: bool = False
    fallbacks: tuple[FallbackContext, ...] = ()

    def as_served_by(self, server: str) -> UsageContext:
        """The same if ``server`` is one of the fallbacks."""
        found = next((one for one in self.fallbacks if one.server == server), None)
        if found is None:
            return self
        return msgspec.structs.replace(
            self,
            server=found.server,
            served_model=found.served_model,
            price=found.price,
            degraded=found.degraded,
            fallbacks=(),
        )


class UsageCounts(msgspec.Struct, frozen=True):
    """Numbers that Envoy's filters read out of an answer (``attache.usage``); None: the answer has no such number.

    ``prompt_tokens`` are all of the prompt. ``events``: of a stream, those with content: about one for each token, for
    where an answer ended before its usage came. ``first_content_us``: from the request's first byte to the first event
    with content. ``finish``: why the answer ended, as the engine says.
    """

    prompt_tokens: float | None = None
    completion_tokens: float | None = None
    cached_tokens: float | None = None
    created_tokens: float | None = None
    reasoning_tokens: float | None = None
    events: float | None = None
    first_content_us: float | None = None
    finish: str | None = None


class TranslatedAnswer(msgspec.Struct, frozen=True):
    """Of a request that was translated for its engines: what Envoy saw of them (``attache.translated``). ``host``: the
    engine that answered. ``details``: Envoy's, of the answer. ``cut``: the engine has cut its stream.
    """

    host: str | None = None
    attempts: float | None = None
    details: str | None = None
    cut: bool | None = None


class UsageLine(msgspec.Struct, frozen=True):
    """A line of the log, as Envoy's ``json_format`` writes it; null where Envoy has no value.

    ``id``: different for each request, whatever clients send. ``at``: when it arrived, seconds since 1970; it stands in
    the line as text, so decode with ``strict=False``.
    ``context``: a UsageContext as JSON text; null if extproc had no part in it: then ``client``, ``tenant`` and
    ``user`` are what Envoy has verified (of an API key only ``client``, its name), and ``model`` what Envoy read
    itself. ``served``: the engine's address; ``cluster``: Envoy's name of its ModelServer, ``server/namespace/name``.
    Durations count from the request's first byte, in microseconds. ``duration_us``: until the answer's last byte was
    sent; null if it was not, as when the client left; ``duration_ms``: until the end of the request, in any case.
    Of a request that was translated ``served`` and ``cluster`` are the translator's, and ``translated`` is null if
    nothing came back from there. ``grpc_status``: of a call of gRPC.
    """

    id: str
    at: float
    status: int
    request_id: str | None = None
    trace_id: str | None = None
    path: str | None = None
    context: str | None = None
    usage: UsageCounts | None = None
    served: str | None = None
    cluster: str | None = None
    client: str | None = None
    tenant: str | None = None
    user: str | None = None
    model: str | None = None
    duration_us: int | None = None
    duration_ms: int | None = None
    first_byte_us: int | None = None
    answer_bytes: int = 0
    attempts: int | None = None
    flags: str | None = None
    details: str | None = None
    translated: TranslatedAnswer | None = None
    grpc_status: int | None = None

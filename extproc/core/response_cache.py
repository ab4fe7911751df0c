# SPDX-License-Identifier: Apache-2.0
"""The response cache, pure: which requests are looked up, under which key, and which answers are kept.

A request is looked up once its limits have granted it, as its engine would get it. The key begins with whose it is, so
that no digest decides who shares an answer. Envoy sends the answer of a request that was not found, once, when it has
come to its end; the process that has decided the request knows its key, and keeps the answer if it is whole.

One store holds the answers of all routes and callers, bounded in bytes. While it is full, whoever has most of it loses
the answer that he has not used for longest.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from hashlib import sha256
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import quote

import msgspec

from extproc.core.dispatch import body_changes, changed_body
from extproc.core.effects import CacheLookupResult
from extproc.core.request_record import AnswerToStore
from extproc.refusals import NotCached, StoredAnswer
from extproc.request.json_rewrite import raw_top_level_fields
from extproc.wire_names import Api

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Mapping

    from extproc.api.config_snapshot import Snapshot
    from extproc.api.response_cache import ResponseCache
    from extproc.core.request_record import Arrival, GatewayProperties

Kind = Literal["json", "stream"]
# Why a request of a route with a cache is not looked up.
Bypass = Literal["api", "temperature", "several_answers", "stateful", "tools", "size", "no_store"]

# Of each process.
MEMORY_BYTES: Final = 64 << 20
# Of an answer, beside its key and body: objects, and its places in dictionaries; a test measures it.
OVERHEAD_BYTES: Final = 900
# Requests whose answers may still come.
_MOST_AWAITED: Final = 4096
# What answers do not depend on. All other fields are part of the key, known or not.
_IGNORED: Final = frozenset({"user", "metadata", "service_tier", "request_id", "safety_identifier", "prompt_cache_key"})
_VERSIONS: Final = ("anthropic-version", "anthropic-beta", "openai-beta")
# The same body gives the same answer, whatever its fields.
_DETERMINISTIC: Final = frozenset({Api.EMBEDDINGS, Api.RERANK, Api.SCORE})
_SAMPLED: Final = frozenset({Api.CHAT, Api.COMPLETIONS, Api.MESSAGES})
# They refer to what a server keeps or looks up.
_STATEFUL: Final = ("store", "previous_response_id", "conversation", "web_search_options", "container", "mcp_servers")
_NOTHING: Final = frozenset({b"", b"null", b"false", b"[]", b"{}"})
# Types of tools that the client runs; the first: Anthropic's have none.
_OWN_TOOLS: Final = frozenset({"", "function", "custom"})
_MOST_DIGITS: Final = 9
# How an answer ends by itself.
_WHOLE_ENDS: Final = frozenset(
    {"stop", "length", "tool_calls", "function_call", "end_turn", "max_tokens", "stop_sequence", "tool_use"}
)
_DONE: Final = b"[DONE]"
_numbers: Final = msgspec.json.Decoder(float)
_counts: Final = msgspec.json.Decoder(int | None)


class CacheControl(msgspec.Struct, frozen=True):
    """What a client asks of the cache. ``max_age_s``: the oldest answer that it takes; None: any."""

    reads: bool = True
    stores: bool = True
    only_stored: bool = False
    max_age_s: int | None = None


def parse_cache_control(text: str) -> CacheControl:
    """Of a ``cache-control`` header; what is unknown or malformed has no effect, but a max-age of no number is 0."""
    found = CacheControl()
    for part in text.lower().split(",") if text else ():
        name, _, value = part.strip().partition("=")
        match name.strip():
            case "no-cache":
                found = msgspec.structs.replace(found, reads=False)
            case "no-store":
                found = msgspec.structs.replace(found, reads=False, stores=False)
            case "only-if-cached":
                found = msgspec.structs.replace(found, only_stored=True)
            case "max-age":
                value = value.strip().strip('"')
                is_number = value.isascii() and value.isdigit() and len(value) <= _MOST_DIGITS
                found = msgspec.structs.replace(found, max_age_s=int(value) if is_number else 0)
    return found


class CacheKey(msgspec.Struct, frozen=True):
    """``scope``: the beginning of ``text``: whose answers they are."""

    scope: str
    text: str


class _Tool(msgspec.Struct):
    type: str = ""


_tools: Final = msgspec.json.Decoder(list[_Tool])


def _is_zero(value: bytes) -> bool:
    try:
        return _numbers.decode(value) == 0.0
    except ValueError:
        return False


def _is_one(value: bytes) -> bool:
    try:
        return (_counts.decode(value) or 1) == 1
    except ValueError:
        return False


def _runs_tools(value: bytes) -> bool:
    """Whether the server runs a tool, whose results change."""
    try:
        return any(tool.type not in _OWN_TOOLS for tool in _tools.decode(value))
    except (ValueError, RecursionError):
        return True


def bypass_reason(api: Api | None, fields: Mapping[str, msgspec.Raw], spec: ResponseCache) -> Bypass | None:
    """Why a request with these top-level fields is not looked up; None: it is."""
    if api in _DETERMINISTIC:
        return None
    if api not in _SAMPLED:
        return "api"
    given = {name: bytes(value) for name, value in fields.items() if bytes(value) not in _NOTHING}
    if not (spec.any_temperature or "seed" in given or _is_zero(given.get("temperature", b"1"))):
        return "temperature"
    if not all(_is_one(given[name]) for name in ("n", "best_of") if name in given):
        return "several_answers"
    if any(name in given for name in _STATEFUL):
        return "stateful"
    return "tools" if "tools" in given and _runs_tools(given["tools"]) else None


def cache_key(arrival: Arrival, fields: Mapping[str, msgspec.Raw], spec: ResponseCache) -> CacheKey:
    """``fields``: the top-level fields of the body as its engine gets it. Their values are taken byte for byte: two
    texts of one JSON value are two keys, and no reader of JSON can take two values for one.
    """
    request, destination, head, caller = arrival.request, arrival.destination, arrival.head, arrival.caller
    whose: tuple[str, ...]
    match spec.scope:
        case "Tenant":
            whose = ("tenant", caller.tenant)
        case "ApiKey":
            whose = ("key", caller.tenant, caller.api_key, caller.user if not caller.api_key else "")
        case "Route":
            whose = ("route",)
    digest = sha256()
    for name in sorted(fields):
        # the gateway's salt differs by tenant, whatever the scope; the client's own is below
        if name not in _IGNORED and name != "cache_salt":
            for part in (name.encode(), fields[name]):
                digest.update(len(memoryview(part)).to_bytes(8, "big"))
                digest.update(part)
    # extproc asks for usage where the client did not, and Envoy takes it out of the answer
    digest.update(msgspec.json.encode([request.cache_salt, request.stream_options], order="sorted"))
    scope = _scope(destination.route, spec.generation, *whose)
    rest = (
        destination.server,
        destination.model,
        request.model,
        arrival.pool.spec.model,
        arrival.pool.revisions,
        head.path,
        "s" if request.is_streamed else "j",
        *(head.headers.get(name, "") for name in _VERSIONS),
        head.headers.get(":path", "").partition("?")[2],
        digest.hexdigest(),
    )
    return CacheKey(scope, ":".join((scope, *_quoted(rest))))


def _scope(route: str, generation: int, *whose: str) -> str:
    """Without ``whose``: the beginning of all of one generation of a route."""
    return ":".join(_quoted(("c1", route, str(generation), *whose)))


def _quoted(parts: tuple[str, ...]) -> list[str]:
    return [quote(part, safe="") for part in parts]


class _Stored(msgspec.Struct, gc=False):
    kind: Kind
    body: bytes
    stored_at_s: float
    expires_at_s: float
    size_bytes: int


class AnswerStore:
    """Answers by key, bounded in bytes with what they cost beside their bodies."""

    def __init__(self, most_bytes: int = MEMORY_BYTES) -> None:
        self.most_bytes = most_bytes
        self.bytes = 0
        self.evicted = 0
        # by scope, then by key, least recently used first
        self._scopes: dict[str, OrderedDict[str, _Stored]] = {}
        self._sizes: dict[str, int] = {}
        # largest scopes, with sizes that may have passed
        self._largest: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return sum(map(len, self._scopes.values()))

    def get(self, key: CacheKey, now: float) -> _Stored | None:
        """The answer, which counts as used now."""
        answers = self._scopes.get(key.scope)
        found = None if answers is None else answers.get(key.text)
        if answers is None or found is None:
            return None
        if found.expires_at_s <= now:
            self._remove(key.scope, key.text)
            return None
        answers.move_to_end(key.text)
        return found

    def put(self, key: CacheKey, kind: Kind, body: bytes, *, now: float, ttl_s: float) -> bool:
        """Keep an answer, in place of any under its key; False: it is larger than the store."""
        size = len(body) + len(key.text) + len(key.scope) + OVERHEAD_BYTES
        if size > self.most_bytes:
            return False
        self._remove(key.scope, key.text)
        answers = self._scopes.setdefault(key.scope, OrderedDict())
        answers[key.text] = _Stored(kind, body, now, now + ttl_s, size)
        self._grow(key.scope, size)
        while self.bytes > self.most_bytes:
            scope = self._largest_scope()
            self._remove(scope, next(iter(self._scopes[scope])))
            self.evicted += 1
        return True

    def drop_unreachable(self, generations: Mapping[str, int]) -> None:
        """Drop what no route of these can find. ``generations``: by the key of the ModelRoute."""
        known = {_scope(route, number) for route, number in generations.items()}
        for scope in [one for one in self._scopes if ":".join(one.split(":", 3)[:3]) not in known]:
            self.bytes -= self._sizes.pop(scope)
            del self._scopes[scope]

    def _remove(self, scope: str, text: str) -> None:
        answers = self._scopes.get(scope)
        found = None if answers is None else answers.pop(text, None)
        if answers is None or found is None:
            return
        self._grow(scope, -found.size_bytes)
        if not answers:
            del self._scopes[scope], self._sizes[scope]

    def _grow(self, scope: str, size: int) -> None:
        self.bytes += size
        self._sizes[scope] = self._sizes.get(scope, 0) + size
        heapq.heappush(self._largest, (-self._sizes[scope], scope))
        if len(self._largest) > 2 * len(self._sizes) + 64:
            self._largest = [(-bytes_, one) for one, bytes_ in self._sizes.items()]
            heapq.heapify(self._largest)

    def _largest_scope(self) -> str:
        while True:
            size, scope = self._largest[0]
            if self._sizes.get(scope) == -size:
                return scope
            heapq.heappop(self._largest)


class PendingCacheEntry(msgspec.Struct, frozen=True):
    """What becomes of the answer to a request of ``route`` that was not found. ``revisions``: of the engines of
    ``server`` at that time.
    """

    route: str
    server: str
    revisions: str
    key: CacheKey
    ttl_s: float
    most_bytes: int
    api: Api


class ResponseCaches:
    """Those of all routes of one process."""

    def __init__(self, *, rng: random.Random, most_bytes: int = MEMORY_BYTES) -> None:
        self.store = AnswerStore(most_bytes)
        self._rng = rng
        # by the key of the ModelRoute
        self._specs: dict[str, ResponseCache] = {}
        # by ticket, oldest first
        self._awaited: OrderedDict[str, PendingCacheEntry] = OrderedDict()

    @property
    def has_per_caller_answers(self) -> bool:
        """Whether any route's answers are somebody's."""
        return any(spec.scope != "Route" for spec in self._specs.values())

    def apply(self, snapshot: Snapshot) -> None:
        """Follow the configuration."""
        found = {one.metadata.key: one.spec.cache for one in snapshot.routes if one.spec.cache is not None}
        if found != self._specs:
            self._specs = found
            self.store.drop_unreachable({route: spec.generation for route, spec in found.items()})

    def lookup(
        self, arrival: Arrival, attachment: GatewayProperties, ticket: str, now: float
    ) -> tuple[CacheLookupResult, AnswerToStore | None] | None:
        """What was found, and what to do with the answer; None: the route has no cache.

        Raises StoredAnswer if it is here, and NotCached if it is not and the client wants no other.
        """
        spec = self._specs.get(arrival.destination.route)
        if spec is None or not attachment.is_bundle:
            return None
        route = arrival.destination.route
        asked = parse_cache_control(arrival.head.headers.get("cache-control", ""))
        key, why = self._key_of(arrival, attachment, spec)
        if not why and not asked.stores:
            why = "no_store"
        found = self.store.get(key, now) if key is not None and asked.reads else None
        if found is not None and not why:
            age_s = max(0, int(now - found.stored_at_s))
            if asked.max_age_s is None or age_s <= asked.max_age_s:
                raise StoredAnswer(found.body, age_s=age_s, is_stream=found.kind == "stream")
        if asked.only_stored:
            raise NotCached("No stored answer fits this request, and it has 'cache-control: only-if-cached'.")
        api = arrival.request.api
        if why or key is None or api is None:
            return CacheLookupResult(route, "bypass", why), None
        server, revisions = arrival.destination.server, arrival.pool.revisions
        most_bytes = int(spec.max_answer_bytes)
        self._awaited[ticket] = PendingCacheEntry(route, server, revisions, key, float(spec.ttl), most_bytes, api)
        if len(self._awaited) > _MOST_AWAITED:
            self._awaited.popitem(last=False)
        return CacheLookupResult(route, "miss"), AnswerToStore(server, arrival.destination.model, most_bytes)

    @staticmethod
    def _key_of(arrival: Arrival, attachment: GatewayProperties, spec: ResponseCache) -> tuple[CacheKey | None, str]:
        request = arrival.request
        if request.api not in _SAMPLED and request.api not in _DETERMINISTIC:
            return None, "api"
        if len(arrival.body) > spec.max_request_bytes:
            return None, "size"
        body = changed_body(arrival, body_changes(arrival, attachment)) or arrival.body
        fields = raw_top_level_fields(body)
        why = bypass_reason(request.api, fields, spec)
        return (cache_key(arrival, fields, spec), "") if why is None else (None, why)

    def pop_awaited_answer(self, ticket: str) -> PendingCacheEntry | None:
        """Of a request of this process whose answer is here, once."""
        return self._awaited.pop(ticket, None)

    def store_own_answer(self, awaited: PendingCacheEntry, kind: Kind, body: bytes, now: float) -> bool:
        """Keep the answer if it is whole; returns whether it is kept."""
        if len(body) > awaited.most_bytes or not is_complete_answer(awaited.api, kind, body):
            return False
        return self.store_answer(awaited.key, kind, body, now=now, ttl_s=awaited.ttl_s)

    def store_answer(self, key: CacheKey, kind: Kind, body: bytes, *, now: float, ttl_s: float) -> bool:
        """Keep a whole answer, for a time that differs a little, so that what came together does not end together."""
        # another process may send what no route here finds
        return bool(self._specs) and self.store.put(key, kind, body, now=now, ttl_s=ttl_s * self._rng.uniform(0.9, 1.1))

    @property
    def routes_with_cache(self) -> Collection[str]:
        """The keys of the ModelRoutes that have one."""
        return self._specs.keys()


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    """What all answers have that may be kept; fields that are not there are not looked at."""

    error: msgspec.Raw = msgspec.Raw(b"")
    choices: list[_Choice] | None = None
    type: str | None = None
    stop_reason: str | None = None
    data: msgspec.Raw = msgspec.Raw(b"")
    results: msgspec.Raw = msgspec.Raw(b"")


class _Delta(msgspec.Struct):
    stop_reason: str | None = None


class _Event(msgspec.Struct):
    error: msgspec.Raw = msgspec.Raw(b"")
    choices: list[_Choice] | None = None
    type: str | None = None
    delta: _Delta | None = None


_answers: Final = msgspec.json.Decoder(_Answer)
_events: Final = msgspec.json.Decoder(_Event)


def is_complete_answer(api: Api, kind: Kind, body: bytes) -> bool:
    """Whether an answer has come to its end by itself, without an error: only such a one is sent again."""
    try:
        if kind == "stream":
            return api in _SAMPLED and _is_whole_stream(api, body)
        answer = _answers.decode(body)
    except (ValueError, RecursionError):
        return False
    if bytes(answer.error) not in _NOTHING:
        return False
    if api is Api.MESSAGES:
        return answer.type == "message" and answer.stop_reason in _WHOLE_ENDS
    if api in _SAMPLED:
        return bool(answer.choices) and all(one.finish_reason in _WHOLE_ENDS for one in answer.choices or ())
    return bytes(answer.data)[:1] == b"[" or bytes(answer.results)[:1] == b"["


def _is_whole_stream(api: Api, body: bytes) -> bool:
    text = body.replace(b"\r\n", b"\n")
    if not text.endswith(b"\n\n"):
        return False
    ended, is_done = False, False
    for block in text.split(b"\n\n"):
        data = b"\n".join(line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:"))
        if not data:
            if block.strip() and not all(line.startswith((b":", b"event:", b"id:")) for line in block.split(b"\n")):
                return False
            continue
        if is_done:
            # something behind the end
            return False
        if data == _DONE:
            is_done = True
            continue
        event = _events.decode(data)
        if bytes(event.error) not in _NOTHING or event.type == "error":
            return False
        if api is Api.MESSAGES:
            is_done = event.type == "message_stop"
            reasons = [None if event.delta is None else event.delta.stop_reason]
        else:
            reasons = [one.finish_reason for one in event.choices or ()]
        found = {one for one in reasons if one is not None}
        if not found <= _WHOLE_ENDS:
            return False
        ended = ended or bool(found)
    return is_done and ended

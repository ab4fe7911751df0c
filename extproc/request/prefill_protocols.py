# SPDX-License-Identifier: Apache-2.0
"""The prefill leg's bodies: what a prefill engine is asked for a request, and what its answer changes for the other.

A prefill engine gets the request itself, for one token and not streamed, so that it computes the prompt and no more:

| field | on the prefill leg |
|---|---|
| `stream` | `false`; `stream_options` removed |
| the API's limits of tokens | 1, those that the body has, or else the API's own |
| `min_tokens`, `min_completion_tokens` | removed: they may not be above the limit |
| `thinking` of `/v1/messages`, with a budget | removed without `do_remote_decode`: it must be below the limit |
| `store` of `/v1/responses` | `false`: the answer is nobody's |
| all others | byte for byte: the prompt depends on them |

That is so of vLLM. Of TensorRT-LLM see ``TensorRtContextFirst``, of SGLang ``SglangBootstrap``.

With NIXL the prefill engine answers ``kv_transfer_params``, by which the decode engine finds the KV cache: they are
copied unread. Other connectors join both engines by an id that is new for each try. By way of a shared store both get
the request, and nothing joins them but the prompt.
"""

from __future__ import annotations

import hashlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from extproc.api.addresses import join_host_port
from extproc.request.inference_request import CHAT_TOKENS, STEERING_FIELDS, is_given
from extproc.request.json_rewrite import raw_top_level_fields
from extproc.wire_names import Api

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.api.model_server import Connector
    from extproc.engines.engine_responses import PrefillResponse
    from extproc.request.inference_request import InferenceRequest

_PARAMETERS: Final = "kv_transfer_params"
_CONTEXT: Final = "disaggregated_params"
_LEAST_NUMBER: Final = 2**42
_SAMPLING: Final = "sampling_params"
_EXTRA: Final = "extra_args"
_MINIMA: Final = ("min_tokens", "min_completion_tokens")
_REMOVED: Final = ("stream_options", *_MINIMA)
_STOPS: Final = ("stop", "stop_token_ids", "stop_sequences")
_NOTHING: Final[frozenset[str]] = frozenset()
_ONE: Final = msgspec.Raw(b"1")
_FALSE: Final = msgspec.Raw(b"false")
_TRUE: Final = msgspec.Raw(b"true")
_UNSTOPPED: Final[Mapping[str, msgspec.Raw]] = MappingProxyType({"ignore_eos": _TRUE, "min_tokens": _ONE})
# Those that write an answer to a prompt.
_APIS: Final = frozenset({one for one in Api if one.spec.limits})
_OFF: Final = frozenset({b"false", b"0", b"null", b""})
_ASKED: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# Values of tool_choice, or of its member type.
_UNFORCED: Final = frozenset({b'"auto"', b'"none"'})
# Why a request is served whole, by the name in metrics.
WHOLE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "no_prompt": "its API computes no prompt",
        "api": "its API writes no answer to a prompt, or its connector does not take it",
        "prompts": "it has several prompts",
        "answers": "it requests several answers to a prompt",
        "no_answer": "it requests no answer",
        "stored_prompt": "its prompt begins with one that an engine has stored",
        "background": "it runs in the background",
        "prompt_logprobs": "the engine that answers must compute the prompt's log probabilities",
        "forced_call": "its answer must call a tool, which one token cannot be",
        "beam_search": "beam search writes several answers side by side",
        "embeddings": "its prompt is not made of tokens",
        "truncation": "its prompt is truncated to what its answer leaves, which differs for one token",
        "steering": "its client chooses engines itself, by a field in allowedFields",
    }
)
_object: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class BodyChanges(msgspec.Struct, frozen=True):
    """Of a body's top-level fields, for ``rewrite.with_changes``."""

    fields: dict[str, object]
    without: tuple[str, ...] = ()


class PrefillAttempt(msgspec.Struct, frozen=True):
    """A prefill that one engine is asked for. ``id``: of this try alone. ``host``: of the engine. ``port``: where it
    gives KV caches to others, 0 if its connector has no such port. ``engine_id``: that the engine has for others, as it
    answers at that port; empty before it was asked.
    """

    id: str
    host: str
    port: int = 0
    engine_id: str = ""


class PrefillProtocol(Protocol):
    """What a connector wants of the one who makes the leg.

    ``has_lease``: what was prefilled is for one engine, which must fetch it before a lease ends. Without, every engine
    finds it, and a prompt that is not found is computed again. ``joins_by_request_id``: engines take requests with the
    same ``x-request-id`` for the same prompt. ``needs_engine_id``: ``PrefillAttempt.engine_id`` must be known for the
    decode engine. ``apis``: whose prompts it takes. ``takes``: keys of WHOLE that do not hold for it. ``is_beside``:
    both engines must have the request at the same time; nothing of the prefill engine's answer goes into it.
    """

    has_lease: bool
    joins_by_request_id: bool
    needs_engine_id: bool
    is_beside: bool
    apis: frozenset[Api]
    takes: frozenset[str]

    def prefill_changes(
        self, request: InferenceRequest, fields: Mapping[str, msgspec.Raw], this: PrefillAttempt
    ) -> BodyChanges:
        """For the prefill engine. ``fields``: of the body."""
        ...

    def decode_changes(
        self,
        request: InferenceRequest,
        fields: Mapping[str, msgspec.Raw],
        this: PrefillAttempt,
        answer: PrefillResponse,
    ) -> BodyChanges | None:
        """For the decode engine; None: the prefill engine's ``answer`` lacks what it must have."""
        ...


class Nixl:
    """The decode engine reads the KV cache out of the prefill engine's memory (NixlConnector), or has the prefill
    engine write it (NixlPushConnector): it says where to, in the name of the request that has the same id.
    """

    has_lease = True
    needs_engine_id = is_beside = False
    apis, takes = _APIS, _NOTHING

    def __init__(self, *, joins_by_request_id: bool = False) -> None:
        self.joins_by_request_id = joins_by_request_id

    def prefill_changes(
        self, request: InferenceRequest, fields: Mapping[str, msgspec.Raw], this: PrefillAttempt
    ) -> BodyChanges:
        """One token, and the KV cache is kept."""
        changes = _one_token_with(request, fields, _ASKED)
        return BodyChanges({**changes.fields, **self._id(request, this)}, changes.without)

    def decode_changes(
        self,
        request: InferenceRequest,
        fields: Mapping[str, msgspec.Raw],
        this: PrefillAttempt,
        answer: PrefillResponse,
    ) -> BodyChanges | None:
        """Where the KV cache is."""
        if not answer.parameters:
            return None
        return BodyChanges({**_with_parameters(request, fields, answer.parameters), **self._id(request, this)})

    def _id(self, request: InferenceRequest, this: PrefillAttempt) -> dict[str, object]:
        """vLLM gives a response an id of its own, whatever the header says."""
        if not self.joins_by_request_id or request.api is not Api.RESPONSES:
            return {}
        return {"request_id": msgspec.Raw(msgspec.json.encode(f"resp_{this.id}"))}


class OffloadingPeerToPeer:
    """OffloadingConnector with a tier ``p2p``: the decode engine fetches the KV cache out of the prefill engine's
    offloaded blocks, by an id that both get. What it does not find there it computes.
    """

    has_lease = True
    joins_by_request_id = needs_engine_id = is_beside = False
    apis, takes = _APIS, _NOTHING

    def prefill_changes(
        self, request: InferenceRequest, fields: Mapping[str, msgspec.Raw], this: PrefillAttempt
    ) -> BodyChanges:
        """One token, and the KV cache is kept under the id."""
        changes = _one_token_with(request, fields, {"remote_decoder": {"kv_request_id": this.id}})
        return _without_budget(request, fields, changes)

    def decode_changes(
        self,
        request: InferenceRequest,
        fields: Mapping[str, msgspec.Raw],
        this: PrefillAttempt,
        answer: PrefillResponse,  # noqa: ARG002 - as other connectors
    ) -> BodyChanges | None:
        """Where the KV cache is: this is known before the prefill."""
        place = {"kv_request_id": this.id, "remote_host": this.host, "remote_port": this.port}
        return BodyChanges(_with_parameters(request, fields, _raw({"remote_prefiller": place})))


class Mooncake:
    """MooncakeConnector: the prefill engine sends the KV cache to the decode engine that asks for the same transfer.

    It does so only after a prefill that ends at its limit of tokens: after any other the decode engine would wait for
    480 s. So its token may be any, the end of the answer included, and nothing stops it.
    """

    has_lease = needs_engine_id = True
    joins_by_request_id = is_beside = False
    apis, takes = _APIS, _NOTHING

    def prefill_changes(
        self, request: InferenceRequest, fields: Mapping[str, msgspec.Raw], this: PrefillAttempt
    ) -> BodyChanges:
        """One token, whichever it is, and the KV cache is kept for the transfer."""
        parameters = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": _transfer_id(this)}
        found = _one_token_with(request, fields, parameters)
        if request.api is Api.GENERATE:
            sampling = {name: value for name, value in _sampling(found.fields).items() if name not in _STOPS}
            return BodyChanges({**found.fields, _SAMPLING: _raw({**sampling, **_UNSTOPPED})}, found.without)
        # Anthropic's API has no such fields
        more = {} if request.api is Api.MESSAGES else _UNSTOPPED
        without = [name for name in (*found.without, *_STOPS) if name not in more]
        return BodyChanges({**found.fields, **more}, tuple(without))

    def decode_changes(
        self,
        request: InferenceRequest,
        fields: Mapping[str, msgspec.Raw],
        this: PrefillAttempt,
        answer: PrefillResponse,
    ) -> BodyChanges | None:
        """Which transfer of which engine."""
        if not answer.is_cut or not this.engine_id:
            return None
        parameters = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": _transfer_id(this),
            "remote_engine_id": this.engine_id,
            "remote_bootstrap_addr": f"http://{join_host_port(this.host, this.port)}",
        }
        return BodyChanges(_with_parameters(request, fields, _raw(parameters)))


class TensorRtContextFirst:
    """TensorRT-LLM's ``context_first``: the server that generates fetches the KV cache of the context server's answer.

    The context server cuts its answer to the first token itself, and answers the prompt's token ids, which the other
    one gets in place of the prompt. An answer that ends with its first token has no KV cache.
    """

    has_lease = True
    joins_by_request_id = needs_engine_id = is_beside = False
    apis, takes = frozenset({Api.CHAT, Api.COMPLETIONS}), _NOTHING

    def prefill_changes(
        self,
        request: InferenceRequest,  # noqa: ARG002 - as other connectors
        fields: Mapping[str, msgspec.Raw],
        this: PrefillAttempt,
    ) -> BodyChanges:
        """The context alone."""
        asked = _raw({"request_type": "context_only", "disagg_request_id": _number(this)})
        stream = {"stream": _FALSE} if "stream" in fields else {}
        return BodyChanges({**stream, _CONTEXT: asked}, ("stream_options",))

    def decode_changes(
        self,
        request: InferenceRequest,
        fields: Mapping[str, msgspec.Raw],  # noqa: ARG002 - as other connectors
        this: PrefillAttempt,  # noqa: ARG002
        answer: PrefillResponse,
    ) -> BodyChanges | None:
        """What the context server has answered, and the prompt as it has read it."""
        if not (answer.is_cut and answer.context and answer.token_ids):
            return None
        told = _raw({**_members(answer.context), "request_type": "generation_only"})
        if request.api is Api.COMPLETIONS:
            return BodyChanges({"prompt": answer.token_ids, _CONTEXT: told})
        # a client's own would go before these
        return BodyChanges({"prompt_token_ids": answer.token_ids, _CONTEXT: told}, ("prompt_token_ids_b64",))


class SglangBootstrap:
    """SGLang, with every transfer backend: both engines get the request at once, and meet in a room of the prefill
    engine's bootstrap server, which is new for each request.

    The prefill engine cuts its answer to one token itself, and answers when the decode engine has the KV cache. Prompts
    of one request have rooms of their own. Several answers to one would share its room, so it takes one alone.
    """

    has_lease = is_beside = True
    joins_by_request_id = needs_engine_id = False
    apis = frozenset({Api.CHAT, Api.COMPLETIONS, Api.RESPONSES})
    # the cut answer need not be whole
    takes = frozenset({"prompts", "forced_call"})

    def prefill_changes(
        self, request: InferenceRequest, fields: Mapping[str, msgspec.Raw], this: PrefillAttempt
    ) -> BodyChanges:
        """The same, in one piece: of a stream the status is not known."""
        stream: dict[str, object] = {"stream": _FALSE} if "stream" in fields else {}
        if request.api is Api.RESPONSES:
            stream["store"] = _FALSE
        return BodyChanges({**stream, **_bootstrap_fields(request, this)}, ("stream_options",))

    def decode_changes(
        self,
        request: InferenceRequest,
        fields: Mapping[str, msgspec.Raw],  # noqa: ARG002 - as other connectors
        this: PrefillAttempt,
        answer: PrefillResponse,  # noqa: ARG002
    ) -> BodyChanges | None:
        """Where the KV cache comes from."""
        return BodyChanges(_bootstrap_fields(request, this))


class SharedKvStore:
    """Engines write KV caches to a store and read them there. The names of such connectors are in PROTOCOLS."""

    has_lease = False
    joins_by_request_id = needs_engine_id = is_beside = False
    apis, takes = _APIS, _NOTHING

    def prefill_changes(
        self,
        request: InferenceRequest,
        fields: Mapping[str, msgspec.Raw],
        this: PrefillAttempt,  # noqa: ARG002 - as other connectors
    ) -> BodyChanges:
        """One token."""
        return _without_budget(request, fields, _one_token(request, fields))

    def decode_changes(
        self,
        request: InferenceRequest,  # noqa: ARG002 - as other connectors
        fields: Mapping[str, msgspec.Raw],  # noqa: ARG002
        this: PrefillAttempt,  # noqa: ARG002
        answer: PrefillResponse,  # noqa: ARG002
    ) -> BodyChanges | None:
        """Nothing: the prompt is the key."""
        return BodyChanges({})


PROTOCOLS: Final[Mapping[Connector, PrefillProtocol]] = MappingProxyType(
    {
        "NixlConnector": Nixl(),
        "NixlPullConnector": Nixl(),
        "NixlPushConnector": Nixl(joins_by_request_id=True),
        "ExampleConnector": SharedKvStore(),
        "LMCacheConnectorV1": SharedKvStore(),
        "MooncakeStoreConnector": SharedKvStore(),
        "HF3FSKVConnector": SharedKvStore(),
        "FlexKVConnectorV1": SharedKvStore(),
        "OffloadingConnector": OffloadingPeerToPeer(),
        "MooncakeConnector": Mooncake(),
        "context_first": TensorRtContextFirst(),
        "bootstrap_room": SglangBootstrap(),
    }
)


def why_body_not_disaggregated(request: InferenceRequest, body: bytes, protocol: PrefillProtocol) -> str:
    """Why one engine must serve the request whole, as a key of WHOLE; empty: another one may prefill its prompt."""
    if request.api not in protocol.apis:
        return "api" if request.api is None or request.api.spec.waits_in_queue else "no_prompt"
    found = {
        "prompts": request.prompts.count > 1,
        "answers": request.answers > request.prompts.count,
        "no_answer": request.max_output_tokens == 0,
        "stored_prompt": request.has_stored_prompt,
        "background": request.runs_in_background,
        "steering": any(name in STEERING_FIELDS for name in request.internal_fields),
    }
    why = next((name for name, holds in found.items() if holds and name not in protocol.takes), "")
    return why or _why_whole_by_fields(request, body, protocol)


def _why_whole_by_fields(request: InferenceRequest, body: bytes, protocol: PrefillProtocol) -> str:
    fields = raw_top_level_fields(body, request.contents)
    options = {**fields, **_sampling(fields)} if request.api is Api.GENERATE else fields
    echoes = _is_on(options, "echo") and is_given(options.get("logprobs", msgspec.Raw()))
    if echoes or is_given(options.get("prompt_logprobs", msgspec.Raw())):
        return "prompt_logprobs"
    if "forced_call" not in protocol.takes and _forces_call(fields):
        return "forced_call"
    if _is_on(options, "use_beam_search"):
        return "beam_search"
    sends_tokens = any(is_given(fields.get(name, msgspec.Raw())) for name in CHAT_TOKENS)
    if request.media.replaces_text and not sends_tokens:
        return "embeddings"
    return "truncation" if _truncates_by_answer(options) else ""


def truncates_prompt(body: bytes, contents: tuple[int, int] | None) -> bool:
    """Whether the engine is to shorten the prompt. ``contents``: see ``InferenceRequest``."""
    fields = raw_top_level_fields(body, contents)
    longest, kind = fields.get("truncate_prompt_tokens", msgspec.Raw()), fields.get("truncation", msgspec.Raw())
    return is_given(longest) or (is_given(kind) and bytes(kind) != b'"disabled"')


def _truncates_by_answer(options: Mapping[str, msgspec.Raw]) -> bool:
    """vLLM truncates to a number of tokens, or, for -1, to its longest prompt: in most versions that is what the limit
    of the answer leaves.
    """
    longest, kind = options.get("truncate_prompt_tokens", msgspec.Raw()), options.get("truncation", msgspec.Raw())
    return bytes(longest).lstrip(b'"').startswith(b"-") or (is_given(kind) and bytes(kind) != b'"disabled"')


def _forces_call(fields: Mapping[str, msgspec.Raw]) -> bool:
    """Several versions of vLLM answer 400 or 500 to a forced call that one token has cut: vllm issue 38911."""
    choice = fields.get("tool_choice", msgspec.Raw())
    kind = _members(choice).get("type", choice)
    return is_given(choice) and bytes(kind) not in _UNFORCED


def _is_on(fields: Mapping[str, msgspec.Raw], name: str) -> bool:
    return bytes(fields.get(name, b"")) not in _OFF


def _one_token(request: InferenceRequest, fields: Mapping[str, msgspec.Raw]) -> BodyChanges:
    """What every connector wants: the prompt computed, and no more."""
    if request.api is None:
        return BodyChanges({})
    changes: dict[str, object] = {"stream": _FALSE} if "stream" in fields else {}
    if request.api is Api.RESPONSES:
        changes["store"] = _FALSE
    if request.api is Api.GENERATE:
        sampling = {name: value for name, value in _sampling(fields).items() if name not in _MINIMA}
        changes[_SAMPLING] = _raw(sampling | {"max_tokens": _ONE})
    else:
        limits = request.api.spec.limits
        changes |= dict.fromkeys([name for name in limits if name in fields] or limits[:1], _ONE)
    return BodyChanges(changes, _REMOVED)


def _without_budget(request: InferenceRequest, fields: Mapping[str, msgspec.Raw], changes: BodyChanges) -> BodyChanges:
    """vLLM refuses a budget that is not below the limit, but where ``do_remote_decode`` is sent. Should thinking change
    the prompt, the decode engine finds less of it: here blocks are found by their tokens.
    """
    if request.api is Api.MESSAGES and "budget_tokens" in _members(fields.get("thinking")):
        return BodyChanges(changes.fields, (*changes.without, "thinking"))
    return changes


def _one_token_with(
    request: InferenceRequest, fields: Mapping[str, msgspec.Raw], parameters: Mapping[str, object]
) -> BodyChanges:
    changes = _one_token(request, fields)
    more = _with_parameters(request, {**fields, **changes.fields}, _raw(parameters))
    return BodyChanges({**changes.fields, **more}, changes.without)


def _with_parameters(
    request: InferenceRequest, fields: Mapping[str, object], parameters: msgspec.Raw
) -> dict[str, object]:
    """Parameters of the transfer, where each version of the API reads them."""
    changes: dict[str, object] = {_PARAMETERS: parameters}
    if request.api is Api.GENERATE:
        sampling = _sampling(fields)
        extra = _members(sampling.get(_EXTRA)) | {_PARAMETERS: parameters}
        sampling[_EXTRA] = _raw(extra)
        changes[_SAMPLING] = _raw(sampling)
    return changes


def _raw(value: Mapping[str, object]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _number(this: PrefillAttempt) -> int:
    """Its id as TensorRT-LLM must have one: 2^42 or more, and of 63 bits."""
    return _LEAST_NUMBER + _digest(this.id) % (2**63 - _LEAST_NUMBER)


def sglang_abort_bodies(request: InferenceRequest, this: PrefillAttempt) -> tuple[bytes, ...]:
    """Of ``POST /abort_request`` to SGLang, which appends ``_0`` to the id of a list of one prompt."""
    ids = _request_ids(request, this)
    more = [f"{ids[0]}_0"] if len(ids) == 1 and request.api is Api.COMPLETIONS else []
    return tuple([msgspec.json.encode({"rid": one}) for one in (*ids, *more)])


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def _bootstrap_fields(request: InferenceRequest, this: PrefillAttempt) -> dict[str, object]:
    """Where the engines of a try meet, and its id at both of them: for each prompt, if it has several."""
    ids = _request_ids(request, this)
    rooms = [_digest(one) >> 1 for one in ids]
    name = "request_id" if request.api is Api.RESPONSES else "rid"
    if len(ids) == 1:
        return {"bootstrap_host": this.host, "bootstrap_port": this.port, "bootstrap_room": rooms[0], name: ids[0]}
    hosts, ports = [this.host] * len(ids), [this.port] * len(ids)
    return {"bootstrap_host": hosts, "bootstrap_port": ports, "bootstrap_room": rooms, name: ids}


def _request_ids(request: InferenceRequest, this: PrefillAttempt) -> list[str]:
    """Of one length: SGLang aborts all those that begin with the one that it is given."""
    one, count = f"{_digest(this.id):016x}", request.prompts.count
    if request.api is Api.RESPONSES:
        # its answer has this id
        one = f"resp_{one}"
    return [one] if count <= 1 else [f"{one}-{number:08x}" for number in range(count)]


def _transfer_id(this: PrefillAttempt) -> str:
    return f"xfer-{this.id}"


def _sampling(fields: Mapping[str, object]) -> dict[str, msgspec.Raw]:
    return _members(fields.get(_SAMPLING))


def _members(value: object) -> dict[str, msgspec.Raw]:
    """Of an object; none of anything else."""
    if not isinstance(value, msgspec.Raw) or bytes(memoryview(value)[:1]) != b"{":
        return {}
    return _object.decode(value)

# SPDX-License-Identifier: Apache-2.0
"""Answers of engines and runtime agents, decoded into bounded types, and their meaning.

Their content is trusted, their form is not: every error of form in an answer is an Unreadable, and nothing else.

vLLM (``entrypoints/openai/models/serving.py``) answers a load with 200 and a sentence, 400 for an adapter that it has
already, 404 or 500 for weights that it cannot use, and FastAPI's own 404 where ``VLLM_ALLOW_RUNTIME_LORA_UPDATING`` is
not set. An agent answers 503 while all adapters are in use, 501 for engines that load none, and 502 for weights that
cannot be had.
"""

from __future__ import annotations

import enum
import re
from typing import Annotated, Any, Final, TypeVar

import msgspec

_ALREADY: Final = re.compile(r"already (been )?(loaded|exists|registered)", re.IGNORECASE)
_FULL: Final = re.compile(
    r"(maximum|max) number|max_(cpu_|loaded_)?loras|too many|(is|are) full|no (free |more )?(room|slot)|exceed",
    re.IGNORECASE,
)
# vLLM: 'LoRA rank 64 is greater than max_lora_rank 16': to unload another adapter would not help.
_NOT_FULL: Final = re.compile("rank", re.IGNORECASE)
_NOT_THERE: Final = re.compile("not loaded", re.IGNORECASE)
_LONGEST: Final = 300
# Where the text of an error is, from the outside in.
_MESSAGES: Final = ("error", "message", "error_message", "detail")
_NO_SUCH_CALL: Final = frozenset({405, 501})
_NOT_ALLOWED: Final = frozenset({401, 403})
_BUSY: Final = frozenset({409, 429, 503})
# Of 4xx, those that an engine answers because it has too much to do.
_OVERLOADED: Final = frozenset({408, 429})
# How answers of the APIs end at their limit of tokens. TensorRT-LLM has not finished where it answers only a prompt.
_CUT: Final = frozenset({"length", "not_finished", "max_tokens", "incomplete"})
_MOST_MODELS: Final = 4_096
# vLLM lists a model with an object of permissions in it. Objects take tens of times their bytes in memory.
_MOST_OBJECTS: Final = 4 * _MOST_MODELS
_T = TypeVar("_T")
_anything: Final = msgspec.json.Decoder()


class UnreadableResponse(ValueError):
    """An engine's answer has another form than expected; the message has its form, and what to do."""


def parse_json(decoder: msgspec.json.Decoder[_T], body: bytes, what: str) -> _T:
    """``body`` as JSON, which is ``what``. Raises Unreadable."""
    if body.count(b"{") > _MOST_OBJECTS:
        raise UnreadableResponse(f"{what} has more than {_MOST_OBJECTS} objects; see what answers at this address")
    try:
        return decoder.decode(body)
    except RecursionError:
        raise UnreadableResponse(f"{what} is nested too deeply; see what answers at this address") from None
    except ValueError as error:  # of msgspec, and of text that is no UTF-8
        raise UnreadableResponse(f"{what} cannot be read: {error}; see what answers at this address") from None


class _Model(msgspec.Struct, gc=False):
    id: Annotated[str, msgspec.Meta(max_length=1024)]
    parent: Any = None
    max_model_len: Any = None


class _Models(msgspec.Struct):
    data: Annotated[list[_Model], msgspec.Meta(max_length=_MOST_MODELS)]


class ListedModels(msgspec.Struct, frozen=True):
    """``names``: all of them. ``base``: those that are no adapters. ``context_tokens``: the most that a prompt of these
    may have, with its answer; 0 if that is not known.
    """

    names: frozenset[str]
    base: frozenset[str]
    context_tokens: int = 0


def parse_model_list(body: bytes) -> ListedModels:
    """The names of ``GET /v1/models``. Raises Unreadable."""
    listed = parse_json(_models, body, "the list of models").data
    base = [one for one in listed if not one.parent]
    known = [one.max_model_len if type(one.max_model_len) is int else 0 for one in base]
    # one that is unknown may be the longest
    context_tokens = max(known) if known and min(known) > 0 else 0
    return ListedModels(frozenset([one.id for one in listed]), frozenset([one.id for one in base]), context_tokens)


class _Loaded(msgspec.Struct, frozen=True):
    saturation: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None


def parse_gateway_load(body: bytes) -> float:
    """How full the engines of a model are, of another gateway's ``GET /v1/models/NAME``. Raises Unreadable."""
    found = parse_json(_loaded, body, "what the provider reports of the model").saturation
    if found is None:
        raise UnreadableResponse(
            "the provider does not report its load; write this gateway's tenant there into loadShownTo of the"
            " GatewayConfig, or remove reportsLoad here"
        )
    return found


class _ListedModel(msgspec.Struct, frozen=True):
    id: Annotated[str, msgspec.Meta(max_length=1024)]
    parent: str | None = None
    root: str | None = None


class _ListedModels(msgspec.Struct, frozen=True):
    data: Annotated[list[_ListedModel], msgspec.Meta(max_length=_MOST_MODELS)] = []


class _InRepository(msgspec.Struct, frozen=True):
    name: str
    state: str = ""


class _Held(msgspec.Struct, frozen=True, gc=False):
    id: Annotated[str, msgspec.Meta(max_length=1024)]
    state: str


class _HeldModels(msgspec.Struct, frozen=True):
    data: Annotated[list[_Held], msgspec.Meta(max_length=_MOST_MODELS)]


def parse_base_model(body: bytes) -> str:
    """The first model of ``GET /v1/models`` that is no adapter. Raises Unreadable if there is none."""
    for one in parse_json(_listed, body, "the list of models").data:
        if not one.parent:
            return one.id
    raise UnreadableResponse("the engine lists no model")


def parse_adapters(body: bytes) -> dict[str, str]:
    """Adapters of ``GET /v1/models``, and where the files of each are; empty if unknown. Raises Unreadable."""
    return {one.id: one.root or "" for one in parse_json(_listed, body, "the list of models").data if one.parent}


def parse_repository_index(body: bytes) -> dict[str, str]:
    """Models of a V2 repository's index that are loaded; their paths are unknown. Raises Unreadable."""
    listed = parse_json(_repository, body, "the index of a repository")
    return {one.name: "" for one in listed if one.state == "READY"}


def parse_loaded_models(body: bytes) -> frozenset[str]:
    """The models that a server has loaded, of its runtime agent's list. Raises Unreadable."""
    listed = parse_json(_held, body, "the agent's list of models").data
    return frozenset([one.id for one in listed if one.state == "loaded"])


class AdapterLoadProblem(enum.Enum):
    """Why an engine did not load an adapter.

    BUSY: all of its slots are in use. BROKEN: it cannot use these weights, or finds none. UNREACHABLE: it, or its
    agent, did not answer in time, or has nothing to load adapters with.
    """

    BUSY = "busy"
    BROKEN = "broken"
    UNREACHABLE = "unreachable"


class AdapterLoadResponse(msgspec.Struct, frozen=True):
    """``problem``: None if the adapter is there. ``was_there``: before it was asked for. ``message``: of the answer.
    ``is_full``: the message names a full engine; a busy status alone does not mean that.
    """

    problem: AdapterLoadProblem | None = None
    message: str = ""
    was_there: bool = False
    is_full: bool = False
    # adapters that an agent unloaded to make room, if it reports them
    unloaded: tuple[str, ...] = ()


def parse_load_response(status: int, body: bytes, *, is_model: bool = False) -> AdapterLoadResponse:
    """The result of a load. ``is_model``: of a whole model into a V2 server, whose errors have text of the artefact's
    own: it must not pass for that of the server. Their status counts alone.
    """
    content, message = _content(body), error_message(body)
    if 200 <= status < 300:
        evicted = content.get("evicted") if isinstance(content, dict) else None
        names = [evicted] if isinstance(evicted, str) else evicted if isinstance(evicted, list) else []
        return AdapterLoadResponse(message=message, unloaded=tuple(one for one in names if isinstance(one, str)))
    if not is_model and _ALREADY.search(message):
        return AdapterLoadResponse(message=message, was_there=True)
    is_full = not is_model and bool(_FULL.search(message) and not _NOT_FULL.search(message))
    is_of_a_model = isinstance(content, dict) and ("error" in content or content.get("object") == "error")
    if status in _BUSY or is_full:
        problem = AdapterLoadProblem.BUSY
    elif status in _NO_SUCH_CALL or status in _NOT_ALLOWED or (status == 404 and not is_of_a_model):
        problem = AdapterLoadProblem.UNREACHABLE
    else:
        problem = AdapterLoadProblem.BROKEN
    return AdapterLoadResponse(problem, message, is_full=is_full)


def is_unloaded(status: int, body: bytes) -> bool:
    """Whether the engine does not hold the adapter any more: it was unloaded, or was not there."""
    return 200 <= status < 300 or status == 404 or bool(_NOT_THERE.search(error_message(body)))


class PrefillResponse(msgspec.Struct, frozen=True):
    """What an engine answers to a prefill for another. ``parameters``: an object by which the other finds the KV cache,
    empty if there is none. ``is_cut``: it ends at its limit of tokens, and not by a stop. ``context``: as
    ``parameters``, of TensorRT-LLM. ``token_ids``: of the prompt, empty if they are not answered. The tokens: of the
    prompt, None if they are not reported.
    """

    parameters: msgspec.Raw = msgspec.Raw()
    is_cut: bool = False
    context: msgspec.Raw = msgspec.Raw()
    token_ids: msgspec.Raw = msgspec.Raw()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """In OpenAI's forms, and in Anthropic's, whose ``input_tokens`` are those that were not cached."""

    prompt_tokens: int | None = None
    prompt_tokens_details: _CachedTokens | None = None
    input_tokens: int | None = None
    input_tokens_details: _CachedTokens | None = None
    cache_read_input_tokens: int | None = None


class _Choice(msgspec.Struct):
    finish_reason: Any = None
    disaggregated_params: msgspec.Raw = msgspec.Raw()


class _PrefillBody(msgspec.Struct):
    """How an answer ended is in ``choices``, in Anthropic's ``stop_reason``, or in the ``status`` of a response."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw()
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    choices: list[_Choice] | None = None
    stop_reason: Any = None
    status: Any = None
    usage: _Usage | None = None


def parse_prefill_response(body: bytes) -> PrefillResponse:
    """A prefill engine's answer of any API. Raises Unreadable."""
    found = parse_json(_prefilled, body, "the answer to a prefill")
    choice = next(iter(found.choices or ()), _Choice())
    reasons = (choice.finish_reason, found.stop_reason, found.status)
    answer = PrefillResponse(
        _copy(found.kv_transfer_params, b"{"),
        is_cut=any(isinstance(one, str) and one in _CUT for one in reasons),
        context=_copy(choice.disaggregated_params, b"{"),
        token_ids=_copy(found.prompt_token_ids, b"["),
    )
    usage = found.usage or _Usage()
    details = usage.prompt_tokens_details or usage.input_tokens_details
    if usage.prompt_tokens is not None or usage.cache_read_input_tokens is None:
        tokens = usage.input_tokens if usage.prompt_tokens is None else usage.prompt_tokens
        cached = None if details is None else details.cached_tokens
    else:
        cached = usage.cache_read_input_tokens
        tokens = (usage.input_tokens or 0) + cached
    return msgspec.structs.replace(answer, prompt_tokens=tokens, cached_tokens=cached)


def _copy(value: msgspec.Raw, mark: bytes) -> msgspec.Raw:
    """The value if it begins with ``mark``, else empty. Without the copy the whole answer would stay with it."""
    content = bytes(value)
    return msgspec.Raw(content if content.startswith(mark) else b"")


class _Rank(msgspec.Struct):
    engine_id: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class BootstrapEngineId(msgspec.Struct, frozen=True):
    """What a prefill engine is called by others. ``rank``: of the data-parallel rank that must compute the prompt, None
    if there is one only.
    """

    id: str
    rank: int | None = None


def parse_bootstrap_engines(body: bytes) -> tuple[BootstrapEngineId, ...]:
    """The ranks of an engine, as Mooncake's bootstrap server lists them (``GET /query``). Raises Unreadable."""
    ranks = parse_json(_ranks, body, "the list of ranks")
    if not ranks:
        raise UnreadableResponse("the list of ranks is empty; see whether the engine has started")
    if len(ranks) == 1:
        return tuple([BootstrapEngineId(one.engine_id) for one in ranks.values()])
    return tuple([BootstrapEngineId(one.engine_id, rank) for rank, one in sorted(ranks.items())])


def is_engine_error(status: int) -> bool:
    """Whether the engine is the reason of an answer, and not the request: 5xx, and the 4xx of load."""
    return status >= 500 or status in _OVERLOADED


def error_message(body: bytes) -> str:
    """The message of an answer, whatever its shape, in one line that a log may have."""
    content = _content(body)
    while isinstance(content, dict):
        content = next((content[key] for key in _MESSAGES if content.get(key)), None)
    text = content if isinstance(content, str) else body.decode(errors="replace")
    line = " ".join(text.split())[:_LONGEST]
    return "".join([mark if mark.isprintable() else "\N{REPLACEMENT CHARACTER}" for mark in line])


def _content(body: bytes) -> Any:  # noqa: ANN401 - whatever a server of unknown kind answers
    try:
        return parse_json(_anything, body, "the answer")
    except UnreadableResponse:
        return body.decode(errors="replace")


_models: Final = msgspec.json.Decoder(_Models)
_listed: Final = msgspec.json.Decoder(_ListedModels)
_loaded: Final = msgspec.json.Decoder(_Loaded)
_ranks: Final = msgspec.json.Decoder(
    Annotated[dict[Annotated[int, msgspec.Meta(ge=0)], _Rank], msgspec.Meta(max_length=_MOST_MODELS)]
)
_prefilled: Final = msgspec.json.Decoder(_PrefillBody)
_held: Final = msgspec.json.Decoder(_HeldModels)
_repository: Final = msgspec.json.Decoder(list[_InRepository])

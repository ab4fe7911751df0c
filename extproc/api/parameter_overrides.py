# SPDX-License-Identifier: Apache-2.0
"""Parameters that a rule or a target sets in requests: fields of their JSON bodies, whatever clients write there.

A field may be set unless it is what the request is about or what it costs: the model, the prompt, the number and form
of answers, and what the gateway writes itself. The limit of an answer's tokens has other names in other APIs, so it is
a field of its own, ``maxOutputTokens``.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args

import msgspec

from extproc.api.error_hints import quote_value
from extproc.api.model_server import InternalField

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from extproc.api.config_errors import Finding, Path

_LONGEST_BYTES: Final = 16 * 1024
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}", re.ASCII)
_PROMPT: Final = "is part of the client's prompt, which no route changes; leave it out"
_ANSWERS: Final = "decides which answers the client gets; leave it out"
_GATEWAY: Final = "is written by the gateway alone; leave it out"
_LIMIT: Final = "has other names in other APIs; write maxOutputTokens beside set"
# What must not be set, and why.
REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "model": "is the model's name; write another ModelServer in targetModels",
        **dict.fromkeys(
            (
                *("messages", "prompt", "input", "system", "instructions", "tools", "documents", "chat_template"),
                *("input_ids", "prompt_token_ids", "prompt_token_ids_b64", "token_ids", "prompt_embeds", "suffix"),
                *("previous_response_id", "previous_input_messages", "previous_response", "conversation", "features"),
            ),
            _PROMPT,
        ),
        **dict.fromkeys(("stream", "stream_options", "n", "best_of", "background"), _ANSWERS),
        **dict.fromkeys(("cache_salt", "priority", "vllm_xargs", "extra_args", *get_args(InternalField)), _GATEWAY),
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens"), _LIMIT),
        **dict.fromkeys(
            ("min_tokens", "min_completion_tokens"), "may be above the client's limit of tokens; leave it out"
        ),
        "sampling_params": "holds other parameters; write these, they are set there where an API has them there",
    }
)

Parameters = Annotated[dict[str, Any], msgspec.Meta(max_length=32)]
MostTokens = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class _Known(msgspec.Struct, frozen=True):
    """The types of usual parameters, as vLLM and OpenAI take them. Others pass as they are."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 0.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=-1)] = 0
    min_p: _Share = 0.0
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] = 0
    frequency_penalty: _Penalty = 0.0
    presence_penalty: _Penalty = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    stop: str | list[str] = ""
    stop_sequences: list[str] = []
    stop_token_ids: list[int] = []
    logprobs: bool | int = False
    top_logprobs: Annotated[int, msgspec.Meta(ge=0)] = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    parallel_tool_calls: bool = True
    store: bool = False
    tool_choice: str | dict[str, Any] = ""
    response_format: dict[str, Any] = {}
    text: dict[str, Any] = {}
    thinking: dict[str, Any] = {}
    reasoning: dict[str, Any] = {}
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] = "none"
    chat_template_kwargs: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    service_tier: str = ""
    user: str = ""


def check_parameters(given: Mapping[str, Any], path: Path) -> Iterator[Finding]:
    """Names that may be set, and values that are JSON of the right type."""
    for name, value in given.items():
        if reason := REFUSED.get(name):
            yield (*path, name), f"must not be set: it {reason}"
        elif not _NAME.fullmatch(name):
            yield (*path, name), f"{name[:100]!a} is no field at the top of a body; write a name such as temperature"
        elif problem := _problem(name, value):
            yield (*path, name), problem
    if not any(map(_problem_of_json, given.values())) and len(msgspec.json.encode(given)) > _LONGEST_BYTES:
        yield path, f"has more than {_LONGEST_BYTES} bytes, which each request would carry; set less"


def _problem(name: str, value: object) -> str:
    """Why ``value`` cannot be that of ``name``; empty if it can."""
    if problem := _problem_of_json(value):
        return problem
    try:
        msgspec.convert({name: value}, _Known)
    except msgspec.ValidationError as error:
        what = str(error).partition(" - at ")[0].replace("`", "'")
        return f"{what[:1].lower()}{what[1:]}; it is {quote_value(value)}"
    return ""


def _problem_of_json(value: object) -> str:
    try:
        is_json = value is not None and msgspec.json.decode(msgspec.json.encode(value)) == value
    except (ValueError, OverflowError, TypeError, RecursionError):
        is_json = False
    return "" if is_json else "is no value that can be set; write a number, text, true or false, a list or fields"

# SPDX-License-Identifier: Apache-2.0
"""Conditions of rules on bodies, compiled.

A route decodes the fields at the top of a body that its conditions name, and no other; below the top, each condition
decodes one field of one object a level. So a client chooses neither what is read nor how deep. A value of another type
than a condition's does not meet it; the engine says what is wrong with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from extproc.api.body_match import LONGEST_TEXT, TokenRange
from extproc.request.inference_request import ABSENT, is_given
from extproc.request.json_rewrite import without_contents

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from extproc.api.body_match import BodyCondition
    from extproc.api.model_route import ModelMatch
    from extproc.request.inference_request import InferenceRequest

_Decoder = msgspec.json.Decoder[Any]
# Of each character, and the quotes.
_LONGEST_TEXT_BYTES: Final = 12 * LONGEST_TEXT + 2
# To make a number of digits takes time in proportion to their square.
_LONGEST_NUMBER_BYTES: Final = 64
# A model's tokens differ; a rule must not change with what is learned of them.
_BYTES_PER_TOKEN: Final = 4
_text: Final = msgspec.json.Decoder(str)
_number: Final = msgspec.json.Decoder(float)
_BOOLEANS: Final = {b"true": True, b"false": False}


class _Field(msgspec.Struct, frozen=True):
    """``top``: its name, or that of the object which holds it. ``below``: by level, decoders of one field each."""

    top: str
    below: tuple[_Decoder, ...]
    holds: Callable[[msgspec.Raw], bool]


class BodyConditions(msgspec.Struct, frozen=True):
    """Of a rule."""

    fields: tuple[_Field, ...]
    input_tokens: TokenRange | None
    output_tokens: TokenRange | None

    @property
    def top_level_fields(self) -> set[str]:
        """The fields at the top that must be read."""
        return {one.top for one in self.fields}

    def are_met(self, request: InferenceRequest, tops: Mapping[str, msgspec.Raw]) -> bool:
        """``tops``: as ``BodyFieldReader.read`` gives them."""
        if self.input_tokens is not None and not _is_in(self.input_tokens, input_tokens(request)):
            return False
        most = math.inf if request.max_output_tokens is None else request.max_output_tokens
        if self.output_tokens is not None and not _is_in(self.output_tokens, most):
            return False
        return all(one.holds(_value(tops[one.top], one.below)) for one in self.fields)


class BodyFieldReader:
    """Of a route: what its rules must know of a body."""

    def __init__(self, tops: Collection[str]) -> None:
        self._tops = tuple(tops)
        self._decoder = _decoder_of(self._tops)

    def read(self, request: InferenceRequest, body: bytes) -> Mapping[str, msgspec.Raw] | None:
        """The fields at the top, undecoded; None if conditions on a body cannot hold for this one."""
        if request.api is None or request.is_unread or request.api.spec.body != "json":
            return None
        # it has been parsed before
        found = self._decoder.decode(without_contents(body, request.contents))
        return dict(zip(self._tops, msgspec.structs.astuple(found), strict=True))


def input_tokens(request: InferenceRequest) -> float:
    """Of the prompt: counted where it is in tokens, else estimated."""
    return request.prompts.token_ids or request.text_bytes / _BYTES_PER_TOKEN + request.media.tokens


def compile_body_conditions(match: ModelMatch | None) -> BodyConditions | None:
    """None if the rule has no condition on bodies."""
    if match is None or not match.reads_body:
        return None
    fields = [_compile_field(path, one) for path, one in match.body.items()]
    return BodyConditions(tuple(fields), match.input_tokens, match.output_tokens)


def _compile_field(path: str, condition: BodyCondition) -> _Field:
    top, *below = path.split(".")
    return _Field(top, tuple([_decoder_of((name,)) for name in below]), _test_of(condition))


def _decoder_of(names: Sequence[str]) -> _Decoder:
    """Of an object with these fields, undecoded and in this order. Names of fields need be none of Python."""
    renamed = {f"field_{number}": name for number, name in enumerate(names)}
    fields = [(attribute, msgspec.Raw, ABSENT) for attribute in renamed]
    return msgspec.json.Decoder(msgspec.defstruct("_Fields", fields, rename=renamed, gc=False))


def _value(value: msgspec.Raw, below: tuple[_Decoder, ...]) -> msgspec.Raw:
    """The field itself; empty if it is not there."""
    for decoder in below:
        if not value:
            break
        try:
            (value,) = msgspec.structs.astuple(decoder.decode(value))
        except msgspec.ValidationError:
            # no object
            return ABSENT
    return value


def _test_of(condition: BodyCondition) -> Callable[[msgspec.Raw], bool]:
    if condition.exists is not None:
        exists = condition.exists
        return lambda value: is_given(value) is exists
    if condition.boolean is not None:
        boolean = condition.boolean
        return lambda value: _BOOLEANS.get(bytes(memoryview(value)[:6])) is boolean
    if condition.text is not None:
        text = condition.text
        return lambda value: _decoded(_text, value, _LONGEST_TEXT_BYTES) == text
    least = -math.inf if condition.at_least is None else condition.at_least
    most = math.inf if condition.at_most is None else condition.at_most

    def is_in(value: msgspec.Raw) -> bool:
        number = _decoded(_number, value, _LONGEST_NUMBER_BYTES)
        return number is not None and least <= number <= most

    return is_in


def _decoded(decoder: _Decoder, value: msgspec.Raw, longest: int) -> Any:  # noqa: ANN401 - of the decoder's type
    """None if it is of another type, absent, or longer than any that could meet a condition."""
    if not value or memoryview(value).nbytes > longest:
        return None
    try:
        return decoder.decode(value)
    except (msgspec.ValidationError, msgspec.DecodeError):
        return None


def _is_in(given: TokenRange, tokens: float) -> bool:
    return (given.at_least is None or tokens >= given.at_least) and (given.at_most is None or tokens <= given.at_most)

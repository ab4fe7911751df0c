# SPDX-License-Identifier: Apache-2.0
"""Request bodies of every API to an InferenceRequest, or to a refusal that says what to correct.

Also what can be learnt of a body without its API: which API it is of, and which steering fields it has.
"""

from __future__ import annotations

import json
import re
from operator import attrgetter
from pkgutil import resolve_name
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec

from extproc.errors import BadRequest
from extproc.protocol import ANTHROPIC_VERSION, Api
from extproc.request.bounds import check_bounds, check_rest
from extproc.request.form import read_form
from extproc.request.model import ABSENT, NUMBERS, STEERING_FIELDS, InferenceRequest, steering_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


def parse(api: Api, body: bytes, headers: Mapping[str, str] = _NO_HEADERS) -> InferenceRequest:
    """Read the request in ``body``. Raises BadRequest, which says what to correct."""
    if not body:
        raise no_body(api)
    if api.spec.body == "form":
        return _PARSERS[api](read_form(body, headers.get("content-type", "")))
    check_bounds(body)
    try:
        # msgspec does not check the text of fields that it skips
        if not body.isascii():
            body.decode()
        request = _PARSERS[api](body)
    except UnicodeDecodeError as error:
        raise BadRequest(f"The body is not UTF-8 at byte {error.start}; send JSON in UTF-8, not compressed.") from None
    except RecursionError:
        raise BadRequest("The body is nested too deeply; send plain messages.") from None
    except msgspec.ValidationError as error:
        _refuse_shape(str(error))
    except msgspec.DecodeError as error:
        raise BadRequest(f"The body is not JSON: {error}.") from None
    check_rest(body, request.contents)
    return request


def no_body(api: Api) -> BadRequest:
    """The refusal of a request without a body."""
    what = "form" if api.spec.body == "form" else "JSON object"
    return BadRequest(f"The request has no body; send a {what} with at least 'model'.")


def _refuse_shape(problem: str) -> NoReturn:
    """Raise what msgspec reports, ``Expected `str`, got `int` - at `$.model```, with the field in OpenAI's
    ``param``.
    """
    what, _, where = problem.partition(" - at `")
    param = where.rstrip("`").removeprefix("$").lstrip(".") or None
    if "missing required field" in what:
        name = what.split("`")[1]
        param = f"{param}.{name}" if param else name
        raise BadRequest(f"The field '{param}' is missing; it is required.", param=param)
    if param is not None and param in NUMBERS:
        raise BadRequest(f"'{param}' must be {NUMBERS[param]}; send one, or leave the field out.", param=param)
    raise BadRequest(f"{what.replace('`', chr(39))}{f' in {param}' if param else ' as the body'}.", param=param)


# from bytes, or from a Form
_PARSERS: Final[dict[Api, Callable[[Any], InferenceRequest]]] = {
    api: resolve_name(f"{__package__}.{api.spec.parser}") for api in Api
}


def api_by_body(body: bytes, headers: Mapping[str, str]) -> Api | None:
    """By its fields, where a gateway does not send the path; None if it is no JSON object with those of an API.

    Messages are Anthropic's if the client names a version of that API, or writes ``system`` beside them. A request to
    count tokens looks the same; it is taken for the one that costs more, because a client could leave out what tells
    them apart and be charged nothing for a generation.
    """
    if headers.get("content-type", "").lower().startswith("multipart/form-data"):
        return next((api for api in _FIELDS_OF if api.spec.body == "form"), None)
    try:
        shape = _shape.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    found = {name for name, value in zip(_NAMES, _values(shape), strict=True) if value}
    found |= {f"{name}[]" for name in found if _is_list_of_texts(getattr(shape, name))}
    if headers.get(ANTHROPIC_VERSION):
        found.add(ANTHROPIC_VERSION)
    fitting = [(len(fields), api) for api, sets in _FIELDS_OF.items() for fields in sets if fields <= found]
    return max(fitting, key=lambda one: one[0])[1] if fitting else None


def _is_list_of_texts(field: msgspec.Raw) -> bool:
    """Whether it is a list whose elements are no objects, as an item of a conversation is."""
    text = bytes(field).lstrip()
    return text[:1] == b"[" and text[1:].lstrip()[:1] != b"{"


_FIELDS_OF: Final = {api: [frozenset(one.split()) for one in api.spec.fields_of] for api in Api}
# those of all APIs, undecoded
_NAMES: Final = sorted(
    {name.removesuffix("[]") for sets in _FIELDS_OF.values() for one in sets for name in one} - {ANTHROPIC_VERSION}
)
_shape: Final = msgspec.json.Decoder(
    msgspec.defstruct("_Shape", [(name, msgspec.Raw, ABSENT) for name in _NAMES], gc=False)
)
_values: Final = attrgetter(*_NAMES)


class _Nested(msgspec.Struct, gc=False):
    vllm_xargs: msgspec.Raw = ABSENT
    sampling_params: msgspec.Raw = ABSENT


class _Sampling(msgspec.Struct, gc=False):
    extra_args: msgspec.Raw = ABSENT


def steering_of_unread(body: bytes) -> tuple[str, ...]:
    """The steering fields of a body; none if it is no JSON object.

    Engines read more than JSON: numbers such as NaN, other encodings than UTF-8. In such a body, a field's name in
    quotes counts wherever it stands.
    """
    if not body.lstrip(_BEFORE_OBJECTS).startswith(b"{"):
        return ()
    try:
        nested = _nested.decode(body)
        found = steering_in(msgspec.Raw(body)) + steering_in(nested.vllm_xargs)
        if nested.sampling_params:
            found += steering_in(_sampling.decode(nested.sampling_params).extra_args)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _named_in(body)
    return found


def _named_in(body: bytes) -> tuple[str, ...]:
    text = body.decode(json.detect_encoding(body), errors="replace")
    plain = _ESCAPE.sub(lambda escape: chr(int(escape[1], 16)), text)
    return tuple([name for name in STEERING_FIELDS if f'"{name}"' in plain])


# Spaces, marks of byte order, and the other halves of a brace's two or four bytes.
_BEFORE_OBJECTS: Final = b" \t\r\n\0\xef\xbb\xbf\xfe\xff"
_ESCAPE: Final = re.compile(r"\\u([0-9a-fA-F]{4})")
_nested: Final = msgspec.json.Decoder(_Nested)
_sampling: Final = msgspec.json.Decoder(_Sampling)

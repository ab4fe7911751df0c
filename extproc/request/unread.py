# SPDX-License-Identifier: Apache-2.0
"""Steering fields of bodies that are passed on unread: of other APIs, or not as we expect them."""

from __future__ import annotations

import json
import re
from typing import Final

import msgspec

from extproc.request.fields import ABSENT, steering_in
from extproc.request.model import STEERING_FIELDS


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

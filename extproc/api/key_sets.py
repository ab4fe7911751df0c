# SPDX-License-Identifier: Apache-2.0
"""JSON Web Key Sets: whether Envoy finds a key in one."""

from __future__ import annotations

from typing import Any, Final

import msgspec

# By kind of key, the members of RFC 7518 and RFC 8037 that Envoy reads.
_MEMBERS: Final = {"RSA": {"n", "e"}, "EC": {"x", "y"}, "oct": {"k"}, "OKP": {"x"}}


class _KeySet(msgspec.Struct, frozen=True):
    """As RFC 7517 has it."""

    keys: list[dict[str, Any]]


def has_usable_key(text: str | bytes) -> bool:
    """Whether ``text`` is a key set with a key of a kind that Envoy knows. What is in the key, Envoy judges."""
    try:
        keys = msgspec.json.decode(text, type=_KeySet).keys
    except msgspec.DecodeError:
        return False
    return any(_MEMBERS.get(str(key.get("kty")), {"none"}) <= key.keys() for key in keys)

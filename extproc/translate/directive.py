# SPDX-License-Identifier: Apache-2.0
"""What extproc asks of the translator for one request: between which APIs, and by which headers Envoy finds the engine.

It travels as JSON in a header that no client can write.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from extproc.wire_names import Api

# By client's API: the engine's, fewest steps first, as chat is the hub. Each with its name here.
_ENGINE_APIS: Final[Mapping[Api, tuple[Api, ...]]] = MappingProxyType(
    {
        Api.CHAT: (Api.RESPONSES, Api.MESSAGES),
        Api.MESSAGES: (Api.CHAT, Api.RESPONSES),
        Api.RESPONSES: (Api.CHAT, Api.MESSAGES),
    }
)
NAMES: Final[Mapping[Api, str]] = MappingProxyType(
    {Api.CHAT: "chat", Api.MESSAGES: "messages", Api.RESPONSES: "responses"}
)
encode_directive: Final = msgspec.json.Encoder().encode


class TranslationDirective(msgspec.Struct, frozen=True, omit_defaults=True):
    """``client``, ``engine``: APIs, as ``translation`` calls them. ``is_strict``: a request with fields that have no
    counterpart is refused. ``headers``: of the request, for Envoy. ``answer_headers``: for the client. ``limit_s``: for
    so long Envoy lets the engine answer.
    """

    client: str
    engine: str
    is_strict: bool = False
    headers: Mapping[str, str] = {}
    answer_headers: Mapping[str, str] = {}
    limit_s: float | None = None


decode_directive: Final = msgspec.json.Decoder(TranslationDirective).decode


def translation_target_api(client: Api | None, served: Collection[str]) -> Api | None:
    """To which of the ``served`` APIs, by name, requests of ``client`` are translated; None: to none."""
    if client is None:
        return None
    return next((one for one in _ENGINE_APIS.get(client, ()) if one.spec.name in served), None)

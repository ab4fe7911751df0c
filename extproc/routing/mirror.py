# SPDX-License-Identifier: Apache-2.0
"""A rule's mirror, compiled, and the order of a copy, which Envoy carries from a request's decision to its copy's."""

from __future__ import annotations

from typing import Final

import msgspec


class CompiledMirror(msgspec.Struct, frozen=True):
    """``server``: ``namespace/name``. ``most``: tokens of an answer, None: as clients ask."""

    server: str
    percent: float
    most: int | None = None

    @property
    def order(self) -> str:
        """Of a copy: a header's value, in ASCII, as names of objects are."""
        return msgspec.json.encode(MirrorOrder(self.server, self.most)).decode()


class MirrorOrder(msgspec.Struct, frozen=True, omit_defaults=True):
    """As in CompiledMirror."""

    server: str
    most: int | None = None


_orders: Final = msgspec.json.Decoder(MirrorOrder)


def read_order(text: str) -> MirrorOrder:
    """The order in ``text``; raises ValueError."""
    return _orders.decode(text)

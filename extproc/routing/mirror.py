# SPDX-License-Identifier: Apache-2.0
"""A rule's mirror, compiled, and the directive that Envoy carries from a request's decision to that of its copy."""

from __future__ import annotations

from typing import Final

import msgspec


class CompiledMirror(msgspec.Struct, frozen=True):
    """``server``: ``namespace/name``. ``most``: tokens of an answer, None: as clients ask."""

    server: str
    percent: float
    most: int | None = None

    @property
    def directive(self) -> str:
        """Of a copy: a header's value, in ASCII, as names of objects are."""
        return msgspec.json.encode(MirrorDirective(self.server, self.most)).decode()


class MirrorDirective(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a copy is to be; fields as in CompiledMirror."""

    server: str
    most: int | None = None


_directives: Final = msgspec.json.Decoder(MirrorDirective)


def read_directive(text: str) -> MirrorDirective:
    """The directive in ``text``; raises ValueError."""
    return _directives.decode(text)

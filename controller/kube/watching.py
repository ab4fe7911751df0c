# SPDX-License-Identifier: Apache-2.0
"""The events of a watch, out of the bytes of its answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.kube.errors import error_in_watch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ADDED: Final = "ADDED"
MODIFIED: Final = "MODIFIED"
DELETED: Final = "DELETED"
BOOKMARK: Final = "BOOKMARK"


class WatchEvent(msgspec.Struct, frozen=True):
    """A change. A bookmark's object has nothing but the version up to which all changes have been sent."""

    type: str
    object: dict[str, Any]

    @property
    def resource_version(self) -> str:
        """The version that this change made."""
        return str(self.object["metadata"]["resourceVersion"])


async def events_in(chunks: AsyncIterator[bytes]) -> AsyncIterator[WatchEvent]:
    """One event a line, lines of any length; raises the ApiError of an ERROR event.

    An unfinished last line, which a broken connection leaves, is dropped: the next watch gets that event anew.
    """
    decoder = msgspec.json.Decoder(WatchEvent)
    rest: list[bytes] = []
    async for chunk in chunks:
        *lines, last = chunk.split(b"\n")
        for line in lines:
            whole = b"".join([*rest, line])
            rest.clear()
            if whole.strip():
                yield _checked(decoder.decode(whole))
        if last:
            rest.append(last)


def _checked(event: WatchEvent) -> WatchEvent:
    if event.type == "ERROR":
        raise error_in_watch(event.object)
    return event

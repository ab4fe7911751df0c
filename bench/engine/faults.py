"""Faults on request: ``POST /faults`` with one of these objects."""

from __future__ import annotations

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]


class Refuse(msgspec.Struct, frozen=True, tag_field="fault", tag="refuse"):
    """Listen to nobody for ``for_s`` seconds: connections are refused, those that are open stay."""

    for_s: Seconds


class Stall(msgspec.Struct, frozen=True, tag_field="fault", tag="stall"):
    """Compute nothing for ``for_s`` seconds."""

    for_s: Seconds


class Cut(msgspec.Struct, frozen=True, tag_field="fault", tag="cut"):
    """Cut the connections of the next ``times`` answers after ``after_tokens`` tokens."""

    after_tokens: Count
    times: Count = 1


class Unavailable(msgspec.Struct, frozen=True, tag_field="fault", tag="unavailable"):
    """Answer the next ``times`` requests with ``status``."""

    times: Count
    status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 503


class DropEvents(msgspec.Struct, frozen=True, tag_field="fault", tag="drop-events"):
    """Lose the next ``times`` messages with KV events on their way."""

    times: Count


Fault = Refuse | Stall | Cut | Unavailable | DropEvents


class Plan:
    """The faults that are still to come for requests."""

    def __init__(self) -> None:
        self._cut = Cut(0, 0)
        self._unavailable = Unavailable(0)

    def set(self, fault: Cut | Unavailable) -> None:
        """A newer fault replaces an older one of its kind."""
        if isinstance(fault, Cut):
            self._cut = fault
        else:
            self._unavailable = fault

    def next_status(self) -> int | None:
        """The error that this request is to be answered with."""
        fault = self._unavailable
        if not fault.times:
            return None
        self._unavailable = msgspec.structs.replace(fault, times=fault.times - 1)
        return fault.status

    def next_cut(self) -> int | None:
        """After how many tokens this answer is to be cut off."""
        fault = self._cut
        if not fault.times:
            return None
        self._cut = msgspec.structs.replace(fault, times=fault.times - 1)
        return fault.after_tokens

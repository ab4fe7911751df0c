# SPDX-License-Identifier: Apache-2.0
"""Faults of the fake server, on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from bench.cluster.fake.answers import Refused, conflict
from bench.cluster.fake.targets import Target


class Call(msgspec.Struct, frozen=True):
    """What a client asks for: ``verb`` as RBAC names it (get, list, watch, create, update, patch, delete)."""

    verb: str
    target: Target


Chosen = Callable[[Call], bool]


class Faults:
    """What goes wrong with the next calls. Watches that are open are ended or frozen by the server's own methods."""

    def __init__(self) -> None:
        self._refusals: list[_Refusal] = []
        self._slow: list[tuple[Chosen, float]] = []
        self._frozen = asyncio.Event()
        self._frozen.set()

    def refuse(
        self, count: int, code: int, *, reason: str = "", retry_after_s: int | None = None, of: Chosen | None = None
    ) -> None:
        """Answer the next ``count`` of the chosen calls (all without ``of``) with an error and ``Retry-After``."""
        self._refusals.append(_Refusal(count, code, reason, retry_after_s, of or _any))

    def conflicts(self, count: int, of: Chosen | None = None) -> None:
        """Refuse the next ``count`` updates, as if somebody else had always been faster."""
        chosen = of or _any
        self.refuse(count, 409, reason="Conflict", of=lambda call: call.verb in ("update", "patch") and chosen(call))

    def slow(self, for_s: float, of: Chosen | None = None) -> None:
        """Answer the chosen calls so much later, until ``heal``."""
        self._slow.append((of or _any, for_s))

    def freeze(self) -> None:
        """Send nothing on watches, bookmarks neither, and keep them open, until ``heal``."""
        self._frozen.clear()

    def heal(self) -> None:
        """Nothing goes wrong any more."""
        self._refusals.clear()
        self._slow.clear()
        self._frozen.set()

    async def meet(self, call: Call) -> None:
        """Wait, or raise what this call meets."""
        for chosen, for_s in self._slow:
            if chosen(call):
                await asyncio.sleep(for_s)
        for refusal in self._refusals:
            if refusal.left > 0 and refusal.of(call):
                refusal.left -= 1
                raise refusal.error(call)

    async def thawed(self) -> None:
        """Wait while watches are frozen."""
        await self._frozen.wait()


class _Refusal:
    def __init__(self, left: int, code: int, reason: str, retry_after_s: int | None, of: Chosen) -> None:
        self.left = left
        self.of = of
        self._code = code
        self._reason = reason
        self._retry_after_s = retry_after_s

    def error(self, call: Call) -> Refused:
        if self._code == 409:
            return conflict(call.target.kind.resource.plural, call.target.name)
        details = {} if self._retry_after_s is None else {"retryAfterSeconds": self._retry_after_s}
        return Refused(self._code, self._reason, "a fault that was asked for", details)


def _any(_: Call) -> bool:
    return True

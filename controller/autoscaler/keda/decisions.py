# SPDX-License-Identifier: Apache-2.0
"""The last decision of each binding, for whoever asks, and for whoever waits until it is another one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping


class Wanted(msgspec.Struct, frozen=True):
    """``desired``: replicas of the target. ``is_active``: whether there should be any at all: with False KEDA goes to
    zero after its ``cooldownPeriod``.
    """

    desired: int
    is_active: bool


class Unknown(Exception):
    """There is no such binding or target, or no decision about it yet; the message says which."""


def wanted_of(desired: Mapping[str, int | None]) -> dict[str, Wanted]:
    """By target, as far as it was decided how many replicas each should have."""
    return {name: Wanted(one, is_active=one > 0) for name, one in desired.items() if one is not None}


class Decisions:
    """Told by what follows the bindings' statuses, asked by KEDA's streams; as many as there are bindings, and
    forgotten with them.
    """

    def __init__(self) -> None:
        self._by_binding: dict[str, Mapping[str, Wanted]] = {}
        # those who wait for news, by binding
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}

    def tell(self, binding: str, targets: Mapping[str, Wanted]) -> None:
        """What was decided about a binding, by target."""
        if self._by_binding.get(binding) != targets:
            self._by_binding[binding] = dict(targets)
            self._wake(binding)

    def forget(self, binding: str) -> None:
        """The binding is gone, or no longer ours to decide about."""
        if self._by_binding.pop(binding, None) is not None:
            self._wake(binding)

    def clear(self) -> None:
        """This replica does not lead any more."""
        self._by_binding.clear()
        for binding in list(self._waiting):
            self._wake(binding)

    def wanted(self, binding: str, target: str) -> Wanted:
        """The last decision; ``target`` may be empty if there is only one. Raises Unknown."""
        targets = self._by_binding.get(binding)
        if targets is None:
            raise Unknown(f"there is no AutoscalingPolicyBinding {binding}, or nothing is decided about it yet")
        if not target and len(targets) > 1:
            raise Unknown(
                f"{binding} has the targets {', '.join(sorted(targets))}; write one as 'target' into the metadata"
            )
        name = target or next(iter(targets), "")
        if name not in targets:
            raise Unknown(f"{binding} has no target {target}, or nothing is decided about it yet")
        return targets[name]

    async def other_than(self, last: Wanted | None, binding: str, target: str) -> Wanted | None:
        """Until what is known differs from ``last``: what it is then; None: nothing is known."""
        while True:
            try:
                found = self.wanted(binding, target)
            except Unknown:
                found = None
            if found != last:
                return found
            await self._news(binding)

    async def _news(self, binding: str) -> None:
        """Until something is told of a binding: news of another one wake nobody."""
        told = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(binding, set()).add(told)
        try:
            await told
        finally:
            waiting = self._waiting.get(binding, set())
            waiting.discard(told)
            if not waiting:
                self._waiting.pop(binding, None)

    def _wake(self, binding: str) -> None:
        for told in self._waiting.pop(binding, ()):
            if not told.done():
                told.set_result(None)

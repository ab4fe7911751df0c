# SPDX-License-Identifier: Apache-2.0
"""What every scaling law offers: a recommendation, and what it wants to remember until the next one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

if TYPE_CHECKING:
    from controller.autoscaler.decision.situation import Situation

Memory = TypeVar("Memory")


class Recommendation(msgspec.Struct, frozen=True):
    """``law``: whose. ``replicas``: of the first target, a fraction where targets differ in capacity; None: the law
    does not know, so nothing may be scaled in because of it. ``reason``: for people. ``inputs``: the numbers that led
    there, by name and unit.
    """

    law: str
    replicas: float | None
    reason: str
    inputs: Mapping[str, float] = {}


class Law(Protocol[Memory]):
    """Laws know nothing of bounds, behaviour blocks and modes, which come after."""

    @property
    def name(self) -> str:
        """The strategy's name."""
        ...

    def recommend(self, situation: Situation, memory: Memory | None) -> tuple[Recommendation, Memory | None]:
        """``memory``: what the law returned last; None at first, and after a restart."""
        ...

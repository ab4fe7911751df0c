# SPDX-License-Identifier: Apache-2.0
"""Kinds of engine that a fleet may have, each with its cost and the time that it takes to start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from bench.lab.engine_kinds import engine_kinds
from controller.api.autoscaling_binding import ScaleTarget
from controller.api.common import ObjectReference

if TYPE_CHECKING:
    import random

    from bench.virtual.engines import EngineKind

BLOCK_SIZE: Final = 64


class Variant(msgspec.Struct, frozen=True):
    """One target of the binding in the lab. ``name``: of the target. ``hardware`` and ``model``: as in
    ``bench.lab.engine_kinds``. ``cost``: of a replica and hour. ``accelerators``: of one replica. ``start_s``: from the
    order to the first request. ``jitter``: the share of it by which starts differ, evenly, up and down.
    ``max_replicas``: its bound.
    """

    name: str
    hardware: str
    model: str = "32b"
    cost: float = 1.0
    accelerators: int = 1
    start_s: float = 60.0
    jitter: float = 0.1
    max_replicas: int = 16

    def kind(self) -> EngineKind:
        """The simulated engine. Raises HardwareUnknown."""
        (kind,) = engine_kinds(self.hardware, self.model, count=1, block_size=BLOCK_SIZE)
        return kind

    def drawn_start_s(self, rng: random.Random) -> float:
        """How long the next replica takes to start."""
        return self.start_s * rng.uniform(1 - self.jitter, 1 + self.jitter)

    def target(self, min_replicas: int) -> ScaleTarget:
        """As a binding has it."""
        return ScaleTarget(
            name=self.name,
            ref=ObjectReference(api_version="apps/v1", kind="Deployment", name=self.name),
            min_replicas=min_replicas,
            max_replicas=self.max_replicas,
            cost=self.cost,
            accelerator=self.hardware,
            accelerators=self.accelerators,
        )


# A 32B model on two A100s costs one unit an hour. The other cost is chosen, not a vendor's: by
# ``bench.autoscale.capacity`` the H100s carry 2.7 times as much.
ONE: Final = (Variant("a100", "a100x2", cost=1.0, accelerators=2),)
SEVERAL: Final = (*ONE, Variant("h100", "h100x2", cost=2.6, accelerators=2, start_s=90.0, max_replicas=3))

# SPDX-License-Identifier: Apache-2.0
"""Decisions that are carried out and told, and whether anything has changed since then."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import TYPE_CHECKING

import msgspec

from controller.autoscaler.decision.decision import Decision
from controller.autoscaler.decision.signals import Calm
from controller.autoscaler.reconciler.accelerators import Allowed
from controller.autoscaler.reconciler.resolver import Resolved

if TYPE_CHECKING:
    from controller.autoscaler.reconciler.bindings import BindingView
    from controller.autoscaler.reconciler.status import Looked


class Settled(msgspec.Struct, frozen=True):
    """``decision``: all of it is done and said. The rest: what it was made from when it last stood, its policy apart.
    ``version``: of the binding. ``calm``: None where something went on.
    """

    decision: Decision
    resolved: Sequence[Resolved]
    version: str
    calm: Calm | None
    allowed: Allowed

    def is_told(self, view: BindingView, looked: Looked) -> bool:
        """Whether the binding and its targets are as they were."""
        before, now = self.resolved, looked.resolved
        is_same = self.version == version_of(view) and not looked.holds
        return is_same and len(before) == len(now) and all(map(is_, before, now))

    def is_calm(self, looked: Looked) -> bool:
        """Whether nothing went on, and nothing has since."""
        before, now = self.calm, looked.calm
        return before is not None and now is not None and before.version == now.version


def version_of(view: BindingView) -> str:
    """Another one after each write of the binding, by whomever."""
    return str(view.thing["metadata"].get("resourceVersion", ""))

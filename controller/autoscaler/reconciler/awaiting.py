# SPDX-License-Identifier: Apache-2.0
"""What nobody can tell of a binding, and whether it is early enough to be no fault."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from controller.autoscaler.decision.decision import Decision, StageDecision

# Gateways that say nothing for so long are silent; other sources are read once a period.
_LEAST_S: Final = 3.0
_PERIODS: Final = 6
_NUMBERS: Final = re.compile(r"\d+(\.\d+)?")


def patience_s(period_s: float) -> float:
    """How long a signal may take to come, from the first look at a binding."""
    return max(_LEAST_S, _PERIODS * period_s)


class Awaiting:
    """Remembers when each binding was first looked at by this process."""

    def __init__(self) -> None:
        self._began_at_s: dict[str, tuple[str, float]] = {}

    def is_early(self, key: str, uid: str, decision: Decision, *, period_s: float, now_s: float) -> bool:
        """Whether something is not known that may still come by itself. ``uid``: of the binding, which may have been
        made anew.
        """
        known_uid, began_at_s = self._began_at_s.get(key, ("", 0.0))
        if known_uid != uid:
            began_at_s = now_s
            self._began_at_s[key] = uid, now_s
        is_unknown = not decision.stages or any(one.combined is None for one in decision.stages)
        return is_unknown and 0 <= now_s - began_at_s < patience_s(period_s)

    def forget(self, key: str) -> None:
        """The binding is gone."""
        self._began_at_s.pop(key, None)


def reasons_of(stage: StageDecision) -> list[str]:
    """Why its laws cannot tell."""
    return [one.reason for one in stage.recommendations if one.replicas is None]


def unknown_of(stage: StageDecision) -> list[str] | None:
    """What nobody can tell of a stage, without numbers that change all the time; None if enough is known."""
    return None if stage.combined is not None else [without_numbers(one) for one in reasons_of(stage)]


def without_numbers(text: str) -> str:
    """The same for all numbers in it."""
    return _NUMBERS.sub("#", text)

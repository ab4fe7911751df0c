# SPDX-License-Identifier: Apache-2.0
"""A number of replicas on its way through the rules, with the steps that changed it."""

from __future__ import annotations

import msgspec

from controller.autoscaler.decision.decision import Rule, Step


class Answer(msgspec.Struct, frozen=True):
    """``replicas``: of the stage's first target. ``steps``: what changed it, in order."""

    replicas: float
    steps: tuple[Step, ...] = ()

    def changed(self, rule: Rule, replicas: float, reason: str) -> Answer:
        """The same if ``replicas`` are; otherwise one step further."""
        if replicas == self.replicas:
            return self
        return Answer(replicas, (*self.steps, Step(rule, self.replicas, replicas, reason)))

    def at_least(self, rule: Rule, replicas: float, reason: str) -> Answer:
        """A lower bound."""
        return self.changed(rule, max(self.replicas, replicas), reason)

    def at_most(self, rule: Rule, replicas: float, reason: str) -> Answer:
        """An upper bound."""
        return self.changed(rule, min(self.replicas, replicas), reason)

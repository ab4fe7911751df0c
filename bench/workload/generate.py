"""Conversations of many users with a few assistants: shared system prompts, several turns, pauses to think."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec

from bench.workload.sessions import Session, Turn, Workload, says
from bench.workload.shapes import around

if TYPE_CHECKING:
    from collections.abc import Iterator


class Conversations(msgspec.Struct, frozen=True):
    """``sessions_per_s``: a Poisson process. Lengths in tokens; user turns, answers and pauses vary by half their mean.

    The shape (groups that share a long prompt, multi-turn chats, Poisson arrivals) is that of inference-perf's
    ``shared_prefix`` generator, with which llm-d's published comparisons were made.
    """

    sessions: int = 240
    sessions_per_s: float = 4.5
    system_prompts: int = 24
    system_tokens: int = 4000
    turns: int = 4
    user_tokens: int = 300
    output_tokens: int = 80
    think_s: float = 4.0

    def play(self, seed: int) -> Iterator[Session]:
        """See the class."""
        rng = random.Random(seed)
        systems = [says(f"{seed}/system/{number}", self.system_tokens) for number in range(self.system_prompts)]
        begins_s = 0.0
        for number in range(self.sessions):
            begins_s += rng.expovariate(self.sessions_per_s)
            turns = tuple(
                Turn(
                    pieces=says(f"{seed}/{number}/{turn}", around(rng, self.user_tokens)),
                    output_tokens=around(rng, self.output_tokens),
                    think_s=rng.uniform(0.5, 1.5) * self.think_s if turn else 0.0,
                )
                for turn in range(self.turns)
            )
            yield Session(begins_s, turns, rng.choice(systems))


def conversations(shape: Conversations, seed: int = 0) -> Workload:
    """The workload of ``shape``; equal shapes and seeds give equal workloads."""
    name = f"{shape.sessions} generated conversations of {shape.turns} turns over {shape.system_prompts} system prompts"
    return Workload(name, tuple(shape.play(seed)))

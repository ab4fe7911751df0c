# SPDX-License-Identifier: Apache-2.0
"""One answer from several laws, and what the remaining replicas must be able to carry before any is taken away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from controller.autoscaler.decision.answer import Answer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.autoscaler.decision.law import Recommendation
    from controller.autoscaler.decision.situation import Situation

# Lower bounds only: when they know nothing, the other laws decide.
BOUNDS: Final = frozenset({"Predictive"})
# Caches of the remaining replicas may be in use to this share.
_MOST_CACHE: Final = 0.8
# Waits shorter than this are those for the next look of an engine, not for capacity.
_SHORT_WAIT_S: Final = 1.0
# With latency above this share of the objective nobody goes.
_NEAR_OBJECTIVE: Final = 0.9
_LATENCY_WINDOW_S: Final = 60.0


def combined(recommendations: Sequence[Recommendation], current: float) -> Answer | None:
    """The largest answer; never below ``current`` while a law does not know. None: no law knows."""
    known = [one.replicas for one in recommendations if one.replicas is not None]
    if not known:
        return None
    answer = Answer(max(known))
    unknown = [one.law for one in recommendations if one.replicas is None and one.law not in BOUNDS]
    if unknown:
        return answer.at_least("Unknown", current, f"{', '.join(unknown)} cannot tell")
    if all(one.law in BOUNDS for one in recommendations):
        return answer.at_least("Unknown", current, "no law says that fewer are enough")
    return answer


def carried_by_the_rest(answer: Answer, situation: Situation) -> Answer:
    """Refuse to scale in while something waits, while latency is near the objective, or if caches would be too full."""
    current = situation.current
    if answer.replicas >= current:
        return answer
    waiting = situation.waiting
    if waiting.requests and waiting.oldest_s >= _SHORT_WAIT_S:
        return answer.at_least(
            "Waiting", current, f"{waiting.requests} requests wait, the first {waiting.oldest_s:.1f} s"
        )
    late = _late(situation)
    if late:
        return answer.at_least("Latency", current, late)
    usage = [
        one.report.kv_usage for one in situation.ready if one.report is not None and one.report.kv_usage is not None
    ]
    needed = sum(usage) / _MOST_CACHE
    if usage and needed > answer.replicas:
        reason = f"the caches in use fill {needed:.2f} replicas to {_MOST_CACHE:.0%}"
        return answer.at_least("Caches", min(current, needed), reason)
    return answer


def _late(situation: Situation) -> str:
    objective, now_s = situation.objective, situation.now_s
    if objective is None:
        return ""
    ttft_s, tpot_s = situation.traffic.latencies_s(objective.percentile, _LATENCY_WINDOW_S, now_s)
    for name, value, limit in (("TTFT", ttft_s, objective.ttft), ("TPOT", tpot_s, objective.tpot)):
        if value is not None and limit is not None and value > _NEAR_OBJECTIVE * limit:
            return f"P{objective.percentile:g} of {name} is {value:.3g} s, the objective {limit}"
    return ""

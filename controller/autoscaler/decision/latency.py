# SPDX-License-Identifier: Apache-2.0
"""What measured latencies and requests in flight say of how busy engines are, beside a model of their work."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from controller.autoscaler.decision.queueing import RequestWork, replicas_for_tpot, utilization_for_tpot

if TYPE_CHECKING:
    from controller.autoscaler.decision.load import Load
    from controller.autoscaler.decision.situation import Situation, Speed

LEAST_CORRECTION: Final = 0.5
MOST_CORRECTION: Final = 2.0
# Measured steps that are hardly slower than idle ones say little about how busy an engine is.
_LEAST_BUSY: Final = 0.1
# Only from this share of the objective on can measured TPOT call for more than the model does.
_NEAR_OBJECTIVE: Final = 0.62
_MOST_CROWD: Final = 1.5
_LATENCY_WINDOW_S: Final = 60.0
# Answers that end in the window began before it.
ANSWERED_S: Final = 90.0
_FEWEST_ANSWERS: Final = 20


def crowd(situation: Situation, load: Load, work: RequestWork) -> float:
    """In flight over what would be at the objective, by Little's law, within bounds: engines that are slower than
    expected, or load that has risen since it was measured, show here first.
    """
    objective = situation.objective
    if objective is None or objective.tpot is None or load.arrivals_per_s <= 0 or work.output_tokens <= 0:
        return 1.0
    in_flight = sum(one.report.in_flight for one in situation.engines if one.report is not None)
    allowed = load.arrivals_per_s * work.output_tokens * objective.tpot
    spare = 2 * math.sqrt(max(1.0, allowed))
    return min(_MOST_CROWD, max(1.0, (in_flight + situation.waiting.requests - spare) / allowed))


def measured_correction(situation: Situation, ready: float, work: RequestWork, speed: Speed) -> float | None:
    """How much more work measured TPOT shows than the model expects; None if it shows nothing. ``ready``: replicas of
    the time in which the requests were answered that are measured.
    """
    objective = situation.objective
    rates = situation.traffic.rates(ANSWERED_S, situation.now_s)
    if objective is None or objective.tpot is None or work.output_tokens <= 0 or rates is None or rates.arrivals <= 0:
        return None
    _, tpot_s = situation.traffic.latencies_s(objective.percentile, _LATENCY_WINDOW_S, situation.now_s)
    if tpot_s is None:
        return None
    limits = {"step_s": speed.step_s, "tpot_s": float(objective.tpot)}
    expected = replicas_for_tpot(rates.arrivals, work, percent=objective.percentile, **limits) * utilization_for_tpot(
        **limits
    )
    busy = ready * max(_LEAST_BUSY, 1 - speed.step_s / tpot_s)
    # far below the objective the idle step's error would count more than what is measured
    most = MOST_CORRECTION if tpot_s > _NEAR_OBJECTIVE * objective.tpot else 1.0
    return min(most, max(LEAST_CORRECTION, busy / expected))


def worst_latency(situation: Situation) -> float | None:
    """The larger of TTFT and TPOT, each over its objective; None with few answers, or without an objective."""
    objective = situation.objective
    rates = situation.traffic.rates(_LATENCY_WINDOW_S, situation.now_s)
    if objective is None or rates is None or rates.finished * rates.window_s < _FEWEST_ANSWERS:
        return None
    ttft_s, tpot_s = situation.traffic.latencies_s(objective.percentile, _LATENCY_WINDOW_S, situation.now_s)
    pairs = ((ttft_s, objective.ttft), (tpot_s, objective.tpot))
    shares = [value / limit for value, limit in pairs if value is not None and limit]
    return max(shares) if shares else None

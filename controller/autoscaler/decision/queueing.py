# SPDX-License-Identifier: Apache-2.0
"""How busy engines may be for latencies to stay within their objectives, from models of queues.

An engine works in steps. A step takes ``alpha`` seconds, and longer for each token of context that it reads (``beta``)
and for the prompts that it computes in it. Work that a request adds, in seconds of engine time:

    prefill  I / Vp                 I: uncached work of the prompt; Vp: prefill speed
    decode   O * beta * L           O: tokens of the answer; L = prompt + O / 2: mean tokens of context

With ``rate`` requests a second, the share of time that goes into such work is rho = rate * (prefill + decode). What is
left is spent in steps' own ``alpha``. So there are (1 - rho) / alpha steps a second, and as each running request gets a
token in each step:

    TPOT = alpha / (1 - rho)        hence rho <= 1 - alpha / objective

That is a mean over time. While a request decodes (D seconds), the work that arrives varies: a sum of rate * D works w
that vary about as much as they are large has variance 2 * rho * w * D. A pool shares this out, so n engines need room
for z standard deviations of the pool's work, not n times that of each: R + z * sqrt(2 * R * w / D) with R = n * rho,
the rule of square roots (Halfin and Whitt, 1981).

Prompts wait for prompts before them. Prefill gets what decode leaves of an engine, so a prompt takes
S = prefill / (1 - rho_decode), at a utilisation of x = rho_prefill / (1 - rho_decode). Sakasegawa (1977): with n
servers a job has to wait with the probability x ** sqrt(2 * (n + 1)), nearly. How long, follows the queue of one
engine, as a prompt cannot move once it is sent: exponential with mean S / (1 - x) for works that vary about as much as
they are large.

    P(wait > t) = x ** sqrt(2 * (n + 1)) * exp(-(1 - x) * t / S)
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Final

import msgspec

LEAST_UTILIZATION: Final = 0.3
MOST_UTILIZATION: Final = 0.9
# The share of a cache that may be in use; the rest is for fluctuation, without which requests are preempted.
MOST_CACHE: Final = 0.9
_NORMAL: Final = NormalDist()
_HALVINGS: Final = 20


class RequestWork(msgspec.Struct, frozen=True):
    """What one request asks of an engine. ``prefill_s`` and ``decode_s``: seconds of its time beyond steps' own.
    ``output_tokens``: steps. ``context_tokens``: mean tokens in its cache.
    """

    prefill_s: float
    decode_s: float
    output_tokens: float
    context_tokens: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.prefill_s + self.decode_s


def utilization_for_tpot(step_s: float, tpot_s: float) -> float:
    """The share of time that may go into work for steps to follow each other within ``tpot_s``."""
    return min(MOST_UTILIZATION, max(LEAST_UTILIZATION, 1 - step_s / tpot_s))


def replicas_for_tpot(rate: float, work: RequestWork, *, step_s: float, tpot_s: float, percent: float) -> float:
    """``percent``: of requests that should have ``tpot_s``."""
    busy = rate * work.total_s
    duration_s = max(tpot_s, work.output_tokens * tpot_s)
    spare = max(0.0, _NORMAL.inv_cdf(percent / 100)) * math.sqrt(2 * busy * work.total_s / duration_s)
    return (busy + spare) / utilization_for_tpot(step_s, tpot_s)


def replicas_for_ttft(rate: float, work: RequestWork, *, ttft_s: float, percent: float, replicas: float) -> float:
    """``replicas``: about how many there are to choose from."""
    if work.prefill_s <= 0:
        return 0.0
    own_s = work.prefill_s / MOST_UTILIZATION
    late = 1 - percent / 100
    power = math.sqrt(2 * (max(1.0, replicas) + 1))
    wait_s = max(0.0, ttft_s - own_s)
    low, high = 0.0, MOST_UTILIZATION
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        is_late = middle**power * math.exp(-(1 - middle) * wait_s / own_s) > late
        low, high = (low, middle) if is_late else (middle, high)
    return rate * work.prefill_s / max(LEAST_UTILIZATION, low) + rate * work.decode_s


def replicas_for_cache(rate: float, work: RequestWork, *, kv_tokens: float, tpot_s: float) -> float:
    """By Little's law: tokens in flight are the rate, times how long a request takes, times its context."""
    in_flight = rate * (work.prefill_s + work.output_tokens * tpot_s) * work.context_tokens
    return in_flight / (MOST_CACHE * kv_tokens)

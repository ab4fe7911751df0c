# SPDX-License-Identifier: Apache-2.0
"""Latency objectives of a request, and which endpoints are expected to meet them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from extproc.protocol import SLO_TPOT_MS, SLO_TTFT_MS

if TYPE_CHECKING:
    from extproc.endpoints.table import Bools
    from extproc.scheduling.picker import View


def objective_ms(view: View, what: Literal["ttft", "tpot"]) -> float:
    """The request's objective in milliseconds; 0 if it has none, or one that cannot be read."""
    if not view.request.is_trusted:
        return 0.0  # clients may not set objectives by themselves
    headers = view.request.headers
    names = SLO_TTFT_MS if what == "ttft" else SLO_TPOT_MS
    text = next((headers[name] for name in names if headers.get(name)), "0")
    try:
        return max(0.0, float(text))
    except ValueError:
        return 0.0


def meets_objectives(view: View) -> Bools | None:
    """The rows expected to meet every objective that the request has; None if it has none.

    TTFT is waiting work over the learned prefill rate, TPOT the recent mean; one that is not known yet is no miss.
    """
    ttft_ms, tpot_ms = objective_ms(view, "ttft"), objective_ms(view, "tpot")
    if not ttft_ms and not tpot_ms:
        return None
    meets: Bools = view.table.is_active.copy()
    if ttft_ms:
        meets &= 1000 * view.ttft_s() <= ttft_ms
    if tpot_ms:
        meets &= 1000 * view.table.tpot_s <= tpot_ms
    return meets

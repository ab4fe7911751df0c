# SPDX-License-Identifier: Apache-2.0
"""Whether engines have room: for copies of requests, and for gateways that have this one as a provider.

What such a gateway is told is one number for a model, and nothing of who causes it: how full the ModelServer is that
its requests would go to. It is full, too, if requests wait for it here, or if it has no usable endpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from extproc.admission.saturation import EndpointHeadroom, PrefillDecodeMasks
from extproc.api.admission import SaturationSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.admission.fair_queue import FlowControlGate
    from extproc.routing.routing_table import RuleTargets
    from extproc.scheduling.pool import Pool

_USUAL: Final = SaturationSpec()


def has_capacity(pool: Pool, now: float) -> bool:
    """Whether an engine would begin a request at once, by the limits of its queue or the usual ones."""
    return bool(_headroom_of(pool, now).open.any())


def load_fraction(
    targets: RuleTargets, pools: Mapping[str, Pool], gates: Mapping[str, FlowControlGate], now: float
) -> float:
    """From 0 to 1, how full it is where a request goes: at the emptiest tier, or without tiers at the fullest of those
    that may be drawn for it.
    """
    found = [pools[one.server] for one in targets.destinations if one.server in pools]
    if targets.sticky is None:
        # a full provider gets none of them while another has room
        found = [one for one in found if not one.is_provider_full(now)] or found
    loads = [_load_at(one, gates.get(one.name), now) for one in found]
    has_tiers = any(one.rule.tiers is not None for one in targets.destinations)
    return (min if has_tiers else max)(loads, default=1.0)


def _load_at(pool: Pool, gate: FlowControlGate | None, now: float) -> float:
    if not pool.is_ready(now):
        return 1.0
    if gate is None:
        return _headroom_of(pool, now).saturation
    gate.update_saturation(now)
    return 1.0 if len(gate.queue) else gate.saturation


def _headroom_of(pool: Pool, now: float) -> EndpointHeadroom:
    control, stages = pool.spec.flow_control, pool.prefill_decode_rows()
    limits = (_USUAL if control is None else control.saturation).limits()
    return EndpointHeadroom(pool.table, limits, now, None if stages is None else PrefillDecodeMasks(*stages))

# SPDX-License-Identifier: Apache-2.0
"""Beside another endpoint picker: what ours would have chosen, compared with what the other one chose.

The gateway sends copies (``observability_mode``) of requests that the other picker has decided, and reads no answer.
Each request then counts as sent to the other's choice, so that load and caches here are those that there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from extproc.core.explanation import Explanation
from extproc.refusals import Refusal
from extproc.wire_names import DESTINATION

if TYPE_CHECKING:
    from collections.abc import Collection

    from extproc.core.core import Core
    from extproc.core.request_record import Arrival, GatewayProperties, RequestHead

Verdict = Literal["agreed", "differed", "refused", "unknown_endpoint", "not_chosen"]


class ShadowComparison(msgspec.Struct, frozen=True):
    """One comparison. ``theirs``: the other's first choice, empty if none was seen. ``ours``: why and where; None: ours
    would have refused the request. ``their_cost_s``: what their choice costs by our estimate, None if unknown.
    """

    server: str
    verdict: Verdict
    theirs: str
    ours: Explanation | None
    their_cost_s: float | None = None


def other_picker_choice(head: RequestHead, seen: str) -> str:
    """The endpoint that the other picker wrote into the request's header, or into metadata (``seen``)."""
    return (head.headers.get(DESTINATION) or seen).partition(",")[0].strip()


def compare_picks(
    core: Core, arrival: Arrival, attachment: GatewayProperties, theirs: str, now: float
) -> tuple[ShadowComparison, Collection[str]]:
    """The comparison, and the addresses that the request has gone to. Nothing is changed."""
    server = arrival.pool.name
    if not theirs:
        return ShadowComparison(server, "not_chosen", "", None), ()
    if arrival.pool.table.row_of(theirs) is None:
        return ShadowComparison(server, "unknown_endpoint", theirs, None), ()
    try:
        ours = core.explain(arrival, now, attachment=attachment)
    except Refusal:
        return ShadowComparison(server, "refused", theirs, None), (theirs,)
    if ours.addresses[:1] == (theirs,):
        return ShadowComparison(server, "agreed", theirs, ours, ours.cost_s), (theirs,)
    pinned = msgspec.structs.replace(attachment, subset=(theirs,))
    try:
        cost_s = core.explain(arrival, now, attachment=pinned).cost_s
    except Refusal:
        cost_s = None
    return ShadowComparison(server, "differed", theirs, ours, cost_s), (theirs,)

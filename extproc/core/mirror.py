# SPDX-License-Identifier: Apache-2.0
"""Mirrors: copies of requests to another ModelServer, for engines that have capacity to spare.

A copy is drawn when its request is sent. Envoy makes it, drops its answer, and asks extproc on a listener of its own
where it goes. There it is a request of nobody: no limit, budget or usage log counts it, and it has one attempt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.core.spare_capacity import has_capacity

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from extproc.core.request_builder import RequestBuilder
    from extproc.core.request_record import Arrival, GatewayProperties
    from extproc.scheduling.pool import Pool, UncommittedPick
    from extproc.wire_names import Api


class PercentMirrorSampler:
    """Draws copies."""

    def __init__(self, *, rng: random.Random) -> None:
        """``apply_config`` comes before anything else."""
        self._builder: RequestBuilder
        self._rng = rng

    def apply_config(self, builder: RequestBuilder) -> None:
        """Follow the configuration."""
        self._builder = builder

    def draw_copy(
        self, arrival: Arrival, attachment: GatewayProperties, considered: UncommittedPick, now: float
    ) -> str:
        """The directive for a copy, for Envoy; empty: there is none."""
        mirror = arrival.destination.rule.mirror
        if mirror is None or not attachment.is_bundle or self._rng.random() * 100 >= mirror.percent:
            return ""
        return "" if any(self._reasons_against(arrival, considered, now)) else mirror.directive

    def describe_copy(self, arrival: Arrival, considered: UncommittedPick, now: float) -> str:
        """What becomes of a copy of the request, in words; empty if its rule has no mirror."""
        mirror = arrival.destination.rule.mirror
        if mirror is None:
            return ""
        why = next(self._reasons_against(arrival, considered, now), "")
        if why:
            return f"no copy of it goes to the mirror {mirror.server}: {why}"
        return f"copies of {mirror.percent:g} % of such requests go to the mirror {mirror.server}"

    def _reasons_against(self, arrival: Arrival, considered: UncommittedPick, now: float) -> Iterator[str]:
        """Why there can be no copy of the request now."""
        mirror, request = arrival.destination.rule.mirror, arrival.request
        pool = None if mirror is None else self._builder.pools.get(mirror.server)
        if arrival.adapter is not None:
            yield "the request is for an adapter"
        if considered.pick.prefill_row is not None:
            yield "the request's prompt is computed by another engine"
        if request.api is None or request.is_unread or request.api.spec.body != "json":
            yield "the request's body is not read as JSON"
        elif pool is None:
            yield "it is not configured"
        else:
            yield from _reasons_there(pool, request.api, now)


def _reasons_there(pool: Pool, api: Api, now: float) -> Iterator[str]:
    if pool.spec.protocol != "OpenAI" or (pool.spec.apis is not None and api.spec.name not in pool.spec.apis):
        yield "it does not serve this API"
    elif not pool.is_ready(now):
        yield "it has no usable endpoint"
    elif not has_capacity(pool, now):
        yield "its engines have no capacity to spare"

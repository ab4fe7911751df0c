# SPDX-License-Identifier: Apache-2.0
"""Requests whose prompt another engine computes: records in state PREFILLING, from their pick to their decision."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from extproc.core.dispatch import no_longer_served
from extproc.core.effects import Broadcast, CancelPrefill, Effect, PrefillEnded, with_fault
from extproc.core.peers import RequestPrefilled
from extproc.core.prefill import Judged, end_leg, judge_prefill, outcome_of_leg
from extproc.core.record import PrefillLeg
from extproc.core.states import Event, State
from extproc.errors import NoEndpoint, PrefillFailed, PrefillRefused, Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.core.dispatch import Dispatcher
    from extproc.core.record import PrefillResult, Record, Run
    from extproc.core.running import RunningRequests
    from extproc.scheduling.pool import Pool


class PrefillLegs:
    """The second half of a leg: its end. ``Dispatcher.dispatch`` begins it."""

    def __init__(
        self,
        records: Mapping[str, Record],
        dispatcher: Dispatcher,
        running: RunningRequests,
        *,
        has_peers: bool,
    ) -> None:
        self._records = records
        self._dispatcher = dispatcher
        self._running = running
        self._has_peers = has_peers

    def on_result(self, result: PrefillResult, pools: Mapping[str, Pool], now: float, out: list[Effect]) -> None:
        """The prefill engine has answered, or has not: the request goes on, or is refused."""
        record = self._records.get(result.ticket)
        if record is None or record.run is None or record.state is not State.PREFILLING:
            # its client left meanwhile
            return
        run, (asked, pending) = record.run, self._dispatcher.legs.pop(record.ticket)
        record.happens(Event.GRANTED)
        took_s, group = now - record.since_s, run.pool.spec.pd_group
        judge = partial(
            judge_prefill,
            asked,
            result,
            age_s=now - result.answered_at_s,
            lease_s=0.0 if group is None else float(group.lease),
        )
        judged = with_fault(out, "the answer to a prefill could not be used", judge) or Judged("unreadable")
        is_done = judged.outcome == "prefilled"
        event = RequestPrefilled(
            record.ticket,
            outcome_of_leg(judged, result, asked.address, took_s),
            is_done=is_done,
            is_leased=is_done and asked.protocol.has_lease,
            waited_s=record.held_s + took_s,
        )
        end_leg(record, run, event, now, out)
        if self._has_peers:
            out.append(Broadcast(event))
        leg, pool = PrefillLeg(asked.address, judged.outcome, took_s, judged.detail), run.pool
        refusal = _refusal_of(run, judged, result) if pools.get(pool.name) is pool else no_longer_served(pool.name)
        out.append(PrefillEnded(record.ticket, pool.name, leg, goes_on=refusal is None))
        if refusal is not None:
            self._running.release(record, run, now, out)
            out.append(self._dispatcher.refuse(record, refusal, now, out))
            return
        self._dispatcher.put(record, State.RUNNING, now)
        body = judged.body if is_done else pending.body
        out.append(self._dispatcher.decide(record, run, pending, body=body, leg=leg, is_leased=event.is_leased))

    def leave(self, record: Record, run: Run, now: float, out: list[Effect]) -> None:
        """The client of a request that prefills has left: neither engine goes on with it."""
        asked, _ = self._dispatcher.legs.pop(record.ticket)
        leg = PrefillLeg(asked.address, "left", now - record.since_s)
        out += [CancelPrefill(record.ticket), PrefillEnded(record.ticket, run.pool.name, leg, goes_on=False)]
        self._running.undo(record, run, now, out)


def _refusal_of(run: Run, judged: Judged, result: PrefillResult) -> Refusal | None:
    """Why the request cannot go on; None: it can."""
    group = run.pool.spec.pd_group
    if judged.outcome == "refused":
        return PrefillRefused(judged.detail, status=result.status)
    if judged.outcome != "prefilled" and group is not None and group.on_prefill_failure == "Fail":
        return PrefillFailed("The engine that was to compute the prompt failed; try again later.", retry_after_s=1)
    if not run.assignment.addresses:
        return NoEndpoint("No decode engine is left for this model; try again later.")
    return None

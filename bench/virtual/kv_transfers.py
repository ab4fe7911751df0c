# SPDX-License-Identifier: Apache-2.0
"""KV caches between virtual engines: pulled after the prefill, or pushed in pieces while it runs.

Pull, as by vLLM's NixlConnector: the decode engine gets the request when the prefill engine has answered, reserves
blocks, and reads the whole. Push, as by SGLang: both get the request at once, and each chunk of the prompt is sent as
soon as it is computed and the blocks are reserved; only the last piece is waited for.

A transfer uses the outgoing link of one engine and the incoming link of the other, each shared by all its transfers,
and has ended when both have carried it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from bench.engine.kv_transfer import PinnedExports, SharedLink
from bench.engine.request import Request
from bench.virtual.engines import VirtualEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.engine.kv_transfer import TransferNetwork
    from bench.virtual.event_queue import EventQueue


class _Direction:
    """A link whose ends are events. ``on_end``: called with the key of each transfer that it has carried."""

    def __init__(self, events: EventQueue, bandwidth: float, on_end: Callable[[int, float], None]) -> None:
        self._events = events
        self._link: SharedLink[int] = SharedLink(bandwidth)
        self._on_end = on_end
        self._plan = 0

    def begin(self, key: int, size: float, now: float) -> None:
        self._link.begin(key, size, now)
        self._plan_end()

    def _plan_end(self) -> None:
        self._plan += 1
        plan, end_s = self._plan, self._link.next_end_s()
        if end_s is not None:
            self._events.schedule_at(end_s, lambda now: self._end(plan, now))

    def _end(self, plan: int, now: float) -> None:
        if plan != self._plan:
            return
        ended = self._link.pop_ended(now)
        self._plan_end()
        for key in ended:
            self._on_end(key, now)


class _Handover(msgspec.Struct):
    """One prompt on its way. ``computed`` and ``sent``: tokens of it. ``left``: ends of pieces that are to come.

    ``missing``: tokens that the decode engine lacks; None until it has reserved blocks for them.
    """

    prefilled: Request
    decoded: Request
    source: VirtualEngine
    target: VirtualEngine
    computed: int = 0
    sent: int = 0
    left: int = 0
    missing: int | None = None


class KvTransfers:
    """All transfers of a simulation. ``count``: that have ended. ``carried``: tokens.

    ``kv_bytes``: of a token. ``pushes``: in pieces, while the prefill runs.
    """

    def __init__(self, events: EventQueue, network: TransferNetwork, *, kv_bytes: float, pushes: bool) -> None:
        self.pushes = pushes
        self.count = self.carried = 0
        self._events = events
        self._network = network
        self._kv_bytes = kv_bytes
        self._out: dict[VirtualEngine, _Direction] = {}
        self._in: dict[VirtualEngine, _Direction] = {}
        self._exports: dict[VirtualEngine, PinnedExports[int]] = {}
        self._handovers: dict[int, _Handover] = {}
        self._by_prefill: dict[int, _Handover] = {}
        self._met: set[tuple[VirtualEngine, VirtualEngine]] = set()

    def register(self, prefilled: Request, source: VirtualEngine, decoded: Request, target: VirtualEngine) -> None:
        """``source`` will compute ``prefilled``, and ``target`` will need it for ``decoded``."""
        prefilled.is_exported = decoded.is_remote = True
        handover = _Handover(prefilled, decoded, source, target)
        self._handovers[decoded.key] = self._by_prefill[prefilled.key] = handover

    def retarget(self, decoded: Request, target: VirtualEngine) -> None:
        """``target`` will need it instead; nothing has been sent yet."""
        self._handovers[decoded.key].target = target

    def on_step(self, engine: VirtualEngine, now: float) -> None:
        """A step of ``engine`` has ended or begun: see what it has computed, exported, and reserved blocks for."""
        scheduler = engine.scheduler
        for request, tokens in scheduler.pop_sendable_tokens():
            handover = self._by_prefill[request.key]
            handover.computed = max(handover.computed, tokens)
            if self.pushes or tokens >= request.prompt_tokens:
                self._send(handover, now)
        for request, blocks in scheduler.pop_finished_exports():
            self._exports_of(engine).pin(request.key, blocks, now)
        for request, missing in scheduler.pop_transfers_to_start():
            handover = self._handovers[request.key]
            handover.missing = missing
            # what it has itself need not be sent
            handover.sent = request.tokens - missing
            if self.pushes or handover.computed >= handover.prefilled.prompt_tokens:
                self._send(handover, now)

    def _send(self, handover: _Handover, now: float) -> None:
        """Send what is computed, reserved for and not sent."""
        tokens = handover.computed - handover.sent
        if handover.missing is None or tokens <= 0:
            return
        handover.sent += tokens
        handover.left += 2
        key = handover.decoded.key
        pair = (handover.source, handover.target)
        delay_s = self._network.latency_s + (0.0 if pair in self._met else self._network.handshake_s)
        self._met.add(pair)

        def begin(later: float) -> None:
            for table, engine in ((self._out, handover.source), (self._in, handover.target)):
                if engine not in table:
                    table[engine] = _Direction(self._events, self._network.bandwidth, self._carried)
                table[engine].begin(key, tokens * self._kv_bytes, later)

        self._events.schedule_at(now + delay_s, begin)

    def _carried(self, key: int, now: float) -> None:
        handover = self._handovers[key]
        handover.left -= 1
        if handover.left or handover.sent < handover.prefilled.prompt_tokens:
            return
        del self._handovers[key], self._by_prefill[handover.prefilled.key]
        assert handover.missing is not None
        self.count += 1
        self.carried += handover.missing
        self._exports_of(handover.source).release(handover.prefilled.key)
        handover.source.wake(now)
        handover.target.scheduler.on_transfer_ended(handover.decoded, handover.missing)
        handover.target.wake(now)

    def _exports_of(self, engine: VirtualEngine) -> PinnedExports[int]:
        # the decode engine's heartbeats prolong the lease from the time it has the request, which here is always early
        return self._exports.setdefault(engine, PinnedExports(engine.scheduler.pool, lease_s=float("inf")))

# SPDX-License-Identifier: Apache-2.0
"""A core over two variants of a model, each with as many engines as a test wants: how requests live through zero."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

from extproc.core.core import Core
from extproc.core.effects import (
    Decision,
    EngineNeeded,
    EngineStarted,
    LoadAdapter,
    RequestHeld,
    RequestRefused,
    WakeAt,
)
from extproc.core.request_record import BUNDLE, AdapterLoadResult, GatewayProperties, RequestHead
from extproc.core.request_states import RequestState
from tests.extproc.scenes import configuration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from extproc.api.config_snapshot import Snapshot
    from extproc.core.effects import Effect
    from extproc.refusals import Refusal

SMALL, BIG = "default/small", "default/big"
ACTIVATION = "activation: {holdTimeout: 60s, startTime: 30s}"
GATE = "flowControl: {saturation: {queueDepth: null, kvUsage: null, maxWait: null, maxRequests: 2}, timeout: 50s}"
_ROUTE = """
modelName: chat
loraAdapters: [sql]
rules:
  - {priority: 5, modelMatch: {headers: {x-urgency: {exact: high}}}, targetModels: [%s]}
  - targetModels: [%s]
rateLimits: [{unit: hour, requests: 10000}]
"""


def engine(number: int, *, labels: Mapping[str, str] | None = None, draining: bool = False) -> str:
    """One entry of a ModelServer's endpoints."""
    named = "".join(f", labels: {{{name}: {value}}}" for name, value in (labels or {}).items())
    return f"{{address: '10.0.0.{number}:8000'{named}{', draining: true' if draining else ''}}}"


def snapshot_of(servers: Mapping[str, Sequence[str]], more: Mapping[str, str], weights: Mapping[str, int]) -> Snapshot:
    """``servers``: their engines by name; ``more``: the rest of their specs; ``weights``: of the route's targets."""
    specs = {
        name.partition("/")[2]: f"scrapeInterval: 0s\nendpoints: [{', '.join(engines)}]\n{more.get(name, '')}"
        for name, engines in servers.items()
    }
    targets = ", ".join(
        f"{{modelServerName: {key.partition('/')[2]}, weight: {value}}}" for key, value in weights.items()
    )
    return configuration(servers=specs, routes={"chat": _ROUTE % (targets, targets)})


class Zero:
    """The shell, by hand. ``ends``: the one answer that each request got. ``effects``: all that were asked for."""

    def __init__(
        self,
        *,
        small: Sequence[str] = (),
        big: Sequence[str] = (),
        more: Mapping[str, str] | str = ACTIVATION,
        weights: Mapping[str, int] | None = None,
        seed: int = 0,
    ) -> None:
        self.more = dict.fromkeys((SMALL, BIG), more) if isinstance(more, str) else dict(more)
        self.weights = {SMALL: 1} if weights is None else dict(weights)
        self.servers: dict[str, list[str]] = {SMALL: list(small), BIG: list(big)}
        self.now = 100.0
        self.core = Core(self._snapshot(), rng=random.Random(seed), ticket_prefix="t")
        self.ends: dict[str, Decision | RequestRefused] = {}
        self.order: list[str] = []
        # whether decisions have reasons
        self.explains = False
        # whether a draining engine got something new
        self.sent_to_leaving = False
        # how long each held request may take, as its gateway was told, and how long each took
        self.held: dict[str, float] = {}
        self.asked_at_s: dict[str, float] = {}
        self.took_s: dict[str, float] = {}
        self.effects: list[Effect] = []
        self.wake_at_s: float | None = None

    def _snapshot(self) -> Snapshot:
        return snapshot_of(self.servers, self.more, self.weights)

    def apply(self) -> None:
        """The configuration as it is now."""
        self.perform(self.core.apply(self._snapshot(), self.now))
        self.passes(0.0)

    def have(self, server: str, *engines: str) -> None:
        """The server has these engines from now on."""
        self.servers[server] = list(engines)
        self.apply()

    def perform(self, effects: Sequence[Effect]) -> None:
        self.effects += effects
        for effect in effects:
            if isinstance(effect, Decision):
                endpoint = effect.assignment.endpoint
                self.sent_to_leaving |= self.core.pools[effect.server].table.configs[endpoint.row].is_draining
            match effect:
                case Decision() | RequestRefused():
                    assert effect.ticket not in self.ends, "answered twice"
                    self.ends[effect.ticket] = effect
                    self.took_s[effect.ticket] = self.now - self.asked_at_s.get(effect.ticket, self.now)
                    self.order.append(effect.ticket)
                case LoadAdapter():
                    done = AdapterLoadResult(effect.server, effect.address, effect.adapter)
                    self.perform(self.core.on_work_result(done, self.now))
                case WakeAt():
                    self.wake_at_s = effect.at_s if self.wake_at_s is None else min(effect.at_s, self.wake_at_s)

    def ask(
        self,
        count: int = 1,
        *,
        model: str = "chat",
        urgency: str = "",
        attachment: GatewayProperties = BUNDLE,
        size: int = 2,
        tenant: str = "",
    ) -> list[str]:
        """So many requests arrive."""
        tickets = []
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": "x" * size}]}).encode()
        headers = {"x-urgency": urgency} | ({"x-attache-tenant": tenant} if tenant else {})
        head = RequestHead("POST", "/v1/chat/completions", headers, has_body=True, is_trusted=bool(tenant))
        for _ in range(count):
            own, effects = self.core.arrive(
                self.core.builder.build_by_model(head, body), self.now, attachment, wants_reasons=self.explains
            )
            tickets.append(own.ticket)
            self.asked_at_s[own.ticket] = self.now
            if isinstance(own, RequestHeld):
                self.held[own.ticket] = own.longest_s
            self.perform([own, *effects])
        self.passes(0.0)
        return tickets

    def passes(self, seconds: float) -> None:
        until = self.now + seconds
        while self.wake_at_s is not None and self.wake_at_s <= until:
            self.now, self.wake_at_s = max(self.now, self.wake_at_s), None
            self.perform(self.core.tick(self.now))
        self.now = until

    def leave(self, ticket: str) -> None:
        self.perform(self.core.on_disconnect(ticket, self.now))
        self.passes(0.0)

    def finish(self, ticket: str) -> None:
        self.perform(self.core.on_stream_closed(ticket, self.now))
        self.passes(0.0)

    def went(self, ticket: str) -> str:
        """Where it was sent."""
        end = self.ends[ticket]
        assert isinstance(end, Decision), end
        return end.assignment.endpoint.address

    def decisions(self) -> list[Decision]:
        return [one for one in self.ends.values() if isinstance(one, Decision)]

    def refusal(self, ticket: str) -> Refusal:
        end = self.ends[ticket]
        assert isinstance(end, RequestRefused), end
        return end.refusal

    def waiting(self) -> dict[str, int]:
        return self.core.meter.waiting_in(RequestState.AWAITING_ENGINE)

    def told(self) -> list[str]:
        """The servers of which the shell was told that somebody waits."""
        return [one.server for one in self.effects if isinstance(one, EngineNeeded)]

    def starts(self) -> list[float]:
        return [one.after_s for one in self.effects if isinstance(one, EngineStarted)]

    def awaits(self, ticket: str) -> RequestHeld:
        (found,) = [one for one in self.effects if isinstance(one, RequestHeld) and one.ticket == ticket]
        assert found.state is RequestState.AWAITING_ENGINE
        return found

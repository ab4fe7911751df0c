# SPDX-License-Identifier: Apache-2.0
"""Where the lives of requests are tried out: configurations, requests, and another worker."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

from extproc.admission.flow_queues import FlowKey
from extproc.core.core import Core
from extproc.core.effects import Broadcast, Decision, Effect, LoadAdapter, RequestHeld
from extproc.core.peer_events import RequestStarted
from extproc.core.request_record import AdapterLoadResult, Outcome, PrefillResult, RequestHead, SentRequest
from extproc.core.request_states import TRANSITIONS, RequestEvent, RequestState
from extproc.endpoints.table import EndpointRef
from extproc.prefix.approximate_index import PromptTail
from extproc.scheduling.pool import Assignment
from tests.extproc.scenes import ONE_AT_A_TIME, configuration

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.api.config_snapshot import Snapshot
    from extproc.core.peer_events import PeerEvent

SERVER = "default/llama"
LOCAL = "{unit: hour, requests: 40, outputTokens: 4000}"
LIMITS = ["", LOCAL, f"{LOCAL}, {{unit: hour, requests: 60, scope: Global}}"]
LIMITS.append("{unit: hour, requests: 30}, {unit: hour, requests: 60, scope: Global, withoutRedis: Refuse}")
FLOW_CONTROL = f"""
flowControl:
  {ONE_AT_A_TIME}
  maxRequests: 4
  timeout: %s
  noEndpointTimeout: 20s
"""
ROUTE = """
loraAdapters: [sql, law]
rules:
  - {priority: 10, modelMatch: {headers: {x-urgency: {exact: high}}}, targetModels: [{modelServerName: llama}]}
  - {priority: -1, modelMatch: {headers: {x-urgency: {exact: low}}}, targetModels: [{modelServerName: llama}]}
  - {targetModels: [{modelServerName: llama}]}
"""
SPEC = """
scrapeInterval: 0s
kvEvents: {port: 5557}
"""
ADAPTERS = "adapterLoading: {slots: 1, timeout: 10s, adapters: [{name: sql, source: /sql}, {name: law, source: /law}]}"
# Beside engines that decode there are two that prefill.
PAIRS = """
pdGroup: {prefillLabels: {role: prefill}, decodeLabels: {role: decode}, minUncachedTokens: 0, decideBy: UncachedTokens,
          leg: Gateway, connector: NixlConnector, prefillTimeout: 8s, onPrefillFailure: %s}
"""
# Of SGLang, whose engines have a request at the same time.
BESIDE = """
engine: SGLang
pdGroup: {prefillLabels: {role: prefill}, decodeLabels: {role: decode}, leg: Gateway, connector: bootstrap_room,
          prefillTimeout: 8s}
"""
PREFILLS = ", ".join(f"{{address: '10.0.0.{number}:8000', labels: {{role: prefill}}}}" for number in (8, 9))
ONE, TWO = "{address: '10.0.0.1:8000'}", "{address: '10.0.0.1:8000'}, {address: '10.0.0.2:8000'}"
GATES = ("", FLOW_CONTROL % "20s", FLOW_CONTROL % "15s")
GUARD = """
apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {name: gateway}
spec: {guards: [{name: pii, url: 'http://127.0.0.1:1/'}]}
"""
GUARDS = ("", "guard: {name: pii}", "guard: {name: pii, failureMode: Open}")
LEAVING = "{address: '10.0.0.1:8000', draining: true}"
ACTIVATIONS = ("", "activation: {holdTimeout: 8s, maxRequests: 6}", "activation: {holdTimeout: 5s}")
# Ended requests whose outcome is waited for: few, so that some are given up.
MOST_ENDED = 3

# What can happen and is not a mistake of the caller: all of it must be reached.
LEGAL = [(state, event) for state in RequestState for event in RequestEvent if event in TRANSITIONS[state]]


def snapshot(
    endpoints: str = TWO, gate: str = "", limits: str = "", activation: str = "", guard: str = "", pairs: str = ""
) -> Snapshot:
    """``pairs``: its ``onPrefillFailure`` if the server has pairs, or Beside for SGLang's; empty: it loads adapters, as
    no server does both.
    """
    more = ADAPTERS
    if pairs:
        more = BESIDE if pairs == "Beside" else PAIRS % pairs
        endpoints = endpoints.replace(":8000'", ":8000', labels: {role: decode}") + (
            f", {PREFILLS}" if endpoints else ""
        )
    server = f"{SPEC}\n{more}\nendpoints: [{endpoints}]\n{gate}\n{activation}"
    route = f"{ROUTE}\nrateLimits: [{limits}]\n{guard}"
    return configuration(servers={"llama": server}, routes={"chat": route}, others=GUARD)


def body(words: int, *, stream: bool, model: str = "m") -> bytes:
    messages = [{"role": "user", "content": "word " * words}]
    return json.dumps({"model": model, "messages": messages, "stream": stream, "max_tokens": 50}).encode()


def outcome_of(ticket: str, status: int = 200, tokens: int | None = 100) -> Outcome:
    return Outcome(ticket, status, "10.0.0.1:8000", 2.0, 0.5, tokens, tokens, None)


def prefilled(ticket: str, now: float) -> PrefillResult:
    return PrefillResult(ticket, status=200, body=b'{"kv_transfer_params": {"a": 1}}', answered_at_s=now)


def told(effects: Iterable[Effect]) -> list[PeerEvent]:
    return [one.event for one in effects if isinstance(one, Broadcast)]


# Of a request that another worker has sent.
STARTED = RequestStarted(
    ticket="",
    server=SERVER,
    assignment=Assignment(
        EndpointRef("10.0.0.1:8000", 0, 0),
        ("10.0.0.1:8000",),
        input_tokens=100.0,
        cached_tokens=0.0,
        indexed_tokens=0.0,
        last_used_at_s=None,
        tokens_ahead=100.0,
        cost_s=0.0,
        work=100.0,
        tokens=150.0,
    ),
    sent=SentRequest(chain=[1, 2], tail=PromptTail(0, 0), prompt_bytes=300, is_streamed=False),
    flow=FlowKey("a", "m"),
    service=200.0,
)


class Worker:
    """Another process with requests of its own. What it tells may be lost, come late or come twice."""

    def __init__(self, name: str, gate: str, pairs: str = "") -> None:
        self.core = Core(snapshot(gate=gate, pairs=pairs), rng=random.Random(1), ticket_prefix=name, machine="there")
        self.running: list[str] = []

    def starts(self, words: int, now: float, model: str = "m") -> list[PeerEvent]:
        head = RequestHead("POST", "/v1/chat/completions", {"x-attache-tenant": "a"}, has_body=True, is_trusted=True)
        arrival = self.core.builder.build_by_model(head, body(words, stream=False, model=model))
        own, effects = self.core.arrive(arrival, now)
        said = list(effects)
        if isinstance(own, RequestHeld) and own.state is RequestState.LOADING:
            # its engine loads at once
            effects = self.core.tick(now)
            for one in [one for one in effects if isinstance(one, LoadAdapter)]:
                loaded = AdapterLoadResult(one.server, one.address, one.adapter, unloaded=one.unload)
                effects += [*self.core.on_work_result(loaded, now), *self.core.tick(now)]
            said += effects
        elif isinstance(own, RequestHeld) and own.state is RequestState.PREFILLING:
            # its engine answers at once
            said += self.core.on_work_result(prefilled(own.ticket, now), now)
        self.running += [one.ticket for one in said if isinstance(one, Decision)]
        return told(said)

    def ends(self, ticket: str, now: float) -> list[PeerEvent]:
        self.running.remove(ticket)
        return told([*self.core.on_stream_closed(ticket, now), *self.core.on_outcome(outcome_of(ticket), now)])

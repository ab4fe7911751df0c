# SPDX-License-Identifier: Apache-2.0
"""The endpoints of one ModelServer, their state, their picker, and its committed picks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from extproc.admission.token_estimates import InputEstimates, TokenQuantile
from extproc.api.pricing import compile_prices
from extproc.endpoints.adapter_slots import AdapterSlots, make_adapter_slots
from extproc.endpoints.breaker import CLOSED, FIRST_PASS, UNKNOWN_PASS, BreakerPass, BreakerState, ProbeTurns
from extproc.endpoints.breaker_ranks import (
    begin_probe,
    breaker_ranks,
    end_probe,
    least_ranked,
    record_probe,
    refresh_retry_times,
)
from extproc.endpoints.engine_reports import set_report_interval, trusted_provider_load
from extproc.endpoints.health import EndpointHealth
from extproc.endpoints.in_flight import backlog_of, backlogs, begin_request, end_request
from extproc.endpoints.prices import Prices
from extproc.endpoints.table import Bools, EndpointConfig, EndpointRef, EndpointTable
from extproc.request.prefill_protocols import PROTOCOLS
from extproc.scheduling.builtin_pickers import PrefillDecodePairs
from extproc.scheduling.cache_estimator import CacheEstimator, Prompt, PromptExpectation
from extproc.scheduling.endpoint_masks import (
    PoolReadiness,
    prefill_decode_rows,
    readiness_of,
    revision_set_key,
    rows_serving_adapter,
)
from extproc.scheduling.engine_metrics_config import USUAL_NAMES, scrape_config_of
from extproc.scheduling.framework import ConfiguredPicker
from extproc.scheduling.picker import Pick, Picker, RequestDemandByRow, RequestFacts, View
from extproc.scheduling.sessions import SessionBindings, SessionNote, TenantSessions

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from extproc.api.model_server import ModelServerSpec
    from extproc.api.pricing import Price
    from extproc.engines.dialects import Dialect
    from extproc.prefix.approximate_index import BlockPin
    from extproc.wire_names import Api


class Assignment(msgspec.Struct, frozen=True, array_like=True):
    """A committed pick, with the predictions that its outcome is compared with. Other processes get it.

    ====================  =================  ==============================================================
    field                 unit               meaning
    ====================  =================  ==============================================================
    ``endpoint``                             the first choice
    ``addresses``                            first choice, then fallbacks
    ``input_tokens``      tokens             of the prompt
    ``cached_tokens``     tokens             of the prompt, expected in the cache of the prefilling endpoint
    ``indexed_tokens``    tokens             of these, in whole blocks that were sent there before
    ``last_used_at_s``    s                  when the last of these blocks was used; None if there are none
    ``tokens_ahead``      tokens of work     prefill of this request and of those before it
    ``cost_s``            s                  expected cost, by the picker
    ``work``              tokens of work     prefill of this request
    ``in_flight_tokens``  tokens             in flight at the endpoint, this request included
    ``tokens``            tokens             of the prompt and expected of the answer
    ``prefill``                              the endpoint that prefills, if another; else None
    ``stage``                                why ``prefill`` is set or not
    ``is_precise``                           ``cached_tokens`` follows from KV events
    ``adapter``                              the adapter that it needs, if that is loaded on demand
    ``sessions``                             what its session is to keep of the pick
    ``moved_tokens``      tokens             of the prompt, that ``prefill`` hands over
    ``passed``                               with what it has passed the ModelServer's breaker
    ====================  =================  ==============================================================
    """

    endpoint: EndpointRef
    addresses: tuple[str, ...]
    input_tokens: float
    cached_tokens: float
    indexed_tokens: float
    last_used_at_s: float | None
    tokens_ahead: float
    cost_s: float
    work: float = 0.0
    in_flight_tokens: float = 0.0
    tokens: float = 0.0
    prefill: EndpointRef | None = None
    stage: str = ""
    is_precise: bool = False
    adapter: str | None = None
    sessions: tuple[SessionNote, ...] = ()
    moved_tokens: float = 0.0
    passed: BreakerPass = UNKNOWN_PASS

    @property
    def prefilled_by(self) -> EndpointRef:
        """The endpoint that computes the prompt."""
        return self.prefill or self.endpoint


class PickConstraints(msgspec.Struct, frozen=True):
    """Limits on the choice of endpoints for a request.

    ``headers``: names in lower case. ``choices``: how many endpoints to name, fallbacks included. ``subset``: addresses
    that the gateway allows, None for all. ``candidates``: rows that have room, None for all. ``wants_reasons``: whether
    the pick must be explained. ``is_trusted``, ``priority``, ``whole``: see RequestFacts. ``tenant``: the caller's, in
    which sessions are looked up.
    """

    headers: Mapping[str, str] = {}
    choices: int = 4
    subset: Collection[str] | None = None
    wants_reasons: bool = False
    candidates: Bools | None = None
    is_trusted: bool = False
    tenant: str = ""
    priority: int = 0
    whole: str = ""


class DecodeTarget(msgspec.Struct, frozen=True, array_like=True):
    """Where a request goes after its prefill. ``address``: empty: nowhere. ``moved_tokens``: of its prompt, that the
    endpoint lacks.
    """

    address: str
    moved_tokens: float = 0.0


class UncommittedPick(msgspec.Struct, frozen=True):
    """A pick that has not been committed: no load is counted for it. ``notes``: the notes to keep for its sessions."""

    expectation: PromptExpectation
    view: View
    pick: Pick
    notes: tuple[SessionNote, ...] = ()

    @property
    def addresses(self) -> list[str]:
        """First choice, then fallbacks."""
        return [self.view.table.addresses[row] for row in self.pick.rows]


class Pool:
    """One ModelServer's endpoints.

    ``adapters``: LoRA adapters that routes request from it. ``slots``: those that are loaded on demand, None without
    ``adapterLoading``. ``typical_ttft_s``, ``typical_duration_s``: recent means, of first tokens and whole answers.
    ``reports_cached_tokens``: its engines report cached tokens, so an answer without them had none. ``reports_usage``:
    its engines report usage. ``readiness``: whether it has engines, as configured. ``sessions``: the endpoints of
    sessions with an id; ``keeps_sessions``: whether its picker uses them. ``reporters``: numbers for gateways about
    answers. ``admits``: runs its picker's admitters, None without any. ``metrics``: see ConfiguredPicker.
    ``scrape_config``: location and names of its engines' metrics. ``report_interval_s``: between two reads of them; 0:
    they are never read. ``is_asked_by_model``: routes send it requests for ``spec.model``. ``prices``: what requests
    cost. ``may_lack_model``: an engine of it lists other models. ``apis_without_model``: see ``model_check``.
    ``prefill_protocol``: of the leg that extproc makes, None if it makes none. ``transfers``: of its picker's pairs.
    ``breaker``: of the ModelServer, ``health``: how its requests ended. ``turns``: when this process may begin probes.
    ``revisions``: of its engines that get requests, or of the last ones that did; see ``revision_set_key``.
    """

    def __init__(self, name: str, spec: ModelServerSpec, picker: Picker, turns: ProbeTurns | None = None) -> None:
        self.name = name
        self.breaker, self.health, self.turns = CLOSED, EndpointHealth(), turns or ProbeTurns()
        self.spec = spec
        self.table = EndpointTable()
        self.caches = CacheEstimator()
        self.adapters: frozenset[str] = frozenset()
        self.slots: AdapterSlots | None = None
        self.typical_ttft_s = self.typical_duration_s = 0.0
        self.input_estimates = InputEstimates()
        self.output_estimate = TokenQuantile()
        # of streams: some engines put several tokens into each
        self.tokens_per_event = 1.0
        self.reports_cached_tokens = self.reports_usage = False
        self.picker = picker
        self.readiness = PoolReadiness()
        self.is_asked_by_model = self.may_lack_model = False
        self.apis_without_model: set[Api | None] = set()
        self.report_interval_s = 0.0
        self.sessions = SessionBindings()
        self.prices = Prices()
        self.revisions = ""
        self.update(spec, picker)

    def update(self, spec: ModelServerSpec, picker: Picker) -> None:
        """Apply a new configuration; endpoints that stay keep everything learned of them."""
        if spec.model != self.spec.model:
            self.apis_without_model.clear()
        self.spec, self.picker = spec, picker
        self._rewritten_models = frozenset(to.model for one in spec.model_rewrites for to in one.targets)
        prices = compile_prices(spec.pricing)
        self._has_prices = bool(prices.prices)
        if prices != self.prices.list:
            self.prices = Prices(prices)
        configured = picker if isinstance(picker, ConfiguredPicker) else None
        self.keeps_sessions = configured is not None and bool(configured.sessions)
        self.reporters = configured.reporters if configured else ()
        self.metrics = configured.metrics if configured else ()
        self.scrape_config = scrape_config_of(
            spec, configured.source if configured else None, configured.names if configured else USUAL_NAMES
        )
        self.admits = configured.admit if configured and configured.admitters else None
        tiers = configured.tiers if configured else {}
        self.caches.configure(has_events=spec.kv_events is not None, tiers=tiers)
        endpoints = {one.address: EndpointConfig(one.labels, one.price, one.draining) for one in spec.endpoints}
        for row in self.table.replace_endpoints(endpoints):
            self.caches.forget_endpoint(row)
            if self.slots is not None:
                self.slots.drop_row(row)
        self.slots = make_adapter_slots(spec, self.table, self.slots)
        self.readiness = readiness_of(self.table, spec.pd_group)
        if staying := [one.labels for one in spec.endpoints if not one.draining]:
            self.revisions = revision_set_key(staying)
        group = spec.pd_group
        connector = group.connector if group is not None and group.has_gateway_prefill else None
        self.prefill_protocol = None if connector is None else PROTOCOLS.get(connector)
        self.transfers = picker.transfers if isinstance(picker, PrefillDecodePairs) else None

    def price_at(self, wall_s: float) -> Price | None:
        """What requests cost that arrive at ``wall_s``, seconds since 1970; None: there is no price."""
        return self.prices.price_at(wall_s, self.table, self.prefill_decode_rows) if self._has_prices else None

    def max_prompt_tokens(self) -> int:
        """The most that a prompt may have at one of its engines, as they list it; 0 if one does not."""
        table = self.table
        listed = table.cached_column("context_tokens", lambda: np.array([one.context_tokens for one in table.loras]))
        known = listed[table.is_active]
        return int(known.max()) if known.size and known.min() > 0 else 0

    def is_ready(self, now: float, adapter: str | None = None) -> bool:
        """Whether an endpoint could serve a request now, by the breakers; of an ``adapter`` on demand, if it has it.
        A provider's limits are of this gateway as a whole: until the end of the pause that it asks for, it serves
        nothing.
        """
        if not self.readiness.can_serve or self.breaker.state(now) is BreakerState.OPEN:
            return False
        self.update_retry_times(now)
        usable = self._serving(self.table.is_active & (self.table.retry_at_s <= now))
        if adapter is not None and self.slots is not None and adapter in self.slots.sources:
            usable &= self.slots.rows_with(adapter)
        if self.spec.provider is None:
            return bool(usable.any())
        return any(now >= self.table.breakers[row].not_before_s for row in np.flatnonzero(usable).tolist())

    def _serving(self, rows: Bools) -> Bools:
        """Those of ``rows`` that write answers: engines that only prefill do not, and where requests are sent to both
        at once, none does without one that prefills.
        """
        stages, group = self.prefill_decode_rows(), self.spec.pd_group
        if stages is None or group is None:
            return rows
        prefill, decode, groups = stages
        serving: Bools = rows & decode
        if group.has_gateway_prefill and not group.holds_until_prefilled:
            serving &= np.isin(groups, groups[rows & prefill])
        return serving

    def is_provider_full(self, now: float) -> bool:
        """Whether it is a provider that reports that none of its engines has room."""
        table = self.table
        return (
            self.report_interval_s > 0
            and self.spec.provider is not None
            and bool(len(table) and (trusted_provider_load(table, now)[table.is_active] >= 1).all())
        )

    def dialect_of(self, address: str) -> Dialect:
        """Names of the metrics of the engine at ``address``."""
        row = self.table.row_of(address)
        labels = {} if row is None else self.table.configs[row].labels
        return self.scrape_config.names.dialect_of(labels, self.spec)

    def set_report_interval(self, stretch: float) -> None:
        """Its engines are read at their interval, ``stretch`` times as long as configured."""
        self.report_interval_s = self.scrape_config.interval_s * stretch
        set_report_interval(self.table, self.report_interval_s)

    def set_requested_models(self, adapters: frozenset[str], *, is_asked_by_model: bool) -> None:
        """What routes request from it."""
        self.adapters, self.is_asked_by_model = adapters, is_asked_by_model
        if self.slots is not None:
            self.slots.fixed = adapters - self.slots.sources.keys()

    def has_model_name(self, model: str) -> bool:
        """Whether the configuration has that name of a model: this ModelServer's, an adapter's, or one that it writes
        for its engines. HTTPRoutes and other gateways pass on any other that a client writes.
        """
        return model == self.spec.model or model in self.adapters or model in self._rewritten_models

    def prefill_decode_rows(self) -> tuple[Bools, Bools, NDArray[np.intp]] | None:
        """The rows of prefill and of decode endpoints, and the group of each row; None: every endpoint does both."""
        return prefill_decode_rows(self.table, self.spec.pd_group)

    def estimate_prompt(self, prompt: Prompt, now: float) -> PromptExpectation:
        """What each endpoint probably has cached of ``prompt``, and what it would have to compute."""
        return self.caches.estimate_prompt(prompt, self.table, now)

    def pick_endpoints(
        self,
        prompt: Prompt,
        constraints: PickConstraints,
        *,
        now: float,
        rng: random.Random,
        expectation: PromptExpectation | None = None,
    ) -> UncommittedPick:
        """Choose endpoints for a prompt without changing anything; raises NoEndpoint, or Shed.

        ``expectation``: computed from ``prompt`` if not given.
        """
        if expectation is None:
            expectation = self.estimate_prompt(prompt, now)
        facts = _facts_of(prompt, constraints, expectation)
        eligible, eligible_rows = self.rows_that_may_serve(prompt.adapter, constraints.subset), constraints.candidates
        choices, wants = constraints.choices, constraints.wants_reasons
        sessions = TenantSessions(self.sessions, constraints.tenant) if self.keeps_sessions else None
        if eligible_rows is not None and self.admits is None:
            # one view is enough: only admitters read endpoints that are full
            eligible, eligible_rows = eligible_rows if eligible is None else eligible & eligible_rows, None
        view = View(self.table, expectation.demand, facts, now, eligible, choices, wants, sessions)
        if self.table.has_failures:
            self.update_retry_times(now)
            view = msgspec.structs.replace(view, ranked=breaker_ranks(self.table, now, rng))
        if self.admits is not None:
            self.admits(view, rng=rng)
        view = view if eligible_rows is None else view.with_candidates(eligible_rows)
        pick = self.picker.pick(view, rng=rng)
        notes: tuple[SessionNote, ...] = ()
        if self.keeps_sessions and isinstance(self.picker, ConfiguredPicker):
            notes = self.picker.session_notes(view, pick)
        return UncommittedPick(expectation, view, pick, notes)

    def expected_output(self, max_tokens: int | None, answers: int = 1) -> float:
        """Expected tokens of ``answers`` answers, each the recent mean, at most ``max_tokens``."""
        expected = self.caches.output_tokens
        return answers * (expected if max_tokens is None else min(expected, float(max_tokens)))

    def commit(
        self, considered: UncommittedPick, now: float, output_tokens: float = 0.0, *, ticket: str = ""
    ) -> tuple[Assignment, dict[int, BlockPin]]:
        """Send the request as picked: count its load. ``output_tokens``: expected of its answer. ``ticket``: under
        which it may be a probe.

        Returns with it the blocks that the request holds in the prefix index, by row.
        """
        expectation, pick, table = considered.expectation, considered.pick, self.table
        first = pick.rows[0]
        computing = first if pick.prefill_row is None else pick.prefill_row
        demand = expectation.demand
        cached, work = float(demand.cached_tokens[computing]), float(demand.work[computing])
        if not expectation.matches:
            table.cold_prompt_at_s[first] = now
        tokens = expectation.input_tokens + output_tokens
        passed = self._pass_breaker(ticket, now)
        self._bind(considered.notes, now)
        endpoint, prefill = self._begin(first, pick.prefill_row, work=work, tokens=tokens, now=now)
        if table.has_failures and ticket:
            endpoint = _with_pass(endpoint, begin_probe(table, first, ticket, now))
            if prefill is not None:
                prefill = _with_pass(prefill, begin_probe(table, prefill.row, ticket, now))
        indexed_tokens, last_used_at_s = self.caches.indexed_tokens(expectation, computing)
        pins = {computing: self.caches.record_sent(computing, expectation, now)}
        if first != computing:
            pins[first] = self.caches.record_sent(first, expectation, now)
        adapter = None if self.slots is None else self.slots.on_dispatch(first, considered.view.request.adapter, now)
        # the ledger has just counted the request as the last of them
        tokens_ahead = float(table.backlog_tokens[computing]) if work else backlog_of(table, computing, now)
        assignment = Assignment(
            endpoint,  # by position: Python calls with more than 15 names by way of a dict
            tuple([table.addresses[row] for row in pick.rows]),
            expectation.input_tokens,
            cached,
            indexed_tokens=indexed_tokens,
            last_used_at_s=last_used_at_s,
            tokens_ahead=tokens_ahead,
            cost_s=pick.cost_s,
            work=work,
            in_flight_tokens=float(table.in_flight_tokens[first]),
            tokens=tokens,
            prefill=prefill,
            stage=pick.stage,
            is_precise=expectation.kv_chains is not None and bool(self.caches.whole_feeds >> computing & 1),
            adapter=adapter,
            sessions=considered.notes,
            moved_tokens=0.0
            if prefill is None
            else max(0.0, expectation.input_tokens - float(demand.cached_tokens[first])),
            passed=passed,
        )
        return assignment, pins

    def update_retry_times(self, now: float) -> None:
        """Before ``table.retry_at_s`` is read."""
        if self.table.has_failures:
            refresh_retry_times(self.table, now, self.name, self.turns)

    def next_probe_at_s(self, now: float) -> float:
        """When this process may begin a probe of the ModelServer, whose breaker is not closed."""
        return self.turns.next_probe_at_s(self.breaker, self.name, now)

    def _pass_breaker(self, ticket: str, now: float) -> BreakerPass:
        """The request goes on, as the ModelServer's probe if one may begin."""
        breaker = self.breaker
        if breaker is CLOSED:
            return FIRST_PASS
        if not ticket or breaker.state(now) is not BreakerState.HALF_OPEN or self.next_probe_at_s(now) > now:
            return BreakerPass(breaker.generation)
        self.breaker = breaker.with_probe_lease(ticket, now)
        return BreakerPass(breaker.generation, ticket)

    def track_peer_request(
        self, sent: Assignment, chain: list[int], now: float
    ) -> tuple[Assignment, dict[int, BlockPin]] | None:
        """Count a request sent by another process, whose rows ``sent`` has, as ``commit``; None if its endpoint is not
        configured here.
        """
        row = self.table.row_of(sent.endpoint.address)
        prefill_row = None if sent.prefill is None else self.table.row_of(sent.prefill.address)
        if row is None or (sent.prefill is not None and prefill_row is None):
            return None
        self._bind(sent.sessions, now)
        computing = row if prefill_row is None else prefill_row
        last_used_at_s = self.caches.last_use_of(computing, chain, sent.indexed_tokens)
        pins = {one: self.caches.pin(one, chain, now) for one in {row, computing}}
        endpoint, prefill = self._begin(row, prefill_row, work=sent.work, tokens=sent.tokens, now=now)
        endpoint = _with_pass(endpoint, record_probe(self.table, row, sent.endpoint.passed, now))
        if prefill is not None and sent.prefill is not None:
            prefill = _with_pass(prefill, record_probe(self.table, prefill.row, sent.prefill.passed, now))
        if sent.passed.ticket and self.breaker.is_current_result(sent.passed, now):
            self.breaker = self.breaker.with_probe_lease(sent.passed.ticket, now)
        counted = msgspec.structs.replace(
            sent,
            endpoint=endpoint,
            prefill=prefill,
            last_used_at_s=last_used_at_s,
            # of its own process
            in_flight_tokens=0.0,
            is_precise=False,
            adapter=None if self.slots is None else self.slots.on_dispatch(row, sent.adapter, now),
        )
        return counted, pins

    def _bind(self, notes: Sequence[SessionNote], now: float) -> None:
        for note in notes:
            if note.key:
                self.sessions.bind(note.key, note.address, now, note.ttl_s)

    def release(self, assignment: Assignment, pins: Mapping[int, BlockPin], now: float) -> None:
        """The request has ended: remove its load. Its endpoints may now evict its blocks."""
        rest = pins
        if assignment.prefill is not None and self.prefill_protocol is not None:
            # the decode endpoint would have got it after the prefill
            rest = self._withdraw(pins, assignment.endpoint, now)
        for row, pin in rest.items():
            self.caches.index.unpin(row, pin, now)
        self._end(assignment.endpoint, assignment.tokens, now)
        if assignment.prefill is not None:
            self._end(assignment.prefill, assignment.tokens, now)
        if assignment.passed.ticket and self.breaker.is_current_result(assignment.passed, now):
            self.breaker = self.breaker.after_probe_stream(assignment.passed.ticket, now)
        if assignment.adapter is not None and self.slots is not None:
            self.slots.on_request_ended(assignment.endpoint, assignment.adapter, now)

    def decode_target(
        self,
        assignment: Assignment,
        prompt: Prompt,
        constraints: PickConstraints,
        chain: list[int],
        now: float,
        *,
        is_prefilled: bool,
    ) -> DecodeTarget:
        """Where the request goes after its prefill: the endpoint that was picked, unless it is avoided or draining now,
        has gone, or another one of its group is clearly better. Nothing changes.

        ``chain``: the blocks of the prompt. ``is_prefilled``: the prompt is computed; if not, the endpoint computes it.
        """
        listed = self.first_listed_decode(assignment)
        rows = self._decode_rows(assignment, prompt, constraints, now)
        if not isinstance(self.picker, PrefillDecodePairs) or not rows.any():
            return listed
        picked = self.table.row_of(assignment.endpoint.address)
        kept = picked if picked is not None and rows[picked] else None
        if kept is not None and np.count_nonzero(rows) == 1:
            return listed
        # it counts at the endpoint that was picked, and that must not speak against it
        table = self.table.without_request(assignment.endpoint, assignment.tokens)
        expectation = self.caches.estimate_prompt(prompt, table, now, chain=chain)
        demand = self._lacking(expectation, picked, assignment.moved_tokens)
        view = View(
            table,
            demand,
            _facts_of(prompt, constraints, expectation),
            now,
            rows,
            peer_row=None if assignment.prefill is None else table.row_of(assignment.prefill.address),
        )
        row = self.picker.choose_decode(view, kept, is_prefilled=is_prefilled)
        if row == kept:
            return listed
        lacks = expectation.input_tokens - float(demand.cached_tokens[row])
        return DecodeTarget(table.addresses[row], max(0.0, lacks))

    def first_listed_decode(self, assignment: Assignment) -> DecodeTarget:
        """The first address of its list that is configured."""
        address = next((one for one in assignment.addresses if self.table.row_of(one) is not None), "")
        return DecodeTarget(address, assignment.moved_tokens)

    def _decode_rows(self, assignment: Assignment, prompt: Prompt, constraints: PickConstraints, now: float) -> Bools:
        """The rows that may decode what was assigned; those that are avoided only if there is no other."""
        table, stages = self.table, self.prefill_decode_rows()
        engines = (*assignment.addresses, assignment.prefilled_by.address)
        member = next((row for one in engines if (row := table.row_of(one)) is not None), None)
        if stages is None or member is None:
            return np.zeros(len(table.addresses), np.bool_)
        _, decode, groups = stages
        rows: Bools = table.is_active & decode & (groups == groups[member])
        eligible = self.rows_that_may_serve(prompt.adapter, constraints.subset)
        if eligible is not None:
            rows &= eligible
        self.update_retry_times(now)
        return least_ranked(table, rows, now)

    def _lacking(self, expectation: PromptExpectation, picked: int | None, tokens: float) -> RequestDemandByRow:
        """The index has the prompt at the endpoint that was picked, but ``tokens`` of it were to come there."""
        demand = expectation.demand
        if picked is None:
            return demand
        cached, work = demand.cached_tokens.copy(), demand.work.copy()
        cached[picked] = max(0.0, expectation.input_tokens - tokens)
        work[picked] = self.caches.prompt_cost.prefill_work(expectation.input_tokens - cached[picked], cached[picked])
        return msgspec.structs.replace(demand, cached_tokens=cached, work=work)

    def expected_prefill_s(self, address: str, work: float, now: float) -> float | None:
        """Expected seconds until the endpoint has computed ``work`` more; None: its speed is not learned."""
        table, row = self.table, self.table.row_of(address)
        if row is None or not table.rate_samples[row]:
            return None
        return (backlog_of(table, row, now) + work) / float(table.prefill_rate[row])

    def next_prefill_address(self, decode: EndpointRef, work: float, failed: Collection[str], now: float) -> str:
        """The address of the prefill endpoint of ``decode``'s group that would be the first to have computed ``work``;
        empty: there is none. ``failed``: those that were asked before.
        """
        table, stages = self.table, self.prefill_decode_rows()
        if stages is None or not table.is_current(decode):
            return ""
        prefill, _, groups = stages
        self.update_retry_times(now)
        ready = table.is_active & prefill & (groups == groups[decode.row]) & (table.retry_at_s <= now)
        if table.has_draining:
            ready &= table.rows_not_draining()
        rows = [int(row) for row in np.flatnonzero(ready) if table.addresses[row] not in failed]
        if not rows:
            return ""
        waiting = backlogs(table, now) + work
        return table.addresses[min(rows, key=lambda row: float(waiting[row] / table.prefill_rate[row]))]

    def move_prefill(
        self, assignment: Assignment, pins: Mapping[int, BlockPin], chain: list[int], address: str, now: float
    ) -> tuple[Assignment, dict[int, BlockPin]]:
        """The prefill endpoint has failed, and the one at ``address`` is asked. ``chain``: the blocks of the prompt."""
        before, table, row = assignment.prefill, self.table, self.table.row_of(address)
        if before is None:
            return assignment, dict(pins)
        rest = self._unpin(pins, before, now)
        self._end(before, assignment.tokens, now)
        prefill, ahead = EndpointRef(address, -1, -1), 0.0
        if row is not None:
            prefill = begin_request(table, row, work=assignment.work, tokens=assignment.tokens, now=now)
            ahead = float(table.backlog_tokens[row])
            self.caches.record(row, chain, now)
        return msgspec.structs.replace(
            assignment,
            prefill=prefill,
            cached_tokens=0.0,
            indexed_tokens=0.0,
            last_used_at_s=None,
            tokens_ahead=ahead,
        ), rest

    def _unpin(self, pins: Mapping[int, BlockPin], endpoint: EndpointRef, now: float) -> dict[int, BlockPin]:
        """The pins of other endpoints, as that one may evict its blocks."""
        if endpoint.row in pins:
            self.caches.index.unpin(endpoint.row, pins[endpoint.row], now)
        return {row: pin for row, pin in pins.items() if row != endpoint.row}

    def _withdraw(self, pins: Mapping[int, BlockPin], endpoint: EndpointRef, now: float) -> dict[int, BlockPin]:
        """The pins of other endpoints, as that one does not get the request."""
        if endpoint.row in pins:
            self.caches.index.withdraw(endpoint.row, pins[endpoint.row], now)
        return {row: pin for row, pin in pins.items() if row != endpoint.row}

    def end_prefill(
        self,
        assignment: Assignment,
        pins: Mapping[int, BlockPin],
        chain: list[int],
        now: float,
        *,
        decode: DecodeTarget,
        is_done: bool,
    ) -> tuple[Assignment, dict[int, BlockPin]]:
        """The prefill endpoint has answered: remove its load. Returns the rest of the request, at ``decode``.

        ``chain``: the blocks of the prompt. ``is_done``: it is computed; if not, the decode endpoint computes it.
        """
        prefill, table = assignment.prefill, self.table
        if prefill is None:
            return assignment, dict(pins)
        rest = self._unpin(pins, prefill, now)
        self._end(prefill, assignment.tokens, now)
        work = 0.0 if is_done else assignment.work
        endpoint, ahead, address = assignment.endpoint, 0.0, decode.address
        others = [one for one in assignment.addresses if one != address and table.row_of(one) is not None]
        row = table.row_of(address) if address else None
        addresses = tuple(others) if row is None else (address, *others[: max(0, len(assignment.addresses) - 1)])
        moves = address != endpoint.address or not table.is_current(endpoint)
        if row is not None and moves:
            rest = self._withdraw(rest, endpoint, now)
            rest[row] = self.caches.pin(row, chain, now)
        if row is not None and (work or moves):
            passed = endpoint.passed
            if moves:
                self._end(endpoint, assignment.tokens, now)
            else:
                end_request(table, endpoint, now, assignment.tokens)
            endpoint = begin_request(table, row, work=work, tokens=assignment.tokens, now=now)
            if not moves:
                endpoint = _with_pass(endpoint, passed)
            ahead = float(table.backlog_tokens[row]) if work else 0.0
        return msgspec.structs.replace(
            assignment,
            endpoint=endpoint,
            addresses=addresses,
            # at the decode endpoint, of which nothing was predicted
            cached_tokens=max(0.0, assignment.input_tokens - decode.moved_tokens),
            indexed_tokens=0.0,
            last_used_at_s=None,
            tokens_ahead=ahead,
            work=work,
            # 0: of another process
            in_flight_tokens=float(table.in_flight_tokens[endpoint.row]) if assignment.in_flight_tokens else 0.0,
            prefill=None,
            moved_tokens=decode.moved_tokens,
        ), rest

    def _begin(
        self, row: int, prefill_row: int | None, *, work: float, tokens: float, now: float
    ) -> tuple[EndpointRef, EndpointRef | None]:
        """Count the prefill work at the endpoint that computes it, and a request in flight at both."""
        table = self.table
        if prefill_row is None:
            return begin_request(table, row, work=work, tokens=tokens, now=now), None
        prefill = begin_request(table, prefill_row, work=work, tokens=tokens, now=now)
        return begin_request(table, row, work=0.0, tokens=tokens, now=now), prefill

    def _end(self, endpoint: EndpointRef, tokens: float, now: float) -> None:
        """The endpoint is free of the request."""
        end_request(self.table, endpoint, now, tokens)
        if endpoint.passed.ticket:
            end_probe(self.table, endpoint, now)

    def rows_that_may_serve(self, adapter: str | None, subset: Collection[str] | None) -> Bools | None:
        """The rows that may serve a request; None: all of them.

        ``adapter``: the LoRA adapter that it requests. ``subset``: addresses that the gateway allows, None for all.
        """
        table = self.table
        if subset is None and adapter is None and not table.has_draining:
            return None
        eligible: Bools | None = None
        if subset is not None:
            eligible = np.zeros(len(table.addresses), np.bool_)
            eligible[[row for one in subset for row in table.rows_at_address(one)]] = True
        if adapter is not None:
            serving = rows_serving_adapter(table, adapter) if self.slots is None else self.slots.rows_with(adapter)
            # an engine without the adapter answers 404; if no engine lists it, all are eligible
            if serving.any():
                eligible = serving if eligible is None else eligible & serving
        if table.has_draining:
            staying = table.rows_not_draining()
            candidates = table.is_active & staying if eligible is None else eligible & staying
            if candidates.any():
                eligible = candidates
        return eligible


def _with_pass(endpoint: EndpointRef, passed: BreakerPass) -> EndpointRef:
    """In most cases it has that pass already."""
    return endpoint if endpoint.passed == passed else msgspec.structs.replace(endpoint, passed=passed)


def _facts_of(prompt: Prompt, constraints: PickConstraints, expectation: PromptExpectation) -> RequestFacts:
    return RequestFacts(
        prompt.model,
        expectation.input_tokens,
        prompt.adapter,
        constraints.headers,
        constraints.is_trusted,
        constraints.priority,
        constraints.whole,
    )

"""The engines of one ModelServer with all that is known of them; one call assigns a request to an ordered list of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from extproc.admission.estimates import InputEstimate
from extproc.endpoints.ledger import backlog_of, begin_request, end_request
from extproc.endpoints.table import Bools, EndpointConfig, EndpointRef, EndpointTable
from extproc.prefix.kv_index import KvIndex
from extproc.scheduling.cache_estimator import CacheEstimator, Expectation, Prompt
from extproc.scheduling.labels import has_labels, label_groups, serves_adapter
from extproc.scheduling.picker import Pick, Picker, RequestFacts, View

if TYPE_CHECKING:
    import random

    from numpy.typing import NDArray

    from extproc.config.types import ModelServerSpec
    from extproc.scheduling.request_started import RequestStarted


class Assignment(msgspec.Struct, frozen=True):
    """A pick and its explanation. ``addresses``: first choice, then fallbacks. ``prefill``: who computes the prompt, if another.

    ``cached_tokens``: expected there, of which ``indexed_tokens`` are whole blocks sent there before, the last of them used
    at ``last_used_at_s``. ``tokens_ahead``: prefill work of this request and of those before it.
    """

    endpoint: EndpointRef
    addresses: tuple[str, ...]
    input_tokens: float
    cached_tokens: float
    indexed_tokens: float
    last_used_at_s: float | None
    tokens_ahead: float
    cost_s: float
    # of its prefill alone
    work: float = 0.0
    # in flight there with it
    in_flight_tokens: float = 0.0
    # of its prompt and, as far as expected, of its answer
    tokens: float = 0.0
    prefill: EndpointRef | None = None
    stage: str = ""
    is_precise: bool = False

    @property
    def prefilled_by(self) -> EndpointRef:
        """Who computes the prompt."""
        return self.prefill or self.endpoint


class Load(msgspec.Struct, frozen=True):
    """What a request lays on an engine: prefill work, and tokens of prompt and answer."""

    work: float
    tokens: float


class PickConstraints(msgspec.Struct, frozen=True):
    """What a request's attachment and headers add: how many endpoints an answer may name, and which may be chosen at all."""

    headers: Mapping[str, str] = {}
    choices: int = 4
    subset: Collection[str] | None = None
    wants_reasons: bool = False
    # rows that have room, None for all
    candidates: Bools | None = None
    is_trusted: bool = False


class Consideration(msgspec.Struct, frozen=True):
    """A pick that nothing has been charged for yet."""

    expectation: Expectation
    view: View
    pick: Pick


class Pool:
    """One ModelServer's endpoint table, knowledge of caches, and picker."""

    def __init__(self, name: str, spec: ModelServerSpec, picker: Picker) -> None:
        self.name = name
        self.spec = spec
        self.table = EndpointTable()
        self.caches = CacheEstimator()
        self.adapters: frozenset[str] = frozenset()
        self.typical_ttft_s = 0.0
        self.input_estimate = InputEstimate()
        self.reports_cached_tokens = False
        self.picker = picker
        self.update(spec, picker)

    def update(self, spec: ModelServerSpec, picker: Picker) -> None:
        """Follow the configuration; endpoints that stay keep all that is known of them."""
        self.spec, self.picker = spec, picker
        if spec.kv_events is None:
            self.caches.kv_index = None
        elif self.caches.kv_index is None:
            self.caches.kv_index = KvIndex()
        endpoints = {one.address: EndpointConfig(one.labels, one.price, one.draining) for one in spec.endpoints}
        for row in self.table.replace(endpoints):
            self.caches.forget(row)

    def stages(self) -> tuple[Bools, Bools, NDArray[np.intp]] | None:
        """Rows of prefill and of decode engines, and the group of each row; None: every engine does both."""
        group = self.spec.pd_group
        if group is None:
            return None
        table = self.table
        prefill, decode = has_labels(table, group.prefill_labels), has_labels(table, group.decode_labels)
        return prefill, decode, label_groups(table, group.group_key)

    def expect(self, prompt: Prompt, now: float) -> Expectation:
        """What each endpoint holds of a prompt, and would have to compute."""
        return self.caches.expect(prompt, self.table, now)

    def consider(
        self,
        prompt: Prompt,
        choice: PickConstraints,
        *,
        now: float,
        rng: random.Random,
        expectation: Expectation | None = None,
    ) -> Consideration:
        """Choose endpoints for a prompt, of which this is expected, and change nothing; raises NoEndpoint."""
        if expectation is None:
            expectation = self.expect(prompt, now)
        facts = RequestFacts(prompt.model, expectation.input_tokens, prompt.adapter, choice.headers, choice.is_trusted)
        eligible = self.eligible(prompt.adapter, choice.subset)
        if choice.candidates is not None:
            eligible = choice.candidates if eligible is None else eligible & choice.candidates
        view = View(self.table, expectation.demand, facts, now, eligible, choice.choices, choice.wants_reasons)
        return Consideration(expectation, view, self.picker.pick(view, rng=rng))

    def expected_output(self, most: int | None) -> float:
        """Tokens of an answer: what answers of this pool have had, and no more than was asked for."""
        expected = self.caches.output_tokens
        return expected if most is None else min(expected, float(most))

    def commit(self, considered: Consideration, now: float, output_tokens: float = 0.0) -> Assignment:
        """The request goes where the pick says: count it as theirs."""
        expectation, pick, table = considered.expectation, considered.pick, self.table
        first = pick.rows[0]
        computing = first if pick.prefill_row is None else pick.prefill_row
        demand = expectation.demand
        cached, work = float(demand.cached_tokens[computing]), float(demand.work[computing])
        if not expectation.matches:
            table.cold_prompt_at_s[first] = now
        tokens_ahead = backlog_of(table, computing, now) + work
        indexed_tokens, last_used_at_s = self.caches.indexed_tokens(expectation, computing)
        self.caches.sent(computing, expectation, now)
        if computing != first:
            self.caches.sent(first, expectation, now)
        tokens = expectation.input_tokens + output_tokens
        endpoint, prefill = self._charge(first, pick.prefill_row, Load(work, tokens), now)
        return Assignment(
            endpoint=endpoint,
            addresses=tuple([table.addresses[row] for row in pick.rows]),
            input_tokens=expectation.input_tokens,
            cached_tokens=cached,
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
        )

    def record_remote(self, event: RequestStarted, now: float) -> Assignment | None:
        """Count a request that another process has sent; None if its endpoint is not configured here."""
        row = self.table.row_of(event.address)
        prefill_row = None if event.prefill is None else self.table.row_of(event.prefill)
        if row is None or (event.prefill is not None and prefill_row is None):
            return None
        computing = row if prefill_row is None else prefill_row
        last_used_at_s = self.caches.last_use_of(computing, event.chain, event.indexed_tokens)
        for one in {row, computing}:
            self.caches.index.pin(one, event.chain, now)
        endpoint, prefill = self._charge(row, prefill_row, Load(event.work, event.tokens), now)
        return Assignment(
            endpoint=endpoint,
            addresses=(event.address,),
            input_tokens=event.input_tokens,
            cached_tokens=event.cached_tokens,
            indexed_tokens=event.indexed_tokens,
            last_used_at_s=last_used_at_s,
            tokens_ahead=event.tokens_ahead,
            cost_s=0.0,
            work=event.work,
            tokens=event.tokens,
            prefill=prefill,
        )

    def release(self, assignment: Assignment, chain: Sequence[int], now: float) -> None:
        """The request with ``chain`` is over: its endpoints are free of it, and may evict it."""
        for endpoint in {assignment.endpoint, assignment.prefilled_by}:
            if self.table.is_current(endpoint):
                self.caches.index.unpin(endpoint.row, chain, now)
            end_request(self.table, endpoint, now, assignment.tokens)

    def _charge(
        self, row: int, prefill_row: int | None, load: Load, now: float
    ) -> tuple[EndpointRef, EndpointRef | None]:
        """The prefill work goes to who computes it, a request in flight to both."""
        table, work, tokens = self.table, load.work, load.tokens
        if prefill_row is None:
            return begin_request(table, row, work=work, tokens=tokens, now=now), None
        prefill = begin_request(table, prefill_row, work=work, tokens=tokens, now=now)
        return begin_request(table, row, work=0.0, tokens=tokens, now=now), prefill

    def eligible(self, adapter: str | None, subset: Collection[str] | None) -> Bools | None:
        """None: everybody."""
        table = self.table
        if subset is None and adapter is None and not table.has_draining:
            return None
        eligible: Bools | None = None
        if subset is not None:
            eligible = np.zeros(len(table.addresses), np.bool_)
            eligible[[row for one in subset for row in table.rows_named(one)]] = True
        if adapter is not None and self.adapters:
            serving = serves_adapter(table, adapter)
            # an engine that does not know the adapter answers 404; where none says, any may
            if serving.any():
                eligible = serving if eligible is None else eligible & serving
        if table.has_draining:
            staying = table.not_draining()
            candidates = table.is_active & staying if eligible is None else eligible & staying
            if candidates.any():
                eligible = candidates
        return eligible

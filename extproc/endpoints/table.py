# SPDX-License-Identifier: Apache-2.0
"""The endpoints of one ModelServer as columns of numbers, with one row for each.

A pick computes with whole columns. An endpoint keeps its row for as long as it is configured; then the row may be given
to another endpoint. ``epochs`` counts the uses of a row, so that a request of an earlier one does not change a later
one. Metrics of engines that a configuration names are columns, too.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from extproc.endpoints.breaker import CLOSED, FIRST_PASS, UNKNOWN_PASS, Breaker, BreakerPass
from extproc.endpoints.health import EndpointHealth
from extproc.endpoints.prefill_queue import PrefillQueue
from extproc.engines.metrics import LoraState

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
# Tokens a second, until learned: llm-d measured 15,000 to 39,000 on single and paired H100s; profiles of smaller GPUs
# have 6,000 to 14,000.
INITIAL_PREFILL_RATE: Final = 10_000.0
# For so long a report is trusted in full, whatever the interval of reports.
FRESH_S: Final = 2.0
_INITIAL_ROWS: Final = 8
# Bounds the cached columns: clients may request many adapters.
_MAX_CACHED_COLUMNS: Final = 1024
_NEVER: Final = -1e9
_COLUMNS: Final = (
    "is_active",
    "in_flight",
    "waiting",
    "running",
    "kv_usage",
    "load",
    "reported_at_s",
    "in_flight_at_report",
    "in_flight_tokens",
    "in_flight_tokens_at_report",
    "kv_capacity_tokens",
    "ttft_s",
    "tpot_s",
    "price",
    "cold_prompt_at_s",
    "backlog_tokens",
    "backlog_at_s",
    "rate_samples",
    "own_log_rate",
    "retry_at_s",
    "trips",
    "prompt_tokens",
    "cached_tokens",
    "service_s",
    "service_at_s",
)


class EngineAttributeColumns:
    """The latest values by name and row; NaN where an engine has none. Nothing is kept unless something is recorded."""

    def __init__(self) -> None:
        self._columns: dict[str, NDArray[np.float64]] = {}

    def column(self, name: str, rows: int) -> NDArray[np.float64]:
        """The values of ``rows`` endpoints."""
        known = self._columns.get(name)
        if known is None:
            return np.full(rows, np.nan)
        if known.size < rows:
            known = self._columns[name] = np.pad(known, (0, rows - known.size), constant_values=np.nan)
        return known

    def record(self, row: int, values: Mapping[str, float], rows: int) -> None:
        """What the engine of ``row`` reports, among ``rows``."""
        for name, value in values.items():
            column = self._columns[name] = self.column(name, rows)
            column[row] = value

    def forget(self, row: int) -> None:
        """The row has another endpoint now."""
        for column in self._columns.values():
            if row < column.size:
                column[row] = np.nan


class EndpointRef(msgspec.Struct, frozen=True, array_like=True):
    """A reference to an endpoint that outlives the use of its row.

    ``prefill_number``: the request's number in the endpoint's ``PrefillQueue``, 0 if it is not in it. ``passed``: with
    what the request has passed its breaker.
    """

    address: str
    row: int
    epoch: int
    prefill_number: int = 0
    passed: BreakerPass = UNKNOWN_PASS


class EndpointConfig(msgspec.Struct, frozen=True):
    """The configuration of an endpoint. ``price``: of a second, relative to other endpoints."""

    labels: Mapping[str, str] = {}
    price: float = 1.0
    is_draining: bool = False


class EndpointTable:
    """Columns by row. Only ``is_active`` and ``absence_cost_s`` have a meaning in rows without an endpoint.

    ================================  ==========  ========  =====================================================
    column                            unit        initial   meaning
    ================================  ==========  ========  =====================================================
    ``is_active``                                 True      the row has an endpoint
    ``absence_cost_s``                s           0         infinite without an endpoint; added to costs
    ``configs``                                             labels, price and draining, as configured
    ``price``                                               of ``configs``
    *Our own books*
    ``in_flight``                     requests    0         picked and not ended
    ``in_flight_tokens``              tokens      0         of their prompts and expected answers
    ``prefill_queues``                            empty     those of them without a first token
    ``backlog_tokens``                tokens      0         prefill work that waited at ``backlog_at_s``
    ``backlog_at_s``                  s           0         when ``backlog_tokens`` was set
    ``backlog_per_request``           tokens      1         mean work of a request in the backlog
    ``cold_prompt_at_s``              s           0         last sent a prompt that no endpoint had cached
    ``breakers``                                  closed    the state of its breaker
    ``passes``                                    first     with what requests pass that
    ``trips``                                     0         how often it has opened since it was closed
    ``retry_at_s``                    s           0         when it lets a request through; see ``avoidance.refresh``
    ``healths``                                   unknown   how its answers were
    *Learned from answers*
    ``prefill_rate``                  tokens/s    typical   tokens of work, shrunk towards the typical rate
    ``own_log_rate``                              typical   logarithm of the endpoint's own mean rate
    ``rate_samples``                  answers     0         from which it was learned
    ``prompt_tokens``                 tokens      0         of all prompts, as reported in answers
    ``cached_tokens``                 tokens      0         of these, from the cache
    ``service_s``                     s           0         mean time of a request without a prompt, divided by the
                                                            requests in flight; 0 if unknown
    ``service_at_s``                  s           0         when it was learned last
    *Reported by the engine*
    ``reported_at_s``                 s           never     when it last reported
    ``waiting``, ``running``          requests    0         in its queue, in its batch
    ``kv_usage``                      0 to 1      0         fraction of its KV cache in use
    ``kv_capacity_tokens``            tokens      0         size of its KV cache, 0 if unknown
    ``load``                          0 to 1      0         of a provider: how full its engines are, 1 if none has room
    ``ttft_s``, ``tpot_s``            s           0         recent means, of answers too; 0 if unknown
    ``loras``                                     none      its LoRA adapters
    ``attributes``                                none      metrics of it that a configuration names
    ``in_flight_at_report``           requests    0         ``in_flight`` at ``reported_at_s``
    ``in_flight_tokens_at_report``    tokens      0         ``in_flight_tokens`` at ``reported_at_s``
    ================================  ==========  ========  =====================================================

    Of all endpoints: ``has_draining``; ``has_failures``: some breaker may not let all requests through, and
    ``unsettled``: of these rows; ``has_tripped``: some breaker has ever opened; ``has_foreign_requests``: an engine
    once reported more requests than we sent; ``mean_work``: recent mean prefill work of a request, in tokens;
    ``rate_noise``: variance of the logarithm of the rate of a single answer; ``fresh_s``: for how long a report is
    trusted in full.
    """

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.epochs: list[int] = []
        self.prefill_queues: list[PrefillQueue] = []
        self.is_active: Bools = np.zeros(0, np.bool_)
        # costs are computed from it: a column of whole numbers would be converted for every pick
        self.in_flight: Floats = np.zeros(0)
        self.waiting: Floats = np.zeros(0)
        self.running: Floats = np.zeros(0)
        self.kv_usage: Floats = np.zeros(0)
        self.load: Floats = np.zeros(0)
        self.reported_at_s: Floats = np.zeros(0)
        self.in_flight_at_report: Floats = np.zeros(0)
        self.in_flight_tokens: Floats = np.zeros(0)
        self.in_flight_tokens_at_report: Floats = np.zeros(0)
        self.kv_capacity_tokens: Floats = np.zeros(0)
        self.ttft_s: Floats = np.zeros(0)
        self.tpot_s: Floats = np.zeros(0)
        self.price: Floats = np.zeros(0)
        self.cold_prompt_at_s: Floats = np.zeros(0)
        self.loras: list[LoraState] = []
        self.configs: list[EndpointConfig] = []
        self.backlog_tokens: Floats = np.zeros(0)
        self.backlog_at_s: Floats = np.zeros(0)
        self.backlog_per_request: Floats = np.zeros(0)
        self.prefill_rate: Floats = np.zeros(0)
        self.absence_cost_s: Floats = np.zeros(0)
        self.has_draining = self.has_failures = self.has_tripped = self.has_foreign_requests = False
        self.unsettled: set[int] = set()
        self.mean_work = 0.0
        self.rate_samples: Ints = np.zeros(0, np.int64)
        self.own_log_rate: Floats = np.zeros(0)
        self.rate_noise = 1.0
        self.fresh_s = FRESH_S
        self.retry_at_s: Floats = np.zeros(0)
        self.trips: Ints = np.zeros(0, np.int64)
        self.healths: list[EndpointHealth] = []
        self.breakers: list[Breaker] = []
        self.passes: list[BreakerPass] = []
        self.prompt_tokens: Ints = np.zeros(0, np.int64)
        self.cached_tokens: Ints = np.zeros(0, np.int64)
        self.service_s: Floats = np.zeros(0)
        self.service_at_s: Floats = np.zeros(0)
        self.attributes = EngineAttributeColumns()
        self._rows: dict[str, int] = {}
        self._cached_columns: dict[Hashable, NDArray[Any]] = {}
        self._grow(_INITIAL_ROWS)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def active_addresses(self) -> list[str]:
        """The addresses of the configured endpoints."""
        return list(self._rows)

    @property
    def active_rows(self) -> list[int]:
        """The rows of the configured endpoints."""
        return list(self._rows.values())

    def row_of(self, address: str) -> int | None:
        """The row of a configured endpoint; None if it is not configured."""
        return self._rows.get(address)

    def rows_at_address(self, name: str) -> list[int]:
        """The rows of the endpoint at ``ip:port``, or of all endpoints at an IP address."""
        row = self._rows.get(name)
        if row is not None:
            return [row]
        return [
            row for address, row in self._rows.items() if address.rpartition(":")[0].strip("[]") == name.strip("[]")
        ]

    def endpoint_ref(self, row: int) -> EndpointRef:
        """A reference to the endpoint that has ``row`` now, of a request that is not in its ``PrefillQueue``."""
        return EndpointRef(self.addresses[row], row, self.epochs[row], passed=self.passes[row])

    def is_current(self, endpoint: EndpointRef) -> bool:
        """Whether the row still belongs to ``endpoint``."""
        return self.epochs[endpoint.row] == endpoint.epoch and bool(self.is_active[endpoint.row])

    def has_reported(self, row: int) -> bool:
        """Whether the engine of ``row`` has ever reported."""
        return bool(self.reported_at_s[row] > _NEVER)

    def without_request(self, endpoint: EndpointRef, tokens: float) -> EndpointTable:
        """The table as if a request of ``tokens`` tokens were not in flight at ``endpoint``; to be read only."""
        if not self.is_current(endpoint):
            return self
        found = copy.copy(self)
        found.in_flight, found.in_flight_tokens = self.in_flight.copy(), self.in_flight_tokens.copy()
        found.in_flight[endpoint.row] -= 1
        found.in_flight_tokens[endpoint.row] -= tokens
        return found

    def cached_column(self, key: Hashable, compute: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """A column that depends only on labels and adapters, computed once until one of them changes.

        ``key`` identifies it. Reading the labels of a thousand endpoints for each request would cost more than the
        pick.
        """
        column = self._cached_columns.get(key)
        if column is None:
            if len(self._cached_columns) >= _MAX_CACHED_COLUMNS:
                self._cached_columns.clear()
            column = self._cached_columns[key] = compute()
        return column

    def rows_not_draining(self) -> Bools:
        """The rows that are not draining."""
        return self.cached_column("staying", lambda: np.array([not one.is_draining for one in self.configs]))

    def set_loras(self, row: int, loras: LoraState) -> None:
        """Record the adapters that the engine of ``row`` reports."""
        if loras != self.loras[row]:
            self.loras[row] = loras
            self._cached_columns.clear()

    def replace_endpoints(self, endpoints: Mapping[str, EndpointConfig] | Iterable[str]) -> list[int]:
        """Replace the configured endpoints, by address; those that stay keep everything known of them.

        Returns the rows of removed endpoints.
        """
        wanted = dict(endpoints) if isinstance(endpoints, Mapping) else dict.fromkeys(endpoints, EndpointConfig())
        gone = [row for address, row in self._rows.items() if address not in wanted]
        for row in gone:
            del self._rows[self.addresses[row]]
            self.is_active[row] = False
            self.absence_cost_s[row] = np.inf
            self.unsettled.discard(row)
        missing = len(wanted) - len(self.addresses)
        if missing > 0:
            self._grow(max(len(wanted), 2 * len(self.addresses)))
        for address, config in wanted.items():
            if address not in self._rows:
                self._add(address)
            row = self._rows[address]
            self.configs[row], self.price[row] = config, config.price
        self.has_draining = any(config.is_draining for config in wanted.values())
        self._cached_columns.clear()
        return gone

    def _add(self, address: str) -> None:
        if len(self._rows) == len(self.addresses):
            self._grow(2 * len(self.addresses))
        row = int(np.flatnonzero(~self.is_active)[0])
        self._rows[address] = row
        self.addresses[row] = address
        self.epochs[row] += 1
        self.is_active[row], self.absence_cost_s[row], self.rate_samples[row] = True, 0.0, 0
        self.in_flight[row] = self.trips[row] = self.prompt_tokens[row] = self.cached_tokens[row] = 0
        self.backlog_tokens[row] = self.backlog_at_s[row] = self.retry_at_s[row] = 0.0
        self.waiting[row] = self.running[row] = self.kv_usage[row] = self.cold_prompt_at_s[row] = 0.0
        self.load[row] = 0.0
        self.ttft_s[row] = self.tpot_s[row] = self.service_s[row] = self.service_at_s[row] = 0.0
        self.reported_at_s[row], self.in_flight_at_report[row] = _NEVER, 0
        self.in_flight_tokens[row] = self.in_flight_tokens_at_report[row] = self.kv_capacity_tokens[row] = 0.0
        self.attributes.forget(row)
        self.prefill_queues[row], self.healths[row] = PrefillQueue(), EndpointHealth()
        self.breakers[row], self.passes[row] = CLOSED, FIRST_PASS
        self.unsettled.discard(row)
        self.loras[row], self.backlog_per_request[row] = LoraState(), 1.0
        self.prefill_rate[row] = INITIAL_PREFILL_RATE
        measured = self.is_active & (self.rate_samples > 0)
        if measured.any():
            # assume that a new endpoint is like the others
            self.prefill_rate[row] = np.median(self.prefill_rate[measured])
        self.own_log_rate[row] = np.log(self.prefill_rate[row])

    def _grow(self, rows: int) -> None:
        more = rows - len(self.addresses)
        self.addresses += [""] * more
        self.epochs += [0] * more
        self.prefill_queues += [PrefillQueue() for _ in range(more)]
        self.healths += [EndpointHealth() for _ in range(more)]
        self.breakers += [CLOSED] * more
        self.passes += [FIRST_PASS] * more
        self.loras += [LoraState()] * more
        self.configs += [EndpointConfig()] * more
        for column in _COLUMNS:
            setattr(self, column, _longer(getattr(self, column), more, 0))
        self.absence_cost_s = _longer(self.absence_cost_s, more, np.inf)
        self.backlog_per_request = _longer(self.backlog_per_request, more, 1.0)
        self.prefill_rate = _longer(self.prefill_rate, more, INITIAL_PREFILL_RATE)


def _longer(column: NDArray[Any], more: int, value: float) -> NDArray[Any]:
    """As ``np.pad``, at a twentieth of its cost: thousands of tables are made at the start."""
    return np.concatenate((column, np.full(more, value, column.dtype)))

"""The engines of one ModelServer as columns of numbers, one row an endpoint, so that a pick looks at all of them at once.

An endpoint keeps its row for as long as it is configured; a freed row is used again. ``epoch`` counts the uses of a row:
what was begun in an earlier one must not touch it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from extproc.endpoints.prefill_queue import PrefillQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# What is assumed of an engine before anything is known: llm-d measured 15,000 to 39,000 tokens/s on H100 pairs and
# singles, profiles of smaller GPUs say 6,000 to 14,000.
INITIAL_PREFILL_RATE: Final = 10_000.0
_FIRST_ROWS: Final = 8
# Answers to questions about labels and adapters that are kept: as many as a configuration and its clients can ask.
_MOST_REMEMBERED: Final = 1024
_NEVER: Final = -1e9
_COLUMNS: Final = (
    "is_active",
    "in_flight",
    "waiting",
    "running",
    "kv_usage",
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
    "failures",
    "prompt_tokens",
    "cached_tokens",
)


class EndpointRef(msgspec.Struct, frozen=True):
    """An endpoint as a ticket remembers it."""

    address: str
    row: int
    epoch: int
    prefill_number: int = 0


class LoraState(msgspec.Struct, frozen=True):
    """LoRA adapters of one engine as it reports them: in its batch, waiting for it, how many fit, and ``served`` by name.

    ``served`` is None where the engine was not asked.
    """

    active: frozenset[str] = frozenset()
    waiting: frozenset[str] = frozenset()
    max_active: int = 0
    served: frozenset[str] | None = None


class EndpointConfig(msgspec.Struct, frozen=True):
    """What the configuration says of an endpoint. ``price``: what a second of it costs, relative to others."""

    labels: Mapping[str, str] = {}
    price: float = 1.0
    is_draining: bool = False


class EndpointTable:
    """Columns by row.

    ``is_active``; ``absence_cost_s``: infinite where there is no endpoint, else 0. ``in_flight`` requests and ``in_flight_tokens``, of
    prompts and of answers as far as expected; ``backlog_tokens`` of prefill work waiting as of ``backlog_at_s``, ``backlog_per_request`` a request, which are ``pending``. ``prefill_rate``: tokens of work a second, agreed on from ``own_log_rate``
    and ``rate_samples`` of all. ``retry_at_s``, and the ``failures`` in a row that led to it. ``prompt_tokens`` and
    ``cached_tokens`` as reported since the endpoint came.

    As engines say of themselves: requests ``waiting`` and ``running``, ``kv_usage`` from 0 to 1, ``loras``; at ``reported_at_s``,
    when ``in_flight_at_report`` of ours with ``in_flight_tokens_at_report`` were there; ``kv_capacity_tokens`` that a cache holds, 0 if unknown. ``ttft_s`` and ``tpot_s``: recent means, 0 if unknown. ``cold_prompt_at_s``: when the
    endpoint was last sent a prompt of which nobody held anything. ``price`` and ``traits`` are the configuration's.
    """

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.epochs: list[int] = []
        self.prefill_queues: list[PrefillQueue] = []
        self.is_active: Bools = np.zeros(0, np.bool_)
        self.in_flight: Ints = np.zeros(0, np.int64)
        self.waiting: Floats = np.zeros(0)
        self.running: Floats = np.zeros(0)
        self.kv_usage: Floats = np.zeros(0)
        self.reported_at_s: Floats = np.zeros(0)
        self.in_flight_at_report: Ints = np.zeros(0, np.int64)
        self.in_flight_tokens: Floats = np.zeros(0)
        self.in_flight_tokens_at_report: Floats = np.zeros(0)
        self.kv_capacity_tokens: Floats = np.zeros(0)
        self.ttft_s: Floats = np.zeros(0)
        self.tpot_s: Floats = np.zeros(0)
        self.price: Floats = np.zeros(0)
        self.cold_prompt_at_s: Floats = np.zeros(0)
        self.loras: list[LoraState] = []
        self.configs: list[EndpointConfig] = []
        self.has_draining = False
        self.backlog_tokens: Floats = np.zeros(0)
        self.backlog_at_s: Floats = np.zeros(0)
        self.backlog_per_request: Floats = np.zeros(0)
        self.prefill_rate: Floats = np.zeros(0)
        self.absence_cost_s: Floats = np.zeros(0)
        # whether any endpoint is, or was lately, to be avoided
        self.has_failures = False
        # whether any engine was ever seen with more requests than we sent
        self.has_foreign_requests = False
        # of one request, as sent lately
        self.mean_work = 0.0
        self.rate_samples: Ints = np.zeros(0, np.int64)
        self.own_log_rate: Floats = np.zeros(0)
        # variance of the logarithm of one answer's rate, over all endpoints
        self.rate_noise = 1.0
        self.retry_at_s: Floats = np.zeros(0)
        self.failures: Ints = np.zeros(0, np.int64)
        self.prompt_tokens: Ints = np.zeros(0, np.int64)
        self.cached_tokens: Ints = np.zeros(0, np.int64)
        self._rows: dict[str, int] = {}
        self._cached_columns: dict[Hashable, NDArray[Any]] = {}
        self._grow(_FIRST_ROWS)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def active_addresses(self) -> list[str]:
        """The configured endpoints."""
        return list(self._rows)

    def row_of(self, address: str) -> int | None:
        """The row of a configured endpoint."""
        return self._rows.get(address)

    def rows_named(self, name: str) -> list[int]:
        """The row of the endpoint at ``ip:port``, or those of all ports of an IP address."""
        row = self._rows.get(name)
        if row is not None:
            return [row]
        return [
            row for address, row in self._rows.items() if address.rpartition(":")[0].strip("[]") == name.strip("[]")
        ]

    def ref(self, row: int) -> EndpointRef:
        """What a ticket keeps, to find the row again or to see that it changed hands."""
        return EndpointRef(self.addresses[row], row, self.epochs[row])

    def is_current(self, endpoint: EndpointRef) -> bool:
        """Whether the row still belongs to the endpoint of ``place``."""
        return self.epochs[endpoint.row] == endpoint.epoch and bool(self.is_active[endpoint.row])

    def has_reported(self, row: int) -> bool:
        """Whether the engine of ``row`` has ever said how it is."""
        return bool(self.reported_at_s[row] > _NEVER)

    def cached_column(self, question: Hashable, answer: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """A column that follows from labels and adapters alone, computed once until one of them changes.

        Looking into a thousand endpoints' labels for each request would cost more than all the rest of a pick.
        """
        column = self._cached_columns.get(question)
        if column is None:
            if len(self._cached_columns) >= _MOST_REMEMBERED:
                self._cached_columns.clear()
            column = self._cached_columns[question] = answer()
        return column

    def not_draining(self) -> Bools:
        """The rows that are not draining."""
        return self.cached_column("staying", lambda: np.array([not one.is_draining for one in self.configs]))

    def set_loras(self, row: int, loras: LoraState) -> None:
        """What the engine of ``row`` now says of its adapters."""
        if loras != self.loras[row]:
            self.loras[row] = loras
            self._cached_columns.clear()

    def replace(self, endpoints: Mapping[str, EndpointConfig] | Iterable[str]) -> list[int]:
        """Make ``endpoints`` (by address) the configured ones; those that stay keep all that is known of them.

        Returns the rows given up.
        """
        queued = dict(endpoints) if isinstance(endpoints, Mapping) else dict.fromkeys(endpoints, EndpointConfig())
        gone = [row for address, row in self._rows.items() if address not in queued]
        for row in gone:
            del self._rows[self.addresses[row]]
            self.is_active[row] = False
            self.absence_cost_s[row] = np.inf
        for address, traits in queued.items():
            if address not in self._rows:
                self._add(address)
            row = self._rows[address]
            self.configs[row], self.price[row] = traits, traits.price
        self.has_draining = any(traits.is_draining for traits in queued.values())
        self._cached_columns.clear()
        return gone

    def _add(self, address: str) -> None:
        if len(self._rows) == len(self.addresses):
            self._grow(2 * len(self.addresses))
        row = int(np.flatnonzero(~self.is_active)[0])
        self._rows[address] = row
        self.addresses[row] = address
        self.epochs[row] += 1
        self.is_active[row] = True
        self.absence_cost_s[row] = 0.0
        self.in_flight[row] = self.failures[row] = self.prompt_tokens[row] = self.cached_tokens[row] = 0
        self.rate_samples[row] = 0
        self.backlog_tokens[row] = self.backlog_at_s[row] = self.retry_at_s[row] = 0.0
        self.waiting[row] = self.running[row] = self.kv_usage[row] = self.cold_prompt_at_s[row] = 0.0
        self.ttft_s[row] = self.tpot_s[row] = 0.0
        self.reported_at_s[row], self.in_flight_at_report[row] = _NEVER, 0
        self.in_flight_tokens[row] = self.in_flight_tokens_at_report[row] = self.kv_capacity_tokens[row] = 0.0
        self.loras[row] = LoraState()
        self.prefill_queues[row] = PrefillQueue()
        self.backlog_per_request[row] = 1.0
        self.prefill_rate[row] = INITIAL_PREFILL_RATE
        measured = self.is_active & (self.rate_samples > 0)
        if measured.any():
            # a newcomer is taken to be like its peers
            self.prefill_rate[row] = np.median(self.prefill_rate[measured])
        self.own_log_rate[row] = np.log(self.prefill_rate[row])

    def _grow(self, rows: int) -> None:
        more = rows - len(self.addresses)
        self.addresses += [""] * more
        self.epochs += [0] * more
        self.prefill_queues += [PrefillQueue() for _ in range(more)]
        self.loras += [LoraState()] * more
        self.configs += [EndpointConfig()] * more
        for column in _COLUMNS:
            setattr(self, column, np.pad(getattr(self, column), (0, more)))
        self.absence_cost_s = np.pad(self.absence_cost_s, (0, more), constant_values=np.inf)
        self.backlog_per_request = np.pad(self.backlog_per_request, (0, more), constant_values=1.0)
        self.prefill_rate = np.pad(self.prefill_rate, (0, more), constant_values=INITIAL_PREFILL_RATE)

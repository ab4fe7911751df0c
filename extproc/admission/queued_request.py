"""What the queue knows of a request."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from extproc.endpoints.table import Bools


class FlowKey(msgspec.Struct, frozen=True):
    """Whose requests are one flow, to be treated fairly among others.

    ``part`` of a tenant: a user, a session, a program; ``model`` is empty where tenants are the flows.
    """

    tenant: str
    model: str = ""
    part: str = ""


class QueuedRequest(msgspec.Struct, frozen=True, eq=False):
    """One request that charges to go. Tokens: ``uncached_tokens`` at the engine that holds most, ``output_tokens`` as expected.

    ``deadline_at_s``: when the first token is wanted. ``eligible`` says which endpoints may serve it, None for all: they change
    while it waits. ``holders``: those that
    hold most of it, with how much. ``size_bytes``: of its body, which waits with it.
    """

    ticket: str
    flow: FlowKey
    arrived_at_s: float
    expires_at_s: float
    priority: int = 0
    size_bytes: int = 0
    input_tokens: float = 0.0
    uncached_tokens: float = 0.0
    output_tokens: float = 0.0
    deadline_at_s: float = math.inf
    session: str = ""
    eligible: Callable[[], Bools | None] | None = None
    holders: tuple[tuple[int, float], ...] = ()

    @property
    def rows(self) -> Bools | None:
        """The endpoints that may serve it as things are now; None: all."""
        return None if self.eligible is None else self.eligible()

    @property
    def cached_tokens(self) -> float:
        """What the best engine holds of it."""
        return self.input_tokens - self.uncached_tokens

    @property
    def total_tokens(self) -> float:
        """Of its prompt, and of its answer as far as expected."""
        return self.input_tokens + self.output_tokens

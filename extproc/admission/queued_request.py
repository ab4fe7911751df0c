# SPDX-License-Identifier: Apache-2.0
"""A waiting request as the queue sees it."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from extproc.endpoints.table import Bools


class FlowKey(msgspec.Struct, frozen=True):
    """Identifies a flow: requests that share one fair share.

    ``model``: empty unless flows are by tenant and model. ``part``: a user or session of the tenant, empty if the
    whole tenant is one flow.
    """

    tenant: str
    model: str = ""
    part: str = ""


class QueuedRequest(msgspec.Struct, frozen=True, eq=False):
    """A request that waits to be dispatched.

    ========================  ===========  =====================================================================
    field                     unit         meaning
    ========================  ===========  =====================================================================
    ``ticket``                             identifies the request
    ``flow``                               whose fair share it uses
    ``arrived_at_s``          s            when it arrived
    ``expires_at_s``          s            when it has waited too long
    ``priority``                           larger is more important
    ``size_bytes``            bytes        of its body, which is kept in memory while it waits
    ``input_tokens``          tokens       of its prompt
    ``uncached_tokens``       tokens       of its prompt that no endpoint has cached
    ``output_tokens``         tokens       expected of its answer
    ``deadline_at_s``         s            when its first token is due
    ``session``                            the session or program to which it belongs, empty if none
    ``eligible``                           returns the endpoints that may serve it, None for all; called anew each
                                           time, as they change while it waits
    ``holders``               row, tokens  the endpoints that have most of its prompt cached
    ========================  ===========  =====================================================================
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
        """The endpoints that may serve it now; None: all."""
        return None if self.eligible is None else self.eligible()

    @property
    def cached_tokens(self) -> float:
        """Prompt tokens cached at the endpoint that holds most."""
        return self.input_tokens - self.uncached_tokens

    @property
    def total_tokens(self) -> float:
        """Prompt tokens and expected output tokens."""
        return self.input_tokens + self.output_tokens

# SPDX-License-Identifier: Apache-2.0
"""What one request met: the record that the load client and the simulation both write."""

from __future__ import annotations

import msgspec


class RequestResult(msgspec.Struct, frozen=True):
    """One request, from the instant at which it was due to its last token.

    ``due_at_s``, ``first_token_at_s`` and ``last_token_at_s`` are seconds since the start of the run, by the clock of
    whoever measured: the wall clock for the load client, engine time for the simulation.

    ``error``: empty for a good answer. ``label``: the session's. ``engine``: the address that served it, if known.
    ``position``: the number of its session in the workload, and of its turn in the session.
    """

    due_at_s: float
    first_token_at_s: float
    last_token_at_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    error: str = ""
    label: str = ""
    engine: str = ""
    position: tuple[int, int] = (0, 0)

    @property
    def ttft_s(self) -> float:
        """Time to first token. From when the request was due, so that a late client does not hide a slow server."""
        return self.first_token_at_s - self.due_at_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first, as vLLM defines it; 0 for an answer of one token."""
        more = self.output_tokens - 1
        return (self.last_token_at_s - self.first_token_at_s) / more if more > 0 else 0.0

    @property
    def e2e_s(self) -> float:
        """From when the request was due to its last token."""
        return self.last_token_at_s - self.due_at_s

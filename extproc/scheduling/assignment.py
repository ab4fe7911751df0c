# SPDX-License-Identifier: Apache-2.0
"""A committed pick: where a request goes, and what was expected of it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from extproc.endpoints.table import EndpointRef
from extproc.prefix.held_blocks import Pin
from extproc.scheduling.sessions import SessionNote


class Assignment(msgspec.Struct, frozen=True):
    """A committed pick, with the predictions that its outcome is compared with.

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
    ``pins``                                 the blocks that it holds in the prefix index, by row
    ``adapter``                              the adapter that it needs, if that is loaded on demand
    ``sessions``                             what its session is to keep of the pick
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
    pins: Mapping[int, Pin] = {}
    adapter: str | None = None
    sessions: tuple[SessionNote, ...] = ()

    @property
    def prefilled_by(self) -> EndpointRef:
        """The endpoint that computes the prompt."""
        return self.prefill or self.endpoint

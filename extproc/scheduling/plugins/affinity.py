# SPDX-License-Identifier: Apache-2.0
"""Affinity to a loaded LoRA adapter and to the endpoint of a session."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from extproc.endpoints.table import Bools, Floats
    from extproc.scheduling.picker import View


class LoraAffinity(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``lora-affinity-scorer``.

    1.0: the adapter is active; 0.8: there is room for another adapter; 0.6: it is waiting to be loaded; else 0.
    """

    def score(self, view: View, candidates: Bools) -> Floats:
        """1 for all endpoints if the request names no adapter."""
        adapter = view.request.adapter
        scores = np.ones(candidates.size)
        if adapter is None:
            return scores
        for row in candidates.nonzero()[0]:
            loras = view.table.loras[row]
            if adapter in loras.active:
                continue
            if len(loras.active | loras.waiting) < loras.max_active:
                scores[row] = 0.8
            else:
                scores[row] = 0.6 if adapter in loras.waiting else 0.0
        return scores


class SessionAffinity(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``session-affinity-scorer``: 1 for the endpoint that the session token names, 0 for the others.

    The token is the base64 of an endpoint's address. Responses carry it in the same header, for the next request.
    """

    header: str = "x-session-token"

    def score(self, view: View, candidates: Bools) -> Floats:
        """0 for all endpoints without a token, or with one that names no endpoint."""
        scores = np.zeros(candidates.size)
        row = _bound_row(view, self.header)
        if row is not None:
            scores[row] = 1.0
        return scores


class SessionAffinityFilter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``session-affinity-filter``: keeps only the endpoint that the session token names."""

    header: str = "x-session-token"

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keep all endpoints if the token names none of them."""
        row = _bound_row(view, self.header)
        if row is None or not candidates[row]:
            return candidates
        only = np.zeros(candidates.size, np.bool_)
        only[row] = True
        return only


def session_token(address: str) -> str:
    """The session token of the endpoint at ``address``."""
    return base64.b64encode(address.encode()).decode()


def _bound_row(view: View, header: str) -> int | None:
    token = view.request.headers.get(header.lower(), "")
    try:
        address = base64.b64decode(token, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None  # not a token of ours
    return view.table.row_of(address)

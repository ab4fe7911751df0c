"""Affinity: to a loaded LoRA adapter, to the endpoint of a session, to a label that a header names."""

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

    1.0: the adapter is active; 0.8: fewer adapters are active or waiting than fit; 0.6: it waits to be loaded; else 0.
    """

    def score(self, view: View, candidates: Bools) -> Floats:
        """All 1 for a request that asks for no adapter."""
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
    """llm-d's ``session-affinity-scorer``: 1 for the endpoint that the session's token names, 0 for the others.

    The token is the base64 of the endpoint's address; whoever answers a request writes it into the same header.
    """

    header: str = "x-session-token"

    def score(self, view: View, candidates: Bools) -> Floats:
        """All 0 without a token, or with one that names nobody."""
        scores = np.zeros(candidates.size)
        row = _bound_row(view, self.header)
        if row is not None:
            scores[row] = 1.0
        return scores


class SessionAffinityFilter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The same as a filter: that endpoint alone, or all if it is gone."""

    header: str = "x-session-token"

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Falls back to all."""
        row = _bound_row(view, self.header)
        if row is None or not candidates[row]:
            return candidates
        only = np.zeros(candidates.size, np.bool_)
        only[row] = True
        return only


def session_token(address: str) -> str:
    """What the header carries for the endpoint at ``address``."""
    return base64.b64encode(address.encode()).decode()


def _bound_row(view: View, header: str) -> int | None:
    token = view.request.headers.get(header.lower(), "")
    try:
        address = base64.b64decode(token, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None  # a token that is none of ours binds to nobody
    return view.table.row_of(address)

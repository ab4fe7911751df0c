# SPDX-License-Identifier: Apache-2.0
"""Affinity to a loaded LoRA adapter and to the endpoint of a session."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Self

import msgspec
import numpy as np

from extproc.api.picker_flow_control import AGENT_IDENTITY, SESSION_HEADERS, AgentSessionHeaders
from extproc.api.session_affinity import (
    UNUSED,
    SessionAffinityParameters,
    SessionIdConfig,
    SessionSource,
)
from extproc.api.spec import HEADER_OR_EMPTY
from extproc.scheduling.sessions import SessionNote, address_of_token

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.endpoints.table import Bools, Floats
    from extproc.scheduling.picker import View

# Headers in which clients name their sessions; llm-d's producers publish them as these attributes.
_ATTRIBUTE_HEADERS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        AGENT_IDENTITY: SESSION_HEADERS,
        "session-id": ("x-session-id",),
    }
)
_LEDGER: Final = "there is no ledger of the KV caches of sessions, so none is paused for another"


def _headers_of(source: SessionSource, others: Mapping[str, Any]) -> tuple[str, ...]:
    """The headers that a source of session ids reads, in lower case. ``others``: the file's plugins by name."""
    if source.header:
        return (source.header.lower(),)
    producer = others.get(source.attribute)
    if not isinstance(producer, SessionIdProducer | AgentSessionHeaders):
        cls = AgentSessionHeaders if source.attribute == AGENT_IDENTITY else SessionIdProducer
        producer = next((one for one in others.values() if isinstance(one, cls)), None)
    if producer is not None:
        return producer.headers
    return _ATTRIBUTE_HEADERS.get(source.attribute, _ATTRIBUTE_HEADERS["session-id"])


class SessionIdProducer(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``session-id-producer``: the header in which clients name their sessions, for the session plugins."""

    WITHOUT_EFFECT: ClassVar = MappingProxyType(
        {
            "cookieName": "session ids are read in headers; set headerName",
            "lruSize": "some 100,000 sessions are kept",
            "ttl": "evictionTtlSeconds of the session plugin sets how long a session is kept",
        }
    )

    header_name: Annotated[str, msgspec.Meta(pattern=HEADER_OR_EMPTY)] = ""

    @property
    def headers(self) -> tuple[str, ...]:
        """The header, in lower case."""
        return (self.header_name.lower(),) if self.header_name else _ATTRIBUTE_HEADERS["session-id"]


class LoraAffinityScorer(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
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


class _SessionAffinityBase(SessionAffinityParameters, frozen=True):
    """The common part of the filter and the scorer: the session's endpoint, and the note to keep of a pick."""

    WITHOUT_EFFECT: ClassVar = UNUSED

    def with_plugins(self, others: Mapping[str, Any]) -> Self:
        """With the headers of the producers that its sources name."""
        if not self.uses_client_ids:
            return self
        given = self.as_session_id_config
        sources = tuple(SessionSource(header=name) for one in given.sources for name in _headers_of(one, others))
        return msgspec.structs.replace(
            self,
            strategy="session_id",
            algorithm="",
            session_id_producer_name="",
            session_id_config=msgspec.structs.replace(given, sources=sources or given.sources),
        )

    def bound_row(self, view: View) -> int | None:
        """The row of the session's endpoint; None without a session, or if its endpoint has left."""
        if not self.uses_client_ids:
            address = address_of_token(view.request.headers.get(self.token_header, ""))
        else:
            key = self._key(view)
            address = (
                None if key is None or view.sessions is None else view.sessions.bindings.address_of(key, view.now_s)
            )
        return None if address is None else view.table.row_of(address)

    def note(self, view: View, row: int) -> SessionNote | None:
        """The note to keep for the session of a pick of ``row``.

        A session with an id moves only if its endpoint has left or fails: one that a scorer passed over once stays.
        """
        address = view.table.addresses[row]
        if not self.uses_client_ids:
            return SessionNote(address, header=self.token_header)
        key, bound = self._key(view), self.bound_row(view)
        if key is None:
            return None
        if bound is not None and bound != row and view.table.is_active[bound]:
            is_well = not view.table.has_failures or view.table.retry_at_s[bound] <= view.now_s
            if is_well:
                return None
        return SessionNote(address, key=key, ttl_s=self.ttl_s)

    def _key(self, view: View) -> str | None:
        if view.sessions is None:
            return None
        headers = view.request.headers
        for source in self.sources:
            session = headers.get(source.header, "").strip() if source.header else ""
            if session:
                return view.sessions.session_key(self.profile_name, session)
        return None


class SessionAffinityScorer(_SessionAffinityBase, frozen=True):
    """llm-d's ``session-affinity-scorer``: 1 for the endpoint of the request's session, 0 for the others.

    ``encoded_endpoint_header``: answers carry a token that names the endpoint, and requests bring it back in the same
    header. ``session_id``: the client names its session, and its endpoint is kept here, apart for each tenant. With
    ``profileName`` the endpoint of that profile is meant, such as ``prefill``; without it, the one that answers.
    A token that cannot be read, or that names no endpoint of the pool, counts as none.
    """

    def score(self, view: View, candidates: Bools) -> Floats:
        """0 for all endpoints without a session, or if its endpoint has left."""
        scores = np.zeros(candidates.size)
        row = self.bound_row(view)
        if row is not None:
            scores[row] = 1.0
        return scores


class SessionAffinityFilter(_SessionAffinityBase, frozen=True):
    """llm-d's ``session-affinity-filter``: keeps only the endpoint of the request's session.

    The parameters are those of ``session-affinity-scorer``.
    """

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keep all endpoints without a session, or if its endpoint is no candidate."""
        row = self.bound_row(view)
        if row is None or not candidates[row]:
            return candidates
        only = np.zeros(candidates.size, np.bool_)
        only[row] = True
        return only


class ThunderAgentAffinity(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``thunder-agent``: sessions of agents stay on their endpoints, as with ``session-affinity-scorer``.

    Named as ``fairnessPolicyRef``, it is ``program-aware-fairness``; as ``saturationDetector``,
    ``utilization-detector``. llm-d's also holds a session back until its KV cache has room on its endpoint.
    """

    WITHOUT_EFFECT: ClassVar = MappingProxyType(
        dict.fromkeys(
            (
                "actingHalfLifeSeconds",
                "admissionPolicy",
                "bufferTokensPerProgram",
                "capacityTokens",
                "evictionSweepSeconds",
                "headWaitStarvationMs",
                "idleLeaseSeconds",
                "nextTurnPredictor",
                "sessionFinalHeader",
                "shedIdleSeconds",
                "utilThreshold",
            ),
            _LEDGER,
        )
    )
    TOLD: ClassVar = "keeps sessions on their endpoints, and does not hold them back until their KV caches have room"

    eviction_ttl_seconds: Annotated[float, msgspec.Meta(ge=0)] = 3600.0

    def with_plugins(self, others: Mapping[str, Any]) -> SessionAffinityScorer:
        """The scorer, with the headers of the file's ``agent-identity``."""
        ids = SessionIdConfig((SessionSource(attribute=AGENT_IDENTITY),), self.eviction_ttl_seconds)
        return SessionAffinityScorer(strategy="session_id", session_id_config=ids).with_plugins(others)

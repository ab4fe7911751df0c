# SPDX-License-Identifier: Apache-2.0
"""The caller of a request: tenant, user, priority and latency targets, from headers."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.admission.access import Subject
from extproc.admission.names import shortened, verified_name_in
from extproc.api.spec import object_key
from extproc.protocol import CLIENT, DEADLINE_MS, FAIRNESS_IDS, OBJECTIVES, SLO_TPOT_MS, SLO_TTFT_MS, TENANT, USER

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from extproc.api.snapshot import Snapshot

ANONYMOUS: Final = "anonymous"
_MAX_TARGET_MS: Final = 86_400_000.0
_NO_CLAIMS: Final[Mapping[str, Collection[str]]] = MappingProxyType({})


class Caller(msgspec.Struct, frozen=True):
    """Who sends a request.

    ``flow``: the fairness ID, empty if the tenant is the flow. ``priority``: of the request's objective, None if it
    names none. ``ttft_target_s``, ``tpot_target_s``: latency objectives in seconds, None if not set.
    ``deadline_in_s``: when the first token is due, in seconds from arrival, None if not set.
    """

    tenant: str = ANONYMOUS
    user: str = ""
    api_key: str = ""
    flow: str = ""
    priority: int | None = None
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    deadline_in_s: float | None = None


ANONYMOUS_CALLER: Final = Caller()
ANONYMOUS_SUBJECT: Final = Subject(ANONYMOUS)


class Identities:
    """Resolves callers with the API keys and objectives of the configuration."""

    def __init__(self, snapshot: Snapshot) -> None:
        authentication = snapshot.gateway.authentication
        keys = () if authentication is None else authentication.api_keys
        self._keys = {one.name: one for one in keys}
        self._objectives = {one.metadata.key: one.spec.priority for one in snapshot.objectives}

    def subject(self, headers: Mapping[str, str], claims: Mapping[str, Collection[str]] = _NO_CLAIMS) -> Subject:
        """Who asks, for the decision whether it may. ``headers`` and ``claims``: of a request that a gateway vouches
        for.
        """
        name = headers.get(CLIENT, "")
        key = self._keys.get(name)
        if key is not None:
            return Subject(shortened(key.tenant), shortened(key.user), name, claims)
        tenant = verified_name_in(headers, TENANT) or ANONYMOUS
        return Subject(tenant, verified_name_in(headers, USER), name, claims)

    def caller(self, headers: Mapping[str, str], *, namespace: str, is_trusted: bool) -> Caller:
        """The caller by a request's headers. Unless ``is_trusted`` (a gateway wrote them), the caller is anonymous.

        ``namespace``: of the ModelServer, where the request's InferenceObjective is looked up.
        """
        if not is_trusted:
            return ANONYMOUS_CALLER
        key = self._keys.get(headers.get(CLIENT, ""))
        objective = _first(headers, OBJECTIVES)
        tenant = key.tenant if key is not None else verified_name_in(headers, TENANT) or ANONYMOUS
        return Caller(
            tenant=tenant,
            user=key.user if key is not None else verified_name_in(headers, USER),
            api_key="" if key is None else key.name,
            flow=shortened(_first(headers, FAIRNESS_IDS)),
            # an unknown objective counts as priority 0, as in llm-d
            priority=self._objectives.get(object_key(namespace, objective), 0) if objective else None,
            ttft_target_s=_seconds(_first(headers, SLO_TTFT_MS)),
            tpot_target_s=_seconds(_first(headers, SLO_TPOT_MS)),
            deadline_in_s=_seconds(headers.get(DEADLINE_MS, "")),
        )


def _first(headers: Mapping[str, str], names: Sequence[str]) -> str:
    return next((headers[name] for name in names if name in headers), "")


def _seconds(text: str) -> float | None:
    try:
        milliseconds = float(text)
    except ValueError:
        return None
    return milliseconds / 1000 if 0 < milliseconds <= _MAX_TARGET_MS else None

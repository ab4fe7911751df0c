# SPDX-License-Identifier: Apache-2.0
"""The caller of a request: tenant, user, priority and latency targets, from headers."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.config.authentication import restricts_models
from extproc.config.spec import object_key
from extproc.protocol import CLIENT, DEADLINE_MS, FAIRNESS_IDS, OBJECTIVES, SLO_TPOT_MS, SLO_TTFT_MS, TENANT, USER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from extproc.config.authentication import ApiKey
    from extproc.config.snapshot import Snapshot

ANONYMOUS: Final = "anonymous"
# Longer names are cut and end in a hash of the whole, so that two callers stay two: names are kept in memory and shown in metrics.
_MAX_CHARACTERS: Final = 128
_HASH_BYTES: Final = 16
_MAX_TARGET_MS: Final = 86_400_000.0
_NO_MODELS: Final = frozenset[str]()


class Caller(msgspec.Struct, frozen=True):
    """Who sends a request.

    ``flow``: the fairness ID, empty if the tenant is the flow. ``priority``: of the request's objective, None if it
    names none. ``ttft_target_s``, ``tpot_target_s``: latency objectives in seconds, None if not set.
    ``deadline_in_s``: when the first token is due, in seconds from arrival, None if not set. ``models``: the names that
    it may ask for, None for all.
    """

    tenant: str = ANONYMOUS
    user: str = ""
    api_key: str = ""
    flow: str = ""
    priority: int | None = None
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    deadline_in_s: float | None = None
    models: frozenset[str] | None = None

    def may_use(self, model: str) -> bool:
        """Whether it may ask for ``model``, the name of a model or an adapter."""
        return self.models is None or model in self.models


ANONYMOUS_CALLER: Final = Caller()


class Identities:
    """Resolves callers with the API keys and objectives of the configuration."""

    def __init__(self, snapshot: Snapshot) -> None:
        authentication = snapshot.gateway.authentication
        keys = () if authentication is None else authentication.api_keys
        self._keys = {one.name: one for one in keys}
        self._objectives = {one.metadata.key: one.spec.priority for one in snapshot.objectives}
        # whether some caller may not use every model
        self.restricts_models = restricts_models(authentication, snapshot.gateway.tenants)
        self._models_by_tenant = {
            one.name: frozenset(one.models) for one in snapshot.gateway.tenants if one.models is not None
        }
        self._models_by_key = {one.name: self._of_key(one) for one in keys}
        anonymous = self._models_by_tenant.get(ANONYMOUS)
        self._anonymous = ANONYMOUS_CALLER if anonymous is None else Caller(models=anonymous)

    def caller(self, headers: Mapping[str, str], *, namespace: str, is_trusted: bool) -> Caller:
        """The caller by a request's headers. Unless ``is_trusted`` (a gateway wrote them), the caller is anonymous.

        ``namespace``: of the ModelServer, where the request's InferenceObjective is looked up.
        """
        if not is_trusted:
            return self._anonymous
        key = self._keys.get(headers.get(CLIENT, ""))
        objective = _first(headers, OBJECTIVES)
        tenant = key.tenant if key is not None else name_in(headers, TENANT) or ANONYMOUS
        return Caller(
            tenant=tenant,
            user=key.user if key is not None else name_in(headers, USER),
            api_key="" if key is None else key.name,
            flow=_truncate(_first(headers, FAIRNESS_IDS)),
            # an unknown objective counts as priority 0, as in llm-d
            priority=self._objectives.get(object_key(namespace, objective), 0) if objective else None,
            ttft_target_s=_seconds(_first(headers, SLO_TTFT_MS)),
            tpot_target_s=_seconds(_first(headers, SLO_TPOT_MS)),
            deadline_in_s=_seconds(headers.get(DEADLINE_MS, "")),
            models=self._models_of(headers.get(CLIENT, ""), tenant),
        )

    def _models_of(self, key: str, tenant: str) -> frozenset[str] | None:
        if not key:
            return self._models_by_tenant.get(tenant)
        # a key that Envoy knows and this configuration does not (yet, or any more) may use none
        return self._models_by_key.get(key, _NO_MODELS) if self.restricts_models else None

    def _of_key(self, key: ApiKey) -> frozenset[str] | None:
        """What both the key and its tenant may use."""
        by_tenant = self._models_by_tenant.get(key.tenant)
        if key.models is None:
            return by_tenant
        return frozenset(key.models) if by_tenant is None else by_tenant & frozenset(key.models)


def name_in(headers: Mapping[str, str], header: str) -> str:
    """The value of a header, shortened to a bounded length; empty if it is missing."""
    return _truncate(headers.get(header.lower(), ""))


def _truncate(name: str) -> str:
    if len(name) <= _MAX_CHARACTERS:
        return name
    hashed = blake2b(name.encode(errors="surrogatepass"), digest_size=_HASH_BYTES).hexdigest()
    return f"{name[: _MAX_CHARACTERS - len(hashed) - 1]}~{hashed}"


def _first(headers: Mapping[str, str], names: Sequence[str]) -> str:
    return next((headers[name] for name in names if name in headers), "")


def _seconds(text: str) -> float | None:
    try:
        milliseconds = float(text)
    except ValueError:
        return None
    return milliseconds / 1000 if 0 < milliseconds <= _MAX_TARGET_MS else None

"""Who asks, and what their requests are worth: from headers that a trusted hop has written, and from the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from extproc.config.spec import object_key
from extproc.protocol import CLIENT, DEADLINE_MS, FAIRNESS_IDS, OBJECTIVES, SLO_TPOT_MS, SLO_TTFT_MS, TENANT, USER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from extproc.config.types import Snapshot

ANONYMOUS: Final = "anonymous"
# Longer names are cut: they are kept, and shown.
_MOST_CHARACTERS: Final = 128
_LONGEST_TARGET_MS: Final = 86_400_000.0


class Caller(msgspec.Struct, frozen=True):
    """Who asks. ``flow``: what is treated fairly, if not the tenant. ``priority``: None if no objective says.

    Targets in seconds from the request's arrival; None: there are none.
    """

    tenant: str = ANONYMOUS
    user: str = ""
    api_key: str = ""
    flow: str = ""
    priority: int | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    deadline_s: float | None = None


NOBODY: Final = Caller()


class Identities:
    """What the configuration knows of callers."""

    def __init__(self, snapshot: Snapshot) -> None:
        authentication = snapshot.gateway.authentication
        keys = () if authentication is None else authentication.api_keys
        self._keys = {one.name: one for one in keys}
        self._objectives = {one.metadata.key: one.spec.priority for one in snapshot.objectives}

    def caller(self, headers: Mapping[str, str], *, namespace: str, is_trusted: bool) -> Caller:
        """Of a request with these headers; nobody's word counts that is not trusted.

        ``namespace``: of the ModelServer, in which the request's InferenceObjective is looked up by its name.
        """
        if not is_trusted:
            return NOBODY
        key = self._keys.get(headers.get(CLIENT, ""))
        objective = _first(headers, OBJECTIVES)
        return Caller(
            tenant=key.tenant if key is not None else name_in(headers, TENANT) or ANONYMOUS,
            user=key.user if key is not None else name_in(headers, USER),
            api_key="" if key is None else key.name,
            flow=_cut(_first(headers, FAIRNESS_IDS)),
            # an objective that is not known counts as 0, as in llm-d
            priority=self._objectives.get(object_key(namespace, objective), 0) if objective else None,
            ttft_s=_seconds(_first(headers, SLO_TTFT_MS)),
            tpot_s=_seconds(_first(headers, SLO_TPOT_MS)),
            deadline_s=_seconds(headers.get(DEADLINE_MS, "")),
        )


def name_in(headers: Mapping[str, str], header: str) -> str:
    """The name that a header holds, cut where it would fill memory; empty if there is none."""
    return _cut(headers.get(header.lower(), ""))


def _cut(name: str) -> str:
    return name[:_MOST_CHARACTERS]


def _first(headers: Mapping[str, str], names: Sequence[str]) -> str:
    return next((headers[name] for name in names if name in headers), "")


def _seconds(text: str) -> float | None:
    try:
        milliseconds = float(text)
    except ValueError:
        return None
    return milliseconds / 1000 if 0 < milliseconds <= _LONGEST_TARGET_MS else None

# SPDX-License-Identifier: Apache-2.0
"""What the console shows of API keys: whose they are and when they end, never a key or its digest."""

from __future__ import annotations

from heapq import nsmallest
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from extproc.api.authentication import ApiKey

_MOST: Final = 50
_MOST_NAME: Final = 128
_MOST_MODELS: Final = 8
# Between two turns of other work.
_AT_ONCE: Final = 500


class KeyView(msgspec.Struct, frozen=True, rename="camel"):
    """``id``: of a virtual key, else empty. ``models``: the first of ``model_count``; none: every model of its tenant.
    ``ends_in_s``: None if it does not end; negative if it has. ``limits``, ``budgets``: of its own.
    """

    name: str
    id: str
    tenant: str
    user: str
    models: tuple[str, ...]
    model_count: int
    limits: int
    budgets: int
    ends_in_s: float | None


class KeysAnswer(msgspec.Struct, frozen=True, rename="camel"):
    """``keys``: the first by name of the ``count`` that the query finds. A key that is being rotated is there twice."""

    count: int
    keys: tuple[KeyView, ...]


def keys_answer(keys: Sequence[ApiKey], *, find: str, now_s: float) -> Generator[None, None, KeysAnswer]:
    """Of the configuration in use. ``find``: a part of a name, an id, a tenant or a user."""
    text = find.lower()
    found: list[ApiKey] = []
    for at, one in enumerate(keys):
        if at % _AT_ONCE == _AT_ONCE - 1:
            yield
        if not text or any(text in name.lower() for name in (one.name, one.id or "", one.tenant, one.user)):
            found.append(one)
    yield
    return KeysAnswer(len(found), tuple(_view(one, now_s) for one in nsmallest(_MOST, found, key=_name)))


def _name(one: ApiKey) -> str:
    return one.name


def _view(one: ApiKey, now_s: float) -> KeyView:
    models = one.models or ()
    return KeyView(
        name=one.name[:_MOST_NAME],
        id=(one.id or "")[:_MOST_NAME],
        tenant=one.tenant[:_MOST_NAME],
        user=one.user[:_MOST_NAME],
        models=tuple(name[:_MOST_NAME] for name in models[:_MOST_MODELS]),
        model_count=len(models),
        limits=len(one.rate_limits),
        budgets=len(one.budgets),
        ends_in_s=None if one.expires_at is None else one.expires_at.timestamp() - now_s,
    )

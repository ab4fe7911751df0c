# SPDX-License-Identifier: Apache-2.0
"""Changes of a KeyStore, pure: from a store and what is asked for to the next store, and the key that has changed."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from extproc.api import spec as patterns
from extproc.api.authentication import KeyBudgets, KeyRateLimits, ModelPattern, Reports
from extproc.api.config_errors import format_path, one_line
from extproc.api.key_store import (
    MOST_KEYS,
    MOST_RETIRED,
    KeyStoreSpec,
    PreviousKey,
    VirtualKey,
    check_key_store,
    to_json_fields,
)
from extproc.api.quantities import Duration, decode_quantity
from extproc.api.schema_validation import check_shape
from extproc.api.spec import NonEmpty, Spec

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from extproc.api.config_errors import Finding

T = TypeVar("T", bound=Spec)
# It is part of each request's row, and of headers.
_Name = Annotated[str, msgspec.Meta(pattern=patterns.NAME, max_length=64)]
_Models = Annotated[tuple[ModelPattern, ...], msgspec.Meta(min_length=1, max_length=256)] | None
_When = Annotated[datetime, msgspec.Meta(tz=True)]
# Of RFC 3339, and of a Secret's digest: a key that lives longer has no expiry.
_LONGEST_S: Final = 100 * 366 * 86_400.0


class KeyRefused(Exception):
    """A change that is not made, and what to do. ``status``: of HTTP."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class KeyRequest(Spec, frozen=True):
    """What a new key is to be: see VirtualKey. ``expires_in``: in place of ``expires_at``, from now on."""

    name: _Name
    tenant: NonEmpty
    user: Annotated[str, msgspec.Meta(max_length=512, pattern=patterns.NO_CONTROL)] = ""
    models: _Models = None
    rate_limits: KeyRateLimits = ()
    budgets: KeyBudgets = ()
    reports: Reports = None
    expires_at: _When | None = None
    expires_in: Duration | None = None


class KeyUpdate(Spec, frozen=True):
    """What is to change of a key; what is left out stays. null for ``models``, ``reports`` or ``expires_at``: there are
    none.
    """

    models: _Models | UnsetType = UNSET
    rate_limits: KeyRateLimits | UnsetType = UNSET
    budgets: KeyBudgets | UnsetType = UNSET
    reports: Reports | UnsetType = UNSET
    expires_at: _When | UnsetType | None = UNSET
    expires_in: Duration | UnsetType = UNSET


class KeyIdAndDigest(msgspec.Struct, frozen=True):
    """What chance gives: an id, and the SHA-256 of a key."""

    id: str
    digest: str


def parse_key_request(plain: object) -> KeyRequest:
    """Raises KeyRefused."""
    return _converted(plain, KeyRequest)


def parse_key_update(plain: object) -> KeyUpdate:
    """Raises KeyRefused."""
    return _converted(plain, KeyUpdate)


def _converted(plain: object, cls: type[T]) -> T:
    try:
        return msgspec.convert(plain, cls, dec_hook=decode_quantity)
    except msgspec.ValidationError:
        raise _refused(check_shape(plain, cls)) from None


def create(
    store: KeyStoreSpec, asked: KeyRequest, new: KeyIdAndDigest, now: datetime, *, taken: Collection[str] = ()
) -> tuple[KeyStoreSpec, VirtualKey]:
    """``taken``: names of keys of the GatewayConfig. Raises KeyRefused."""
    if len(store.keys) >= MOST_KEYS:
        raise KeyRefused(f"there are {MOST_KEYS} keys, which is the most; delete some", 409)
    states = (
        ["active"] if asked.name in taken else [key_status(one, now) for one in store.keys if one.name == asked.name]
    )
    if states:
        state, instead = ("", ", or rotate that one") if states == ["active"] else (f", which is {states[0]}", "")
        raise KeyRefused(f"there is a key '{asked.name}' already{state}; give it another name{instead}", 409)
    if asked.name in store.retired:
        raise KeyRefused(f"'{asked.name}' was the name of a deleted key, whose usage has it; give it another name", 409)
    made = VirtualKey(
        id=new.id,
        name=asked.name,
        tenant=asked.tenant,
        user=asked.user,
        key_sha256=new.digest,
        models=asked.models,
        rate_limits=asked.rate_limits,
        budgets=asked.budgets,
        reports=asked.reports,
        created_at=now,
        expires_at=_expiry(asked.expires_at, asked.expires_in, now),
    )
    return _checked(msgspec.structs.replace(store, keys=(*store.keys, made))), made


def update(store: KeyStoreSpec, which: str, asked: KeyUpdate, now: datetime) -> tuple[KeyStoreSpec, VirtualKey]:
    """Raises KeyRefused."""
    key = find_key(store, which)
    changed: dict[str, Any] = {
        name: value
        for name in ("models", "rate_limits", "budgets", "reports", "expires_at")
        if (value := getattr(asked, name)) is not UNSET
    }
    if not isinstance(asked.expires_in, UnsetType):
        changed["expires_at"] = _expiry(changed.get("expires_at"), asked.expires_in, now)
    return _with(store, msgspec.structs.replace(key, **changed))


def rotate(
    store: KeyStoreSpec, which: str, digest: str, now: datetime, *, overlap_s: float
) -> tuple[KeyStoreSpec, VirtualKey]:
    """A new key for the same caller; the last one is valid for ``overlap_s`` more, the one before it no longer. Raises
    KeyRefused.
    """
    key = find_key(store, which)
    state = key_status(key, now)
    if state != "active":
        raise KeyRefused(f"'{key.name}' is {state}; create a new key", 409)
    if overlap_s > _LONGEST_S:
        raise KeyRefused("the overlap is too long; write one such as 24h")
    previous = PreviousKey(key_sha256=key.key_sha256, until=now + timedelta(seconds=overlap_s)) if overlap_s else None
    return _with(store, msgspec.structs.replace(key, key_sha256=digest, rotated_at=now, previous=previous))


def revoke(store: KeyStoreSpec, which: str, now: datetime) -> tuple[KeyStoreSpec, VirtualKey]:
    """It is refused from now on, and stays in the list. Revoking twice changes nothing. Raises KeyRefused."""
    key = find_key(store, which)
    if key.revoked_at is not None:
        return store, key
    return _with(store, msgspec.structs.replace(key, revoked_at=now, previous=None))


def delete(store: KeyStoreSpec, which: str) -> tuple[KeyStoreSpec, VirtualKey]:
    """It is refused from now on, and its name is not given again. Raises KeyRefused."""
    key = find_key(store, which)
    return msgspec.structs.replace(
        store,
        keys=tuple(one for one in store.keys if one.id != key.id),
        retired=(*store.retired, key.name)[-MOST_RETIRED:],
    ), key


def find_key(store: KeyStoreSpec, which: str) -> VirtualKey:
    """By its id or its name; raises KeyRefused."""
    # a name may look like another key's id
    for field in ("id", "name"):
        for one in store.keys:
            if getattr(one, field) == which:
                return one
    raise KeyRefused(f"there is no key '{which[:64]}'; attache keys list shows all", 404)


def key_status(key: VirtualKey, now: datetime) -> str:
    """``active``, ``expired`` or ``revoked``."""
    if key.revoked_at is not None:
        return "revoked"
    return "expired" if key.expires_at is not None and key.expires_at <= now else "active"


def key_for_display(key: VirtualKey, now: datetime) -> dict[str, Any]:
    """A key as its administrators see it: with its status, and without digests."""
    plain = to_json_fields(key)
    plain.pop("keySHA256")
    if "previous" in plain:
        plain["previous"].pop("keySHA256")
    return {**plain, "status": key_status(key, now)}


def _expiry(at: datetime | None, within: Duration | None, now: datetime) -> datetime | None:
    if within is None:
        return at
    if at is not None:
        raise KeyRefused("write expiresAt or expiresIn, one of the two")
    if within > _LONGEST_S:
        raise KeyRefused("expiresIn is too long; leave it out for a key without an end")
    return now + timedelta(seconds=within)


def _with(store: KeyStoreSpec, key: VirtualKey) -> tuple[KeyStoreSpec, VirtualKey]:
    keys = tuple(key if one.id == key.id else one for one in store.keys)
    return _checked(msgspec.structs.replace(store, keys=keys)), key


def _checked(store: KeyStoreSpec) -> KeyStoreSpec:
    """Raises KeyRefused."""
    # without spec.keys[index]
    found = [(path[3:], message) for path, message in check_key_store(store)]
    if found:
        raise _refused(found)
    return store


def _refused(found: Iterable[Finding]) -> KeyRefused:
    lines = (f"{format_path(path)}: {message}" if path else message for path, message in found)
    return KeyRefused(one_line("; ".join(lines)))

# SPDX-License-Identifier: Apache-2.0
"""Changes of virtual keys, in virtual time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from controller.bundle.secret_readers import AuthKeyReader
from controller.keys import api_key_changes
from controller.keys.api_key_changes import (
    KeyIdAndDigest,
    KeyRefused,
    key_for_display,
    parse_key_request,
    parse_key_update,
)
from extproc.api import key_store
from extproc.api.authentication import Authentication, VirtualKeys
from extproc.api.config_snapshot import Snapshot, failure_mode_of
from extproc.api.gateway_config import GatewayConfigSpec
from extproc.api.key_store import KeyStoreSpec, VirtualKey, to_json_fields, with_virtual_keys

if TYPE_CHECKING:
    from extproc.api.authentication import ApiKey

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
EMPTY = KeyStoreSpec()


def digest(number: int) -> str:
    return f"{number:064x}"


def created(store: KeyStoreSpec = EMPTY, number: int = 1, **fields: object) -> tuple[KeyStoreSpec, VirtualKey]:
    asked = parse_key_request({"name": f"key-{number}", "tenant": "acme", **fields})
    return api_key_changes.create(store, asked, KeyIdAndDigest(f"{number:012x}", digest(number)), NOW)


def usable(store: KeyStoreSpec, now: datetime = NOW) -> dict[str, ApiKey]:
    """What the bundle's writer gives Envoy, by digest."""
    gateway = GatewayConfigSpec(authentication=Authentication(virtual_keys=VirtualKeys()))
    snapshot = Snapshot(version="", routes=(), servers=(), gateway=with_virtual_keys(gateway, store))
    filled = AuthKeyReader({}).fill_keys(snapshot, now).gateway.authentication
    assert filled is not None
    return {one.digest or "": one for one in filled.api_keys}


def test_a_key_is_valid_until_it_expires() -> None:
    store, key = created(expiresIn="1h")
    assert key.expires_at == NOW + HOUR
    assert list(usable(store, NOW + HOUR - timedelta(seconds=1))) == [digest(1)]
    assert usable(store, NOW + HOUR) == {}
    assert [api_key_changes.key_status(key, when) for when in (NOW, NOW + HOUR)] == ["active", "expired"]


def test_a_rotated_key_overlaps_with_the_last_one_and_never_outlives_its_end() -> None:
    store, key = created(expiresIn="3h")
    store, rotated = api_key_changes.rotate(store, "key-1", digest(2), NOW, overlap_s=3600.0)
    both = usable(store)
    assert set(both) == {digest(1), digest(2)}
    assert {one.name for one in both.values()} == {"key-1"}
    assert {one.id for one in both.values()} == {key.id} == {rotated.id}
    assert list(usable(store, NOW + HOUR)) == [digest(2)]
    assert usable(store, NOW + 3 * HOUR) == {}
    store, _ = api_key_changes.rotate(store, "key-1", digest(3), NOW, overlap_s=7 * 3600.0)
    # the first is gone, and the second ends with the whole
    assert set(usable(store)) == {digest(2), digest(3)}
    assert usable(store)[digest(2)].expires_at == NOW + 3 * HOUR
    store, _ = api_key_changes.rotate(store, "key-1", digest(4), NOW, overlap_s=0.0)
    assert set(usable(store)) == {digest(4)}


def test_a_revoked_key_is_listed_and_refused_with_the_one_before_it() -> None:
    store, _ = created()
    store, _ = api_key_changes.rotate(store, "key-1", digest(2), NOW, overlap_s=3600.0)
    store, key = api_key_changes.revoke(store, "key-1", NOW + HOUR / 2)
    assert usable(store, NOW + HOUR / 2) == {}
    assert key_for_display(key, NOW) | {"status": ""} == {
        "id": f"{1:012x}",
        "name": "key-1",
        "tenant": "acme",
        "createdAt": "2026-11-23T12:00:00Z",
        "rotatedAt": "2026-11-23T12:00:00Z",
        "revokedAt": "2026-11-23T12:30:00Z",
        "status": "",
    }
    assert api_key_changes.revoke(store, key.id, NOW + HOUR) == (store, key)
    with pytest.raises(KeyRefused, match="'key-1' is revoked; create a new key"):
        api_key_changes.rotate(store, "key-1", digest(3), NOW, overlap_s=0.0)


def test_a_name_is_never_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = created()
    with pytest.raises(KeyRefused, match="there is a key 'key-1' already; give it another name, or rotate that one"):
        created(store)
    store, _ = api_key_changes.revoke(store, "key-1", NOW)
    with pytest.raises(KeyRefused, match="there is a key 'key-1' already, which is revoked; give it another name"):
        created(store)
    store, _ = api_key_changes.delete(store, "key-1")
    assert store.keys == ()
    with pytest.raises(KeyRefused, match="was the name of a deleted key"):
        created(store)
    with pytest.raises(KeyRefused, match="there is a key 'key-2' already"):
        api_key_changes.create(
            store, parse_key_request({"name": "key-2", "tenant": "a"}), KeyIdAndDigest("0", ""), NOW, taken={"key-2"}
        )
    monkeypatch.setattr(api_key_changes, "MOST_RETIRED", 2)
    for number in (2, 3):
        store, _ = created(store, number)
        store, _ = api_key_changes.delete(store, f"key-{number}")
    assert store.retired == ("key-2", "key-3")


def test_keys_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_key_changes, "MOST_KEYS", 1)
    store, _ = created()
    with pytest.raises(KeyRefused, match="there are 1 keys, which is the most") as caught:
        created(store, 2)
    assert caught.value.status == 409


def test_what_is_left_out_of_an_update_stays() -> None:
    store, before = created(models=["llama"], expiresIn="1h", budgets=[{"window": "Month", "max": {"money": "2.5"}}])
    store, after = api_key_changes.update(store, "key-1", parse_key_update({"models": None}), NOW)
    assert after == msgspec.structs.replace(before, models=None)
    store, after = api_key_changes.update(store, "key-1", parse_key_update({"expiresAt": None, "budgets": []}), NOW)
    assert (after.expires_at, after.budgets) == (None, ())
    _, after = api_key_changes.update(store, "key-1", parse_key_update({"expiresIn": "2h"}), NOW)
    assert after.expires_at == NOW + 2 * HOUR


def test_a_key_reads_its_tenants_usage_only_while_somebody_lets_it() -> None:
    store, plain = created()
    assert [one.reports for one in usable(store).values()] == [None]
    assert "reports" not in key_for_display(plain, NOW)
    store, _ = api_key_changes.update(store, "key-1", parse_key_update({"reports": "Tenant"}), NOW)
    store, _ = api_key_changes.rotate(store, "key-1", digest(2), NOW, overlap_s=60.0)
    assert [one.reports for one in usable(store).values()] == ["Tenant"] * 2
    store, _ = api_key_changes.update(store, "key-1", parse_key_update({"reports": None}), NOW)
    assert [one.reports for one in usable(store).values()] == [None] * 2
    _, made = created(store, 3, reports="Tenant")
    assert key_for_display(made, NOW)["reports"] == "Tenant"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tenant": ""}, "tenant"),
        ({"reports": "bell"}, "reports: 'bell' .*Tenant"),
        ({"tenant": "a\nb"}, "tenant"),
        ({"name": "A"}, "name"),
        ({"name": "a" * 65}, "name"),
        ({"key": "sk-12345678"}, "key: there is no such field"),
        ({"expiresIn": "soon"}, "not a duration"),
        ({"expiresIn": "90000d"}, "too long"),
        ({"expiresIn": "1h", "expiresAt": "2030-01-01T00:00:00Z"}, "one of the two"),
        ({"budgets": [{"window": "month", "max": {"tokens": 1}}]}, r"budgets\[0\].window: 'month' .* mean 'Month'\?"),
        ({"budgets": [{"window": "Month", "max": {"usd": 1}}]}, r"budgets\[0\].max.usd: .* write one of: .*money"),
        ({"budgets": [{"window": "Month", "max": {}}]}, r"budgets\[0\].max: limits nothing"),
        ({"budgets": [{"window": "Month", "max": {"tokens": 1}}] * 2}, r"budgets\[1\].window"),
        ({"budgets": [{"window": "Day", "max": {"tokens": 1}, "timeZone": "../x"}]}, r"budgets\[0\].timeZone"),
        ({"rateLimits": [{"unit": "minute"}]}, r"rateLimits\[0\]: limits nothing"),
        ({"models": []}, "models"),
        ({"a\nb": 1}, r"^a\\nb: there is no such field"),
        ({f"field-{number}": 1 for number in range(9_999)}, r"^field-0: there .*\.\.\.$"),
    ],
)
def test_what_no_key_can_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(KeyRefused, match=message):
        created(**fields)


@pytest.mark.parametrize(("plain", "message"), [([], "^.. is a list"), ({}, "^the field 'name' is missing")])
def test_what_is_no_key_at_all_is_refused(plain: object, message: str) -> None:
    with pytest.raises(KeyRefused, match=message):
        parse_key_request(plain)


def test_a_store_is_read_as_it_was_written() -> None:
    store, _ = created(models=["llama"], rateLimits=[{"requests": 1}], budgets=[{"window": "Day", "max": {"money": 1}}])
    store, _ = api_key_changes.rotate(store, "key-1", digest(2), NOW, overlap_s=60.0)
    store, _ = created(store, 3)
    plain = to_json_fields(msgspec.structs.replace(store, cache_secret="0" * 32))
    assert api_key_changes._converted(plain, KeyStoreSpec).keys == store.keys


@pytest.mark.parametrize("field", ["name", "id", "keySHA256"])
def test_two_keys_are_never_alike(field: str) -> None:
    store, first = created()
    changed = {"name": "name", "id": "id", "keySHA256": "key_sha256"}[field]
    second = msgspec.structs.replace(first, id="f" * 12, name="other", key_sha256=digest(9))
    second = msgspec.structs.replace(second, **{changed: getattr(first, changed)})
    found = list(key_store.check_key_store(msgspec.structs.replace(store, keys=(first, second))))
    assert [path for path, _ in found] == [("spec", "keys", 1, field)]


def test_without_extproc_virtual_keys_are_let_through_to_nothing() -> None:
    gateway = GatewayConfigSpec(authentication=Authentication(virtual_keys=VirtualKeys()))
    assert failure_mode_of(Snapshot(version="", routes=(), servers=(), gateway=gateway)) == "Close"

# SPDX-License-Identifier: Apache-2.0
"""KeyStore: virtual API keys, which ``attache keys`` makes, rotates and revokes. The keys themselves are not in it."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from extproc.api import spec as patterns
from extproc.api.authentication import ApiKey, KeyBudgets, KeyRateLimits, Models, Reports, check_key_limits
from extproc.api.gateway_config import GatewayConfig
from extproc.api.spec import DirectoryObject, Name, NonEmpty, Spec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.api.config_errors import Finding, Path
    from extproc.api.gateway_config import GatewayConfigSpec
    from extproc.api.yaml_documents import DirectoryObjects

Digest = Annotated[str, msgspec.Meta(pattern=patterns.SHA256)]
When = Annotated[datetime, msgspec.Meta(tz=True)]
# In a configuration directory, and in the data of a Secret.
KEYS_FILE: Final = "keys.json"
MOST_KEYS: Final = 10_000
# A name is in usage and in budgets, so it is not given again. Beyond the bound the oldest is forgotten.
MOST_RETIRED: Final = 20_000


class PreviousKey(Spec, frozen=True):
    """The key before a rotation. ``key_sha256``: its SHA-256. ``until``: from then on it is refused."""

    key_sha256: Digest = msgspec.field(name="keySHA256")
    until: When


class VirtualKey(Spec, frozen=True):
    """A key that ``attache keys`` has made.

    ``id``: never changes. ``name``: for limits by API key, for usage and for people; no other key ever gets it.
    ``tenant``, ``user``: its owner. ``key_sha256``: the SHA-256 of the key. ``previous``: the one before, while both
    are valid. ``created_at``: when it was made. ``rotated_at``: when it was rotated last. ``models``, ``rate_limits``,
    ``budgets``, ``reports``: as of ``apiKeys``. ``expires_at``: from then on it is refused. ``revoked_at``: since when
    it is refused.
    """

    id: Annotated[str, msgspec.Meta(pattern=patterns.KEY_ID)]
    name: Name
    tenant: NonEmpty
    key_sha256: Digest = msgspec.field(name="keySHA256")
    created_at: When
    user: Annotated[str, msgspec.Meta(max_length=512, pattern=patterns.NO_CONTROL)] = ""
    models: Models = None
    rate_limits: KeyRateLimits = ()
    budgets: KeyBudgets = ()
    reports: Reports = None
    expires_at: When | None = None
    rotated_at: When | None = None
    revoked_at: When | None = None
    previous: PreviousKey | None = None

    @property
    def api_keys(self) -> Iterator[ApiKey]:
        """What Envoy and extproc know of it: one key, two during a rotation, none if it is revoked."""
        if self.revoked_at is not None:
            return
        made = ApiKey(
            name=self.name,
            tenant=self.tenant,
            key_sha256=self.key_sha256,
            expires_at=self.expires_at,
            user=self.user,
            models=self.models,
            id=self.id,
            rate_limits=self.rate_limits,
            budgets=self.budgets,
            reports=self.reports,
        )
        yield made
        if self.previous is not None:
            ends = min(self.previous.until, self.expires_at or self.previous.until)
            yield msgspec.structs.replace(made, key_sha256=self.previous.key_sha256, expires_at=ends)


class KeyStoreSpec(Spec, frozen=True):
    """Virtual keys. ``keys``: what is known of them. ``retired``: names of deleted keys, the oldest first.
    ``cache_secret``: the key of cache salts, if the GatewayConfig has none: a new key must not cool the caches of its
    tenant.
    """

    keys: Annotated[tuple[VirtualKey, ...], msgspec.Meta(max_length=MOST_KEYS)] = ()
    retired: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MOST_RETIRED)] = ()
    cache_secret: Annotated[str, msgspec.Meta(min_length=16, max_length=512)] | None = None


class KeyStore(DirectoryObject, frozen=True, kw_only=True):
    """A KeyStore document."""

    spec: KeyStoreSpec = KeyStoreSpec()


def check_key_store(spec: KeyStoreSpec) -> Iterator[Finding]:
    """Names, ids and digests tell keys apart."""
    names, ids, digests = set(spec.retired), set[str](), set[str]()
    for index, key in enumerate(spec.keys):
        path: Path = ("spec", "keys", index)
        own = [key.key_sha256, *(() if key.previous is None else (key.previous.key_sha256,))]
        for field, values, known in (("name", [key.name], names), ("id", [key.id], ids), ("keySHA256", own, digests)):
            if not known.isdisjoint(values) or len(set(values)) < len(values):
                yield (*path, field), "another key has or had it; let attache keys write this file"
            known.update(values)
        yield from check_key_limits(key.rate_limits, key.budgets, path)


def with_virtual_keys(gateway: GatewayConfigSpec, store: KeyStoreSpec | None) -> GatewayConfigSpec:
    """``gateway`` with the keys of the store, if it has ``virtualKeys``."""
    given = gateway.authentication
    if store is None or given is None or given.virtual_keys is None:
        return gateway
    keys = (*given.api_keys, *(one for key in store.keys for one in key.api_keys))
    return msgspec.structs.replace(
        gateway,
        authentication=msgspec.structs.replace(given, api_keys=keys),
        cache_secret=gateway.cache_secret or store.cache_secret,
    )


def check_against_gateway_keys(store: KeyStore, found: DirectoryObjects) -> Iterator[Finding]:
    """They are used, and none has the name or the digest of a key of the GatewayConfig."""
    given = next((gateway.spec.authentication for _, gateway in found.of_type(GatewayConfig)), None)
    if given is None or given.virtual_keys is None:
        # a mistake in the GatewayConfig is told by itself
        is_unread = not found.of_type(GatewayConfig) and bool(found.unread.files)
        if store.spec.keys and not is_unread:
            message = "are used by nobody; write authentication: {virtualKeys: {}} in the GatewayConfig, or remove them"
            yield ("spec", "keys"), message
        return
    names, digests = {one.name for one in given.api_keys}, {one.digest for one in given.api_keys}
    for index, key in enumerate(store.spec.keys):
        path: Path = ("spec", "keys", index)
        if key.name in names:
            yield (*path, "name"), f"apiKeys of the GatewayConfig have a '{key.name}', too; rename that one"
        if key.revoked_at is None and key.key_sha256 in digests:
            yield (*path, "keySHA256"), "apiKeys of the GatewayConfig have this key, too; remove that one"


def to_json_fields(value: object) -> Any:  # noqa: ANN401 - plain data of any shape
    """A struct as JSON has it, without what is absent or empty."""
    return _without_empty(msgspec.to_builtins(value, enc_hook=str))


def _without_empty(value: Any) -> Any:  # noqa: ANN401 - plain data of any shape
    if isinstance(value, dict):
        return {name: _without_empty(one) for name, one in value.items() if one not in (None, "", [], ())}
    return [_without_empty(one) for one in value] if isinstance(value, (list, tuple)) else value

# SPDX-License-Identifier: Apache-2.0
"""Virtual keys in a Secret of a cluster. Its version keeps two writers from overwriting each other."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from typing import TYPE_CHECKING, Final

import msgspec

from controller.keys.api_key_changes import KeyRefused
from controller.keys.api_key_store import read_store, to_document
from controller.kube.api_resources import SECRETS, split_key
from controller.kube.client import connect
from controller.kube.errors import ClusterError, Conflict
from extproc.api.key_store import KEYS_FILE, KeyStoreSpec, VirtualKey

if TYPE_CHECKING:
    from collections.abc import Collection

    from controller.keys.api_key_store import AuditLine, KeyChange
    from controller.kube.api_resources import Object
    from controller.kube.client import Client
    from controller.kube.cluster_access import ClusterAccess

# What the API server takes of a Secret, less its metadata.
MOST_BYTES: Final = 1_000_000
_TRIES: Final = 10
_MANAGER: Final = "attache-keys"
log = logging.getLogger("attache.keys.audit")


class KeyStoreSecret:
    """The data ``keys.json`` of a Secret, ``namespace/name``. A KeyPlace. The audit is the log."""

    def __init__(self, access: ClusterAccess, key: str) -> None:
        self._access = access
        self._key = key

    def read(self) -> KeyStoreSpec:
        """All keys of the Secret; none if there is none yet."""
        return asyncio.run(self._read())

    def names_in_use(self) -> Collection[str]:
        """None: the gateway reports names that its GatewayConfig has, too."""
        return ()

    def why_unused(self) -> str:
        """Empty: the GatewayConfig's conditions report it."""
        return ""

    def apply_change(self, change: KeyChange, line: AuditLine) -> VirtualKey:
        """Write the Secret; the change is made again from what is there if somebody else has written."""
        return asyncio.run(self._change(change, line))

    async def _read(self) -> KeyStoreSpec:
        try:
            async with connect(self._access, manager=_MANAGER) as client:
                return self._store_of(await self._find(client))
        except ClusterError as error:
            raise self._away(error) from None

    async def _change(self, change: KeyChange, line: AuditLine) -> VirtualKey:
        try:
            async with connect(self._access, manager=_MANAGER) as client:
                for _ in range(_TRIES):
                    found = await self._find(client)
                    before = self._store_of(found)
                    after, key = change(before)
                    if after == before:
                        return key
                    try:
                        await self._write(client, found, after)
                    except Conflict:
                        continue
                    log.info("%s", msgspec.json.encode(line.with_key(key)).decode())
                    return key
        except ClusterError as error:
            raise self._away(error) from None
        raise KeyRefused(f"others keep changing the Secret {self._key}; try again", 503)

    async def _find(self, client: Client) -> Object | None:
        namespace, name = split_key(self._key)
        return await client.get_or_none(SECRETS, name, namespace)

    async def _write(self, client: Client, found: Object | None, store: KeyStoreSpec) -> None:
        """Raises Conflict if it is not ``found`` any more."""
        content = to_document(store, indent=-1)
        if len(content) > MOST_BYTES:
            raise KeyRefused(f"the Secret {self._key} would have more than {MOST_BYTES} bytes; delete keys", 409)
        data = {KEYS_FILE: base64.b64encode(content).decode()}
        if found is not None:
            await client.replace(SECRETS, {**found, "data": {**(found.get("data") or {}), **data}})
            return
        namespace, name = split_key(self._key)
        metadata = {"namespace": namespace, "name": name}
        await client.create(SECRETS, {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})

    def _store_of(self, found: Object | None) -> KeyStoreSpec:
        """Raises KeyRefused."""
        text = None if found is None else (found.get("data") or {}).get(KEYS_FILE)
        if text is None:
            return KeyStoreSpec()
        try:
            content = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            content = b""
        return read_store(content, f"{KEYS_FILE} of the Secret {self._key}")

    def _away(self, error: ClusterError) -> KeyRefused:
        return KeyRefused(f"the Secret {self._key} cannot be read or written: {error}", 503)

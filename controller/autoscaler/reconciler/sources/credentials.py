# SPDX-License-Identifier: Apache-2.0
"""Credentials for Prometheus out of Secrets: of the policy's namespace alone, and read anew every now and then."""

from __future__ import annotations

import base64
import binascii
import ssl
from typing import TYPE_CHECKING, Any

import msgspec

from controller.autoscaler.reconciler.sources.latest import Latest
from controller.kube.access import Access
from controller.kube.errors import AccessInvalid, ClusterError, Forbidden, NotFound
from controller.kube.resources import SECRETS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controller.kube.client import Client


class Credentials(msgspec.Struct, frozen=True):
    """``problem``: why there are none. ``tls``: None for the machine's authorities, without a client certificate."""

    headers: dict[str, str] = {}
    tls: ssl.SSLContext | None = None
    problem: str = ""
    version: str = ""

    def __repr__(self) -> str:
        return f"Credentials({self.version!r})"  # never a credential in a log


class SecretCredentials:
    """``every_s``: how often a Secret in use is read."""

    def __init__(self, client: Client, every_s: float) -> None:
        self._client = client
        self._every_s = every_s
        self._latest = Latest[tuple[str, str], Credentials]()
        self._known: dict[tuple[str, str], Credentials] = {}

    async def of(self, namespace: str, name: str) -> Credentials:
        """Never raises: ``problem`` says what is wrong."""
        key = namespace, name
        found = await self._latest.get(key, lambda: self._read(key), self._every_s)
        return found or Credentials(problem=f"the Secret {name} is not read yet")

    async def close(self) -> None:
        """Ends what is under way, and forgets all of them."""
        await self._latest.close()
        self._known.clear()

    async def _read(self, key: tuple[str, str]) -> Credentials:
        namespace, name = key
        before = self._known.get(key)
        try:
            secret = await self._client.get(SECRETS, name, namespace)
        except NotFound:
            return self._keep(key, Credentials(problem=f"there is no Secret {namespace}/{name}"))
        except Forbidden:
            said = (
                f"the manager may not read the Secret {namespace}/{name}; a Role must let it get this one by its name"
            )
            return self._keep(key, Credentials(problem=said))
        except ClusterError as error:
            return before or Credentials(problem=f"the Secret {namespace}/{name} cannot be read now: {error}")
        version = str(secret["metadata"].get("resourceVersion", ""))
        if before is not None and before.version == version and version:
            return before
        return self._keep(key, credentials_of(secret.get("data") or {}, f"{namespace}/{name}", version))

    def _keep(self, key: tuple[str, str], found: Credentials) -> Credentials:
        self._known[key] = found
        return found


def credentials_of(data: Mapping[str, Any], name: str, version: str) -> Credentials:
    """From the data of a Secret."""
    try:
        texts = {one: base64.b64decode(data.get(one) or "", validate=True).decode().strip() for one in _KEYS}
    except (binascii.Error, UnicodeDecodeError, TypeError):
        return Credentials(problem=f"the Secret {name} is not readable text", version=version)
    if not any(texts.values()):
        return Credentials(problem=f"the Secret {name} has none of {', '.join(_KEYS)}", version=version)
    if bool(texts["tls.crt"]) != bool(texts["tls.key"]):
        return Credentials(problem=f"the Secret {name} needs tls.crt and tls.key together", version=version)
    if any(ord(one) < 32 or ord(one) > 126 for one in texts["token"]):  # a line break would begin another header
        return Credentials(problem=f"the token in the Secret {name} is not one line of plain text", version=version)
    # the scheme alone matters
    access = Access(
        "https://prometheus",
        ca=texts["ca.crt"],
        token=texts["token"],
        certificate=texts["tls.crt"],
        key=texts["tls.key"],
    )
    try:
        return Credentials(access.headers(), access.tls(), version=version)
    except AccessInvalid:
        return Credentials(problem=f"the certificates in the Secret {name} cannot be used", version=version)


_KEYS = ("token", "ca.crt", "tls.crt", "tls.key")

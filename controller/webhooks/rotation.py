# SPDX-License-Identifier: Apache-2.0
"""Keeps certificates fresh: one Secret for all replicas, and the authorities in the webhook configuration.

Every replica does the same: it renews what is old, unless another was first, and takes what the Secret has.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from controller.kube.errors import ClusterError, Conflict, NotFound
from controller.kube.resources import SECRETS, Resource
from controller.webhooks.material import Lifetimes, Material, from_secret, renewed, to_secret

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from controller.kube.client import Client
    from controller.webhooks.material import Pair

log = logging.getLogger(__name__)

WEBHOOK_CONFIGURATIONS: Final = Resource(
    "admissionregistration.k8s.io",
    "v1",
    "validatingwebhookconfigurations",
    "ValidatingWebhookConfiguration",
    namespaced=False,
)


API_SERVICES: Final = Resource("apiregistration.k8s.io", "v1", "apiservices", "APIService", namespaced=False)


class Shows(Protocol):
    """A server that shows the certificate."""

    def use(self, pair: Pair, /) -> None:
        """From now on; raises OSError."""
        ...


class RotationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``namespace`` and ``secret``: of the Secret. ``configuration``: name of the ValidatingWebhookConfiguration.
    ``names``: by which API servers call the server. ``every_s``: how often to look. ``api_service``: the APIService
    that stands for us, which gets the authorities, too; empty: none does.
    """

    namespace: str
    secret: str
    configuration: str
    names: tuple[str, ...]
    lifetimes: Lifetimes = Lifetimes()
    every_s: float = 30.0
    api_service: str = ""


class Rotation:
    """``run`` does all of it; ``ready`` is set once there is a certificate. ``material``: what is in use."""

    def __init__(
        self, client: Client, settings: RotationSettings, servers: Sequence[Shows], clock: Callable[[], datetime]
    ) -> None:
        self._client = client
        self._settings = settings
        self._servers = servers
        self._clock = clock
        self.ready = asyncio.Event()
        self.material: Material | None = None

    async def run(self) -> None:
        """Until cancelled. What fails is tried again; meanwhile the last certificate is shown."""
        while True:
            try:
                await self.look()
            except Conflict:
                continue  # another replica was first: take what it wrote
            except (ClusterError, OSError) as error:
                log.warning("certificates could not be looked after, tried again: %s", error)
            await asyncio.sleep(self._settings.every_s if self.ready.is_set() else 1.0)

    async def look(self) -> None:
        """Renew, publish, use; in this order, so that what is shown is trusted. Raises ClusterError."""
        settings = self._settings
        secret = await self._client.get(SECRETS, settings.secret, settings.namespace)
        known = from_secret(secret.get("data") or {})
        material = renewed(known, settings.names, self._clock(), settings.lifetimes)
        if material != known:
            await self._client.replace(SECRETS, {**secret, "data": to_secret(material)})
            log.info("certificates renewed: the server's ends at %s", material.server.ends_at.isoformat())
        await self._publish(material)
        if settings.api_service:
            await self._publish_api(settings.api_service, material)
        for server in self._servers:
            server.use(material.server)
        self.material = material
        self.ready.set()

    async def _publish(self, material: Material) -> None:
        """Write the authorities into every webhook of the configuration, if they are not there."""
        name = self._settings.configuration
        try:
            found = await self._client.get(WEBHOOK_CONFIGURATIONS, name)
        except NotFound:
            log.warning("there is no ValidatingWebhookConfiguration %s: nobody asks this server", name)
            return
        trusted = base64.b64encode(material.trusted.encode()).decode()
        webhooks: list[dict[str, Any]] = found.get("webhooks") or []
        if all(one["clientConfig"].get("caBundle") == trusted for one in webhooks):
            return
        patched = [{"name": one["name"], "clientConfig": {"caBundle": trusted}} for one in webhooks]
        applied = {
            "apiVersion": WEBHOOK_CONFIGURATIONS.api_version,
            "kind": WEBHOOK_CONFIGURATIONS.kind,
            "metadata": {"name": name},
            "webhooks": patched,
        }
        await self._client.apply(WEBHOOK_CONFIGURATIONS, applied, force=True)
        log.info("the authorities of the certificates are in ValidatingWebhookConfiguration %s", name)

    async def _publish_api(self, name: str, material: Material) -> None:
        """Write the authorities into the APIService, if they are not there."""
        found = await self._client.find(API_SERVICES, name)
        if found is None:
            log.warning("there is no APIService %s: nobody asks for external metrics", name)
            return
        trusted = base64.b64encode(material.trusted.encode()).decode()
        if found["spec"].get("caBundle") != trusted:
            await self._client.merge_patch(API_SERVICES, name, None, {"spec": {"caBundle": trusted}})
            log.info("the authorities of the certificates are in APIService %s", name)

# SPDX-License-Identifier: Apache-2.0
"""The admission webhooks of the manager role, which every replica serves."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import ssl
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from controller.gateway.compile.model_servers import LABEL
from controller.kube.api_resources import (
    AUTOSCALING_POLICIES,
    AUTOSCALING_POLICY_BINDINGS,
    CONFIG_MAPS,
    GATEWAY_CONFIGS,
    MODEL_ROUTES,
    MODEL_SERVERS,
)
from controller.kube.informer import Informer, InformerTiming, Selection
from controller.webhooks.admission.checks import (
    AdmissionVerdict,
    admission_response,
    kind_metric_label,
    read_review,
    review_object,
)
from controller.webhooks.certificates import PATH, CertificateRotation, RotationSettings, utc_now
from extproc.api.addresses import parse_address
from extproc.page_server import PageServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from datetime import datetime

    from controller.kube.client import Client
    from controller.kube.manager_metrics import ManagerMetrics
    from controller.webhooks.admission.checks import AdmissionRequest
    from controller.webhooks.certificates import CertificateConsumer, KeyPair
    from extproc.api.picker_config import PickerConfigChecker

log = logging.getLogger(__name__)
# Two objects of 1.5 MiB, the most that etcd takes, and some room.
_MAX_BYTES: Final = 8 * 1024 * 1024


class ServerTls:
    """A TLS context; ``use`` replaces its certificate for later handshakes."""

    def __init__(self) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.in_use: KeyPair | None = None

    def set_certificate(self, pair: KeyPair) -> None:
        """Raises OSError. The library reads certificates from files alone: they are gone when this returns."""
        if pair == self.in_use:
            return
        with tempfile.TemporaryDirectory(prefix="attache-") as folder:
            certificate, key = Path(folder) / "tls.crt", Path(folder) / "tls.key"
            certificate.write_text(pair.certificate)
            key.touch(mode=0o600)
            key.write_text(pair.key)
            self.context.load_cert_chain(certificate, key)
        self.in_use = pair


@contextlib.asynccontextmanager
async def serve_webhooks(
    address: str,
    tls: ServerTls,
    judge: Callable[[AdmissionRequest], AdmissionVerdict],
    count: Callable[[str, str], None],
    path: Callable[[], str],
) -> AsyncIterator[None]:
    """Listen on ``address`` inside the context; raises OSError if it is taken. ``count`` gets each kind and outcome.
    ``path``: the end of the path that only API servers know. Whoever does not know it is answered 404: verdicts name
    objects of all namespaces.

    An object on which our own code fails is admitted: its conditions report the same mistakes.
    """

    async def validate(request: web.Request) -> web.Response:
        if not hmac.compare_digest(request.match_info["end"].encode(), path().encode()):
            count("", "stranger")
            raise web.HTTPNotFound
        try:
            review = read_review(await request.read())
        except (msgspec.DecodeError, RecursionError) as error:
            count("", "unread")
            return web.Response(status=400, text=f"no AdmissionReview: {error}\n")
        try:
            verdict = judge(review)
            count(review.kind.kind, "refused" if verdict.refused else "warned" if verdict.warnings else "accepted")
        except Exception:
            log.exception("%s %s could not be checked, and is taken; please report this", review.kind.kind, review.key)
            count(review.kind.kind, "failed")
            verdict = AdmissionVerdict()
        return web.Response(body=admission_response(review, verdict), content_type="application/json")

    app = web.Application(client_max_size=_MAX_BYTES)
    app.add_routes([web.post(f"{PATH}/{{end}}", validate)])
    runner = PageServer(app)
    await runner.setup()
    try:
        await runner.listen(parse_address(address), tls.context)
        yield
    finally:
        await runner.cleanup()


class WebhookSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``listen``: where the webhooks are served. ``rotation``: of their certificates."""

    listen: str
    rotation: RotationSettings


class WebhookServer:
    """``run`` serves; ``ready`` is set once requests are answered. A reference to an object not yet listed causes only
    a warning. ``others``: servers with the same certificate.
    """

    def __init__(
        self,
        client: Client,
        settings: WebhookSettings,
        metrics: ManagerMetrics,
        *,
        check_picker: PickerConfigChecker,
        clock: Callable[[], datetime] = utc_now,
        timing: InformerTiming = InformerTiming(),  # noqa: B008 - frozen
        others: Sequence[CertificateConsumer] = (),
    ) -> None:
        resources = (
            GATEWAY_CONFIGS,
            MODEL_ROUTES,
            MODEL_SERVERS,
            AUTOSCALING_POLICIES,
            AUTOSCALING_POLICY_BINDINGS,
        )
        informers = [Informer(client, one, timing=timing) for one in resources]
        informers.append(Informer(client, CONFIG_MAPS, Selection(labels=LABEL), timing=timing))
        self._informers: Mapping[str, Informer] = {one.resource.kind: one for one in informers}
        self._tls = ServerTls()
        self._rotation = CertificateRotation(client, settings.rotation, [self._tls, *others], clock)
        self._settings = settings
        self._metrics = metrics
        self._check_picker = check_picker
        self.ready = asyncio.Event()

    async def run(self) -> None:
        """Serve until cancelled; raises OSError if the address is taken."""
        async with asyncio.TaskGroup() as tasks:
            for kind, informer in self._informers.items():
                tasks.create_task(informer.run(), name=f"informer of {kind}")
            tasks.create_task(self._rotation.run(), name="certificates")
            tasks.create_task(self._serve(), name="webhooks")

    async def _serve(self) -> None:
        await self._rotation.ready.wait()
        self._metrics.certificate_ends_at_s.set_function(self._ends_at_s)
        for informer in self._informers.values():
            await informer.synced.wait()
        async with serve_webhooks(self._settings.listen, self._tls, self._judge, self._count, self._path):
            self.ready.set()
            await asyncio.Event().wait()

    def _judge(self, review: AdmissionRequest) -> AdmissionVerdict:
        known = {kind: informer.objects for kind, informer in self._informers.items()}
        return review_object(review, known, self._check_picker)

    def _path(self) -> str:
        """A replica that has none yet answers nobody."""
        material = self._rotation.material
        return secrets.token_urlsafe() if material is None else material.path

    def _count(self, kind: str, outcome: str) -> None:
        self._metrics.reviews.labels(kind_metric_label(kind), outcome).inc()

    def _ends_at_s(self) -> float:
        material = self._rotation.material
        return 0.0 if material is None else material.server.ends_at.timestamp()

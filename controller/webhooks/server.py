# SPDX-License-Identifier: Apache-2.0
"""The HTTPS server that API servers ask; its certificate can be replaced while it runs."""

from __future__ import annotations

import contextlib
import logging
import ssl
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

from controller.webhooks.admission.reviews import Verdict, answer, read_review
from extproc.api.addresses import parse_address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from controller.webhooks.admission.reviews import Review
    from controller.webhooks.material import Pair

log = logging.getLogger(__name__)

PATH: Final = "/validate"
# Two objects of 1.5 MiB, the most that etcd takes, and some room.
_MAX_BYTES: Final = 8 * 1024 * 1024


class ServerTls:
    """A TLS context whose certificate is replaced by ``use``: handshakes from then on show the new one."""

    def __init__(self) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.in_use: Pair | None = None

    def use(self, pair: Pair) -> None:
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
async def serving(
    address: str, tls: ServerTls, judge: Callable[[Review], Verdict], count: Callable[[str, str], None]
) -> AsyncIterator[None]:
    """Listen on ``address`` inside the context; raises OSError if it is taken. ``count`` gets each kind and outcome.

    An object over which our own code fails is taken: conditions say the same as these checks.
    """

    async def validate(request: web.Request) -> web.Response:
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
            verdict = Verdict()
        return web.Response(body=answer(review, verdict), content_type="application/json")

    app = web.Application(client_max_size=_MAX_BYTES)
    app.add_routes([web.post(PATH, validate)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, *parse_address(address), ssl_context=tls.context).start()
        yield
    finally:
        await runner.cleanup()

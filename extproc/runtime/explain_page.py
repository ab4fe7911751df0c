# SPDX-License-Identifier: Apache-2.0
"""``POST /debug/explain/v1/chat/completions`` with a request's headers and body: what would be decided now, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from extproc.core.types import BUNDLE, Attachment, Head
from extproc.errors import Refusal, to_openai_body

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from extproc.core.core import Core
    from extproc.core.types import Arrival
    from extproc.streams.context import GatewayOptions


class ExplainPage:
    """Reads what the running process knows, and changes nothing."""

    def __init__(
        self,
        core: Core,
        tokens_of: Callable[[Arrival], Awaitable[Sequence[int] | None]],
        clock: Callable[[], float],
        gateway: GatewayOptions,
    ) -> None:
        """``gateway``: the options of the process, which say how requests reach it."""
        self._core = core
        self._tokens_of = tokens_of
        self._clock = clock
        self._gateway = gateway

    async def show(self, http: web.Request) -> web.Response:
        """The explanation as JSON, or the refusal that the client would get."""
        headers = {name.lower(): value for name, value in http.headers.items()}
        # for trusted networks only: whoever asks here is the operator
        head = Head("POST", "/" + http.match_info["path"], headers, has_body=True, is_trusted=True)
        head = msgspec.structs.replace(head, listener=http.query.get("listener", ""))
        try:
            arrival, attachment = self._arrival(http, head, await http.read())
            tokens = await self._tokens_of(arrival) if arrival.wants_tokens else None
            explanation = self._core.explain(arrival, self._clock(), tokens=tokens, attachment=attachment)
        except Refusal as refusal:
            return web.Response(status=refusal.status, body=to_openai_body(refusal), content_type="application/json")
        return web.Response(body=msgspec.json.encode(explanation), content_type="application/json")

    def _arrival(self, http: web.Request, head: Head, body: bytes) -> tuple[Arrival, Attachment]:
        """The request as the process would get it: of our own bundle, or of a gateway with a pool; raises a Refusal."""
        intake, server = self._core.intake, http.query.get("server", "")
        pool = http.query.get("pool", "") or self._gateway.pool
        if server or not pool:
            return intake.take(head, body, server), BUNDLE
        return intake.receive_pooled(pool, head, body), Attachment(choices=self._gateway.duplex_choices)

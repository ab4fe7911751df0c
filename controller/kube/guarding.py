# SPDX-License-Identifier: Apache-2.0
"""Lets only those see a role's pages who may ``get`` them: 401 without a token, 403 without the right."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from aiohttp import web

from controller.kube.callers import Callers, Page
from controller.kube.errors import ClusterError

if TYPE_CHECKING:
    from aiohttp.typedefs import Handler, Middleware

log = logging.getLogger(__name__)

# Probes have no token.
_OPEN: Final = ("/healthz", "/readyz")


def guarded_by(callers: Callers) -> Middleware:
    """For all paths but those of probes."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in _OPEN:
            return await handler(request)
        try:
            user = await callers.user_of(request.headers.get("authorization", ""))
            if user is None:
                return web.Response(status=401, text="a token is needed\n", headers={"www-authenticate": "Bearer"})
            if not await callers.may(user, Page(request.method.lower(), request.path)):
                return web.Response(status=403, text=f"{user.name} may not {request.method} {request.path}\n")
        except ClusterError as error:
            log.warning("nobody can be let in to %s: %s", request.path, error)
            return web.Response(status=503, text="the API server cannot be asked who may see this\n")
        return await handler(request)

    return guard

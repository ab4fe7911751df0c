# SPDX-License-Identifier: Apache-2.0
"""The manager's pages about scaling: /decisions, and /decisions/NAMESPACE/NAME with the last ones of a binding."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

import msgspec
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from controller.autoscaler.reconciler.records import Records

DECISIONS_PATH: Final = "/decisions"
_MOST: Final = 100


def routes(records: Records, leads: Callable[[], bool]) -> Sequence[web.RouteDef]:
    """``leads``: whether this replica makes decisions at all."""

    def elsewhere() -> web.Response:
        return web.Response(status=503, text="this replica does not lead; ask the one that the Lease names\n")

    async def overview(_: web.Request) -> web.Response:
        if not leads():
            return elsewhere()
        found = [
            {"binding": key, "at": one.decision.at_s, "mode": one.decision.mode, "targets": one.decision.targets}
            for key, one in sorted(records.latest().items())
        ]
        return web.Response(body=msgspec.json.encode({"bindings": found}), content_type="application/json")

    async def of_one(request: web.Request) -> web.Response:
        if not leads():
            return elsewhere()
        key = f"{request.match_info['namespace']}/{request.match_info['name']}"
        last = request.query.get("last", "")
        most = max(1, min(_MOST, int(last))) if last.isdecimal() and len(last) < 6 else _MOST
        found = list(itertools.islice(records.of(key), most))
        if not found:
            return web.Response(status=404, text=f"nothing was decided about an AutoscalingPolicyBinding {key} yet\n")
        body = b'{"decisions":[' + b",".join(found) + b"]}"
        return web.Response(body=body, content_type="application/json")

    return [web.get(DECISIONS_PATH, overview), web.get(DECISIONS_PATH + "/{namespace}/{name}", of_one)]

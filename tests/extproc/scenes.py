# SPDX-License-Identifier: Apache-2.0
"""Where tests of the core begin: a configuration of ModelServers and ModelRoutes, a core over it, and its requests."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import yaml

from extproc.api.config_loader import load_snapshot
from extproc.core.core import Core
from extproc.core.effects import Decision, RequestHeld, RequestRefused
from extproc.core.request_record import RequestHead

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from extproc.api.config_snapshot import Snapshot
    from extproc.core.effects import Effect, RequestEffect
    from extproc.core.request_record import Arrival

CHAT: Final = "/v1/chat/completions"
ONE_AT_A_TIME: Final = "saturation: {queueDepth: null, kvUsage: null, maxWait: null, maxRequests: 1}"


def endpoints(*addresses: str) -> str:
    """A ModelServer's field."""
    return f"endpoints: {json.dumps([{'address': one} for one in addresses])}\n"


def configuration(*, servers: Mapping[str, str], routes: Mapping[str, str] | None = None, others: str = "") -> Snapshot:
    """``servers``, ``routes``: what their specs have beyond the usual, as YAML, by name. ``others``: whole objects.

    Usually a server's model is m, and there is one route, chat, that sends m to the first server.
    """
    return _loaded(tuple(servers.items()), tuple(({"chat": ""} if routes is None else routes).items()), others)


@cache
def _loaded(servers: tuple[tuple[str, str], ...], routes: tuple[tuple[str, str], ...], others: str) -> Snapshot:
    rules = [{"targetModels": [{"modelServerName": servers[0][0]}]}]
    texts = [_object("ModelServer", name, {"model": "m"}, spec) for name, spec in servers]
    texts += [_object("ModelRoute", name, {"modelName": "m", "rules": rules}, spec) for name, spec in routes]
    return load_snapshot({"all.yaml": "\n---\n".join([*texts, others]).encode()})


def _object(kind: str, name: str, usual: dict[str, Any], spec: str) -> str:
    fields = {**usual, **(yaml.safe_load(spec) or {})}
    return json.dumps({"apiVersion": "attache.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": fields})


def core_of(*, servers: Mapping[str, str], routes: Mapping[str, str] | None = None) -> Core:
    """Over this ``configuration``."""
    return Core(configuration(servers=servers, routes=routes), rng=random.Random(0), ticket_prefix="t")


def request(
    core: Core,
    content: str = "hi",
    *,
    model: str = "m",
    path: str = CHAT,
    headers: Mapping[str, str] | None = None,
    **fields: object,
) -> Arrival:
    """One message to ``model``. ``headers``: a gateway in front of us that is trusted has set them."""
    head = RequestHead("POST", path, headers or {}, has_body=True, is_trusted=headers is not None)
    body = {"model": model, "messages": [{"role": "user", "content": content}], **fields}
    return core.builder.build_by_model(head, json.dumps(body).encode())


def ends(effects: Iterable[Effect]) -> list[Decision | RequestRefused]:
    """The waits that end."""
    return [one for one in effects if isinstance(one, Decision | RequestRefused)]


class Scene:
    """A core and its clients, with the time passed in. ``fields``: of the requests' bodies, beyond the usual ones."""

    def __init__(self, core: Core, **fields: object) -> None:
        self.core = core
        self.fields = fields

    def enter(self, tenant: str = "acme", now: float = 0.0) -> RequestEffect:
        """Raises what its client would be told."""
        arrival = request(self.core, "hi " * 200, headers={"x-attache-tenant": tenant}, **self.fields)
        own, _ = self.core.arrive(arrival, now)
        if isinstance(own, RequestRefused):
            raise own.refusal
        return own

    def held(self, tenant: str = "acme", now: float = 0.0) -> str:
        """Its ticket."""
        found = self.enter(tenant, now)
        assert isinstance(found, RequestHeld)
        return found.ticket

    def sent(self, tenant: str = "acme", now: float = 0.0) -> Decision:
        """What was decided at once."""
        found = self.enter(tenant, now)
        assert isinstance(found, Decision)
        return found

    def release(self, now: float) -> list[Decision | RequestRefused]:
        """The waits that end as the time comes."""
        return ends(self.core.tick(now))

    def level(self, limit: str, tenant: str = "acme") -> float:
        """What is left of a limit of the route's: ``requests``, ``output_tokens``."""
        return float(self.core.admission.limits._buckets[f"default/chat/0/{limit}/{tenant}"].level)

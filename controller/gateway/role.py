# SPDX-License-Identifier: Apache-2.0
"""The gateway role: a cluster's objects to the files of extproc and Envoy.

A change takes less than a second.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.compiler import Compiler
from controller.gateway.compile.gateway_api.settings import GatewayApiSettings
from controller.gateway.compile.programmed import Follower, is_settled, with_use
from controller.gateway.directory import DirectoryWriter
from controller.gateway.in_use import InUse
from controller.gateway.pointed import POINTED_KINDS, PointedObjects
from controller.gateway.watched import Watched
from controller.kube.informer import InformerTiming
from controller.kube.status_writer import StatusWriter
from extproc.api.picker_config import check_shape_alone
from extproc.api.status_pages import ConfigReport, content_digest

if TYPE_CHECKING:
    from collections.abc import Collection

    from controller.gateway.compile.compiler import Outcome
    from controller.gateway.metrics import GatewayMetrics
    from controller.kube.client import Client
    from controller.kube.lease import LeaderElection
    from controller.kube.resources import Object
    from extproc.api.picker_config import PickerCheck

log = logging.getLogger(__name__)

# Changes that come together, such as a rollout's pods, are compiled together.
_TOGETHER_S: Final = 0.03
_RETRY_S: Final = 1.0
# The longest wait for Secrets and ConfigMaps that are pointed to for the first time.
_POINTED_S: Final = 5.0
CONTROLLER: Final = "attache-gateway"


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """``config``: the directory to write. ``namespace``: whose objects are served; None: all namespaces'.
    ``gateway_config``: the GatewayConfig to serve, as ``namespace/name``; None: that of the Gateways, or else the
    defaults. ``gateway_api``: which Gateways are served, and where. ``followers``: addresses, by name, where those who
    use the directory say what of it they use. ``look_again_s``: how often kinds are looked for that the cluster lacks.
    """

    config: Path
    namespace: str | None = None
    gateway_config: str | None = None
    gateway_api: GatewayApiSettings = GatewayApiSettings()
    followers: Mapping[str, str] = {}
    look_again_s: float = 30.0


class GatewayRole:
    """``run`` does all of it; ``ready`` is set once the directory has been written.

    What is served depends on the directory alone: when the API server is away, or this role is, requests go on.
    """

    def __init__(
        self,
        client: Client,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        *,
        election: LeaderElection,
        check_picker: PickerCheck = check_shape_alone,
        timing: InformerTiming = InformerTiming(),  # noqa: B008 - frozen
    ) -> None:
        self._watched = Watched(
            client,
            Watched.by_a_gateway(client, settings.namespace, timing),
            optional=Watched.OPTIONAL,
            look_again_s=settings.look_again_s,
        )
        self._pointed = PointedObjects(client, timing, self._watched.note)
        self._compiler = Compiler(settings.gateway_config, settings.gateway_api, check_picker=check_picker)
        self._writer = DirectoryWriter(settings.config)
        self._statuses = StatusWriter(client, self._watched.get, CONTROLLER)
        self._election = election
        self._metrics = metrics
        self._in_use = InUse(settings.followers, self._say)
        self._refused = ""
        self._outcome: Outcome | None = None
        # of what is in the directory, and of what should be
        self._published: Mapping[str, str] = {}
        self._digests: Mapping[str, str] = {}
        self.ready = asyncio.Event()

    @property
    def status_writes(self) -> int:
        """Statuses written so far."""
        return self._statuses.writes

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watched.run(), name="informers")
            tasks.create_task(self._pointed.run(), name="informers of what is pointed to")
            tasks.create_task(self._follow(), name="compile and write")
            tasks.create_task(self._in_use.run(), name="what is in use")
            tasks.create_task(self._election.run(self._statuses.run), name="statuses")

    async def _follow(self) -> None:
        await self._watched.synced()
        is_written = True
        while True:
            # what has changed in the meantime may be what makes the next attempt succeed
            changed = await self._watched.changes(_TOGETHER_S) if is_written else self._watched.take_changes()
            outcome = self._compile(changed)
            # without its certificates a listener would be taken away and come back
            while await self._pointed.follow(outcome.pointers, _POINTED_S):
                outcome = self._compile(self._watched.take_changes())
            self._digests = {name: content_digest(content) for name, content in outcome.files.items()}
            is_written = await self._publish(outcome)
            if is_written:
                self._outcome = outcome
                self._say()
            else:
                await asyncio.sleep(_RETRY_S)

    def _compile(self, changed: Collection[tuple[str, str]]) -> Outcome:
        for kind, key in changed:
            self._compiler.put(kind, key, self._object(kind, key))
            self._statuses.look_at((kind, key))
        began_s = time.perf_counter()
        outcome = self._compiler.compile()
        self._metrics.compiled(len(changed), time.perf_counter() - began_s)
        return outcome

    def _object(self, kind: str, key: str) -> Object | None:
        return self._pointed.get(kind, key) if kind in POINTED_KINDS else self._watched.get(kind, key)

    def _say(self) -> None:
        """What objects' statuses should be by now."""
        if self._outcome is None:
            return
        refused = f"{self._refused}; until that is corrected nothing changes" if self._refused else ""
        directory = ConfigReport(files=self._published, refused=refused)
        followers = [Follower("the gateway role", directory, is_writer=True), *self._in_use.followers]
        wanted = {
            key: with_use(one, self._status(*key), self._digests, followers)
            for key, one in self._outcome.statuses.items()
        }
        self._in_use.is_settled = is_settled(wanted.values())
        self._statuses.want(wanted)

    def _status(self, kind: str, key: str) -> Mapping[str, Any]:
        thing = self._watched.get(kind, key)
        return {} if thing is None else thing.get("status") or {}

    async def _publish(self, outcome: Outcome) -> bool:
        """Write the outcome, unless it must not be served; whether nothing remains to be tried again."""
        if outcome.refused != self._refused:
            self._refused = outcome.refused
            self._metrics.refused.set(bool(outcome.refused))
            if outcome.refused:
                log.error("nothing is changed, and what is served stays: %s", outcome.refused)
        if outcome.refused:
            return True
        try:
            done = await asyncio.to_thread(self._writer.write, outcome.files)
        except OSError as error:
            self._metrics.failures.inc()
            log.error("the directory cannot be written, tried again in %g s: %s", _RETRY_S, error)
            return False
        for name in done.written:
            log.info("wrote %s", name)
        for name in done.removed:
            log.info("removed %s", name)
        self._published = self._digests
        self._in_use.ask_soon()
        self._metrics.published(len(done.written), len(done.removed), len(outcome.files))
        self.ready.set()
        return True

# SPDX-License-Identifier: Apache-2.0
"""The gateway role: a cluster's objects to the files of extproc and Envoy.

A change takes less than a second.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.audit import caused_by, file_recorder
from controller.gateway.compile.compiler import Compiler
from controller.gateway.compile.gateway_api.gateways import GatewayApiSettings
from controller.gateway.compile.programmed_condition import ConfigConsumer, add_programmed_condition, are_statuses_known
from controller.gateway.directory_writer import DirectoryWriter
from controller.gateway.informers import (
    REFERENCED_KINDS,
    GatewayInformers,
    ReferencedObjectInformers,
    gateway_informers,
)
from controller.gateway.statuses import ConsumerReportPoller, StatusWriter
from controller.kube.controller import Controller, ControllerSettings, ReconcileResult, loop_clock_s
from controller.kube.informer import InformerTiming
from extproc.api.addresses import Network
from extproc.api.picker_config import accept_any_plugins
from extproc.api.status_page_contents import ConfigReport, content_digest

if TYPE_CHECKING:
    from controller.gateway.compile.compiler import CompileResult
    from controller.gateway.metrics import GatewayMetrics
    from controller.kube.api_resources import Object
    from controller.kube.client import Client
    from controller.kube.leader_election import LeaderElection
    from extproc.api.picker_config import PickerConfigChecker

log = logging.getLogger(__name__)

# Changes within this time, such as a rollout's pods, are compiled together.
_TOGETHER_S: Final = 0.03
_RETRY_S: Final = 1.0
# The longest wait for Secrets and ConfigMaps that are referred to for the first time.
_REFERENCED_S: Final = 5.0
CONTROLLER: Final = "attache-gateway"
# The only key: everything is compiled together.
DIRECTORY: Final = "directory"


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """``config``: the directory to write. ``namespace``: the one whose objects are served; None: all.
    ``gateway_config``: the GatewayConfig to serve, as ``namespace/name``; None: that of the Gateways, or else the
    defaults. ``gateway_api``: which Gateways are served, and where. ``consumers``: addresses, by name, at which the
    directory's consumers report the files in use. ``probe_s``: seconds between two requests for kinds that the cluster
    lacks. ``grace_s``: how long ModelRoutes and ModelServers are served after their deletion; 0: not at all.
    ``networks``: those whose addresses ModelServers may list as endpoints; None: all.
    """

    config: Path
    namespace: str | None = None
    gateway_config: str | None = None
    gateway_api: GatewayApiSettings = GatewayApiSettings()
    consumers: Mapping[str, str] = {}
    probe_s: float = 30.0
    grace_s: float = 10.0
    networks: tuple[Network, ...] | None = None


class GatewayRunner:
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
        check_picker: PickerConfigChecker = accept_any_plugins,
        timing: InformerTiming = InformerTiming(),  # noqa: B008 - frozen
    ) -> None:
        controller = Controller[str](
            client,
            self._reconcile,
            settings=ControllerSettings(
                namespace=settings.namespace,
                workers=1,
                coalesce_s=_TOGETHER_S,
                probe_s=settings.probe_s,
                informers=timing,
            ),
        )
        self._inputs = GatewayInformers(gateway_informers(controller.cache), lambda: controller.enqueue_soon(DIRECTORY))
        self._referenced = ReferencedObjectInformers(controller.cache, self._inputs.mark_changed)
        self._compiler = Compiler(
            settings.gateway_config,
            settings.gateway_api,
            check_picker=check_picker,
            grace_s=settings.grace_s,
            networks=settings.networks,
        )
        self._writer = DirectoryWriter(settings.config, file_recorder(client.audit, CONTROLLER))
        self._statuses = StatusWriter(client, self._inputs.get, CONTROLLER)
        self._metrics = metrics
        self._reports = ConsumerReportPoller(settings.consumers, self._update_statuses)
        self._refused = ""
        self._compiled: CompileResult | None = None
        # of what is in the directory, and of what should be
        self._published: Mapping[str, str] = {}
        self._digests: Mapping[str, str] = {}
        self.ready = asyncio.Event()
        # even where there is nothing, that is something to write
        controller.on_synced(lambda: controller.enqueue_soon(DIRECTORY))
        controller.add_source("reports of consumers", self._reports.run)
        controller.add_source("statuses", lambda: election.run(self._statuses.run))
        self._controller = controller

    @property
    def status_write_count(self) -> int:
        """Statuses written so far."""
        return self._statuses.writes

    async def run(self) -> None:
        """Reconcile until cancelled."""
        await self._controller.run()

    async def _reconcile(self, _: str) -> ReconcileResult:
        """Compile what has changed, and write the directory."""
        compiled = self._compile()
        # without its certificates a listener would be removed and added again
        while await self._referenced.read(compiled.pointers, _REFERENCED_S):
            compiled = self._compile()
        self._digests = {name: content_digest(content) for name, content in compiled.files.items()}
        if not await self._publish(compiled):
            # what changes in the meantime may be what makes the next attempt succeed
            await asyncio.sleep(_RETRY_S)
            return ReconcileResult("failed", 0.0)
        self._note_grace(compiled.graced)
        self._compiled = compiled
        self._update_statuses()
        return ReconcileResult(
            "written", None if compiled.again_s == math.inf else max(0.0, compiled.again_s - loop_clock_s())
        )

    def _compile(self) -> CompileResult:
        with self._inputs.take_changes() as changed:
            for kind, key in changed:
                self._compiler.update_object(kind, key, self._object(kind, key), loop_clock_s())
                self._statuses.mark_stale((kind, key))
            began_s = time.perf_counter()
            compiled = self._compiler.compile(loop_clock_s())
            self._metrics.observe_compile(len(changed), time.perf_counter() - began_s)
            return compiled

    def _note_grace(self, graced: frozenset[tuple[str, str]]) -> None:
        before = frozenset[tuple[str, str]]() if self._compiled is None else self._compiled.graced
        self._metrics.graced.set(len(graced))
        for kind, key in sorted(graced - before):
            log.info("%s %s was deleted or selects other pods; what served it serves it a while more", kind, key)
        for kind, key in sorted(before - graced):
            log.info("the grace of %s %s is over", kind, key)

    def _object(self, kind: str, key: str) -> Object | None:
        return self._referenced.get(kind, key) if kind in REFERENCED_KINDS else self._inputs.get(kind, key)

    def _update_statuses(self) -> None:
        """Give the writer the statuses that objects should have by now."""
        if self._compiled is None:
            return
        refused = f"{self._refused}; until that is corrected nothing changes" if self._refused else ""
        directory = ConfigReport(files=self._published, refused=refused)
        consumers = [ConfigConsumer("the gateway role", directory, is_writer=True), *self._reports.consumers]
        wanted = {
            key: add_programmed_condition(one, self._status(*key), self._digests, consumers)
            for key, one in self._compiled.statuses.items()
        }
        self._reports.is_settled = are_statuses_known(wanted.values())
        self._statuses.set_wanted(wanted)

    def _status(self, kind: str, key: str) -> Mapping[str, Any]:
        thing = self._inputs.get(kind, key)
        return {} if thing is None else thing.get("status") or {}

    async def _publish(self, compiled: CompileResult) -> bool:
        """Write the files, unless it must not be served; whether nothing remains to be tried again."""
        if compiled.refused != self._refused:
            self._refused = compiled.refused
            self._metrics.refused.set(bool(compiled.refused))
            if compiled.refused:
                log.error("nothing is changed, and what is served stays: %s", compiled.refused)
        if compiled.refused:
            return True
        try:
            with caused_by(of="", reason="objects of the cluster have changed"):
                done = await asyncio.to_thread(self._writer.write, compiled.files)
        except OSError as error:
            self._metrics.failures.inc()
            log.error("the directory cannot be written, tried again in %g s: %s", _RETRY_S, error)
            return False
        for name in done.written:
            log.info("wrote %s", name)
        for name in done.removed:
            log.info("removed %s", name)
        self._published = self._digests
        self._reports.poll_soon()
        self._metrics.set_file_count(len(done.written), len(done.removed), len(compiled.files))
        self.ready.set()
        return True

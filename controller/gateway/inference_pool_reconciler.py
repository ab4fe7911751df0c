# SPDX-License-Identifier: Apache-2.0
"""The gateway role in picker mode: one InferencePool to an extproc's directory.

What is wrong with the pool is in the log, in metrics, and in Events of the pool. The pool's ``status.parents`` belongs
to gateways and is left alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from controller.audit import file_recorder
from controller.bundle.atomic_files import FileChanged, ignore_change
from controller.gateway.compile.file_discovery import (
    MAX_ENDPOINTS_BYTES,
    DiscoveryInvalid,
    FilePoolCompiler,
    parse_file_discovery,
)
from controller.gateway.compile.inference_pool_compiler import LLM_D_OBJECTIVES as LLM_D
from controller.gateway.compile.inference_pool_compiler import (
    LLM_D_REWRITES,
    OBJECTIVES,
    REWRITES,
    InferencePoolCompiler,
)
from controller.gateway.compile.inference_pools import KIND
from controller.gateway.compile.model_servers import LABEL
from controller.gateway.compile.pods import trimmed_engine_pod
from controller.gateway.directory_writer import DirectoryWriter
from controller.gateway.informers import GatewayInformers
from controller.gateway.metrics import PickerMetrics
from controller.kube.api_resources import (
    ALPHA_INFERENCE_POOLS,
    CONFIG_MAPS,
    EVENTS,
    INFERENCE_OBJECTIVES,
    INFERENCE_POOLS,
    LLM_D_MODEL_REWRITES,
    LLM_D_OBJECTIVES,
    MODEL_REWRITES,
    PODS,
    split_key,
)
from controller.kube.controller import Controller, ControllerSettings, ReconcileResult
from controller.kube.errors import ClusterError
from controller.kube.event_recorder import make_event
from controller.kube.informer import Informer, InformerTiming
from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import MAX_YAML_BYTES
from extproc.api.document_decoder import read_picker_file
from extproc.api.picker_config import accept_any_plugins
from extproc.api.untrusted_files import open_regular_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.gateway.compile.file_discovery import FileDiscoverySettings
    from controller.gateway.compile.inference_pool_compiler import InferencePoolResult, PoolProblem
    from controller.gateway.directory_writer import WrittenFiles
    from controller.gateway.metrics import GatewayMetrics
    from controller.kube.api_resources import Object
    from controller.kube.client import Client
    from controller.kube.shared_informers import InformerSet
    from extproc.api.picker_config import PickerConfigChecker


log = logging.getLogger(__name__)
EventType = Literal["Normal", "Warning"]
CreateEvent = Callable[[str, str, EventType], Awaitable[None]]
CONTROLLER: Final = "attache-picker"
_TOGETHER_S: Final = 0.03
_RETRY_S: Final = 1.0
_FILE_POLL_S: Final = 1.0
# The name, as if a ConfigMap held it, of an EndpointPickerConfig that is a file here.
_FILE: Final = "from-a-file"


class PickerProblemReporter:
    """``report`` reports what is wrong, and what has no effect, once for each change."""

    def __init__(self, metrics: PickerMetrics, create_event: CreateEvent) -> None:
        """``create_event``: takes a reason, a message and the type of an Event of the pool."""
        self._metrics = metrics
        self._create_event = create_event
        self._told: dict[str, str] = {}
        self._notes: tuple[str, ...] = ()

    async def report(self, problems: Sequence[PoolProblem], notes: tuple[str, ...]) -> None:
        """``problems`` and ``notes`` are all that there are now."""
        for note in notes:
            if note not in self._notes:
                log.info("EndpointPickerConfig: %s", note)
        self._notes = notes
        wrong = {one.reason: one.message for one in problems}
        known, self._told = self._told, wrong
        self._metrics.set_problems(wrong, known.keys() - wrong.keys())
        for reason, message in wrong.items():
            if known.get(reason) != message:
                log.warning("%s: %s", reason, message)
                await self._create_event(reason, message, "Warning")
        if known and not wrong:
            message = f"no longer: {', '.join(sorted(known))}"
            log.info("%s", message)
            await self._create_event("PoolServed", message, "Normal")


class _PoolWriter:
    """Writes what the compiler makes of a pool, and reports it."""

    def __init__(
        self,
        pool: str,
        config: Path,
        metrics: GatewayMetrics,
        create_event: CreateEvent,
        changed: FileChanged = ignore_change,
    ) -> None:
        self._pool = pool
        self._writer = DirectoryWriter(config, changed)
        self._metrics = metrics
        self._pool_metrics = PickerMetrics(metrics.registry, pool)
        self._problems = PickerProblemReporter(self._pool_metrics, create_event)
        self.ready = asyncio.Event()

    async def publish(self, outcome: InferencePoolResult) -> None:
        """``ready`` is set once a directory has been written."""
        self._metrics.refused.set(outcome.files is None)
        if outcome.files is not None:
            done = await self._write(outcome.files)
            if done.written or done.removed:
                log.info("%s has %d endpoints, %d of them ready", self._pool, outcome.endpoints, outcome.ready)
            self._metrics.set_file_count(len(done.written), len(done.removed), len(outcome.files))
            self._pool_metrics.set_pool_size(outcome.endpoints, outcome.ready)
            self.ready.set()
        await self._problems.report(outcome.problems, outcome.notes)

    async def _write(self, files: Mapping[str, bytes]) -> WrittenFiles:
        while True:
            try:
                return await asyncio.to_thread(self._writer.write, files)
            except OSError as error:
                self._metrics.failures.inc()
                log.error("the directory cannot be written, tried again in %g s: %s", _RETRY_S, error)
            await asyncio.sleep(_RETRY_S)


class InferencePoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``config``: the directory to write. ``pool``: the InferencePool as ``namespace/name``; ``group``: its API group.

    ``picker_config``: the name of a ConfigMap in the pool's namespace, or ``picker_file``: a file, which is followed;
    neither: the pool's annotation may name a ConfigMap, unless ``reads_config_maps`` is False. ``fixed_pool``: the pool
    itself, where it is no object of the cluster. ``server_fields``: of its ModelServer, unless its annotation has them.
    """

    config: Path
    pool: str
    group: str = INFERENCE_POOLS.group
    picker_config: str | None = None
    picker_file: Path | None = None
    reads_config_maps: bool = True
    fixed_pool: Mapping[str, Any] | None = None
    server_fields: Mapping[str, Any] = {}


class InferencePoolRunner:
    """``run`` does all of it; ``ready`` is set once the directory has been written."""

    def __init__(
        self,
        client: Client,
        settings: InferencePoolSettings,
        metrics: GatewayMetrics,
        *,
        check_picker: PickerConfigChecker = accept_any_plugins,
        timing: InformerTiming = InformerTiming(),  # noqa: B008 - frozen
    ) -> None:
        namespace, _ = split_key(settings.pool)
        named = _FILE if settings.picker_file is not None else settings.picker_config
        self._file_key = f"{namespace}/{_FILE}"
        self._settings = settings
        controller = Controller[str](
            client,
            self._reconcile,
            settings=ControllerSettings(namespace=namespace, workers=1, coalesce_s=_TOGETHER_S, informers=timing),
        )
        informers = _informers(controller.cache, settings)
        self._inputs = GatewayInformers(informers, lambda: controller.enqueue_soon(settings.pool))
        picker = None if named is None else f"{namespace}/{named}"
        self._compiler = InferencePoolCompiler(settings.pool, picker, settings.server_fields, check_picker=check_picker)
        if settings.fixed_pool is not None:
            self._compiler.put(KIND, settings.pool, settings.fixed_pool)
        self._client = client
        self._metrics = metrics
        changed = file_recorder(client.audit, CONTROLLER)
        self._writer = _PoolWriter(settings.pool, settings.config, metrics, self._create_event, changed)
        self.ready = self._writer.ready
        # even where there is nothing, that is something to report
        controller.on_synced(lambda: controller.enqueue_soon(settings.pool))
        if settings.picker_file is not None:
            controller.add_source("picker file", partial(self._poll_file, settings.picker_file))
        self._controller = controller

    def _pool(self) -> Object | None:
        return None if self._settings.fixed_pool is not None else self._inputs.get(KIND, self._settings.pool)

    async def run(self) -> None:
        """Reconcile until cancelled."""
        await self._controller.run()

    async def _reconcile(self, _: str) -> ReconcileResult:
        with self._inputs.take_changes() as changed:
            began_s = time.perf_counter()
            for kind, key in changed:
                self._compiler.put(kind, key, self._thing(kind, key))
            compiled = self._compiler.compile()
            self._metrics.observe_compile(len(changed), time.perf_counter() - began_s)
        await self._writer.publish(compiled)
        return ReconcileResult("written")

    async def _create_event(self, reason: str, message: str, type_: EventType) -> None:
        """An Event is a courtesy: one that cannot be written is logged, and that is all."""
        pool = self._pool()
        if pool is None:
            return
        event = make_event(pool, type_, reason=reason, message=message, component=CONTROLLER)
        try:
            await self._client.create(EVENTS, event)
        except ClusterError as error:
            log.warning("an Event cannot be written: %s", error)

    def _thing(self, kind: str, key: str) -> Mapping[str, Any] | None:
        if key == self._file_key and self._settings.picker_file is not None:
            return _as_config_map(self._settings.picker_file)
        return self._inputs.get(kind, key)

    async def _poll_file(self, file: Path) -> None:
        """Polling works on every file system, mounted ConfigMaps included."""
        known: object = ()
        while True:
            found = await asyncio.to_thread(_as_config_map, file)
            if found != known:
                known = found
                self._inputs.mark_changed("ConfigMap", self._file_key)
            await asyncio.sleep(_FILE_POLL_S)


class FilePoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``config``: the directory to write. ``pool``: ``namespace/name``. ``picker_file`` or ``picker_text``: the
    EndpointPickerConfig, which names the file of endpoints; files are followed. ``server_fields``: of its ModelServer.
    """

    config: Path
    pool: str
    picker_file: Path | None
    picker_text: str
    server_fields: Mapping[str, Any]


class FilePoolRunner:
    """The picker role without a cluster: ``run`` follows the files; ``ready`` is set once the directory has been
    written.
    """

    def __init__(
        self, settings: FilePoolSettings, metrics: GatewayMetrics, *, check_picker: PickerConfigChecker
    ) -> None:
        self._settings = settings
        self._compiler = FilePoolCompiler(settings.pool, settings.server_fields, check_picker=check_picker)
        self._writer = _PoolWriter(settings.pool, settings.config, metrics, _no_event)
        self.ready = self._writer.ready
        # read last: the EndpointPickerConfig, where it says that the endpoints are, and these
        self._text: str | None = None
        self._discovery: FileDiscoverySettings | None = None
        self._endpoints: str | None = None
        self._is_fixed = False

    async def run(self) -> None:
        """Poll until cancelled: polling works on every file system."""
        is_first = True
        while True:
            if await self._poll(is_first=is_first):
                await self._writer.publish(self._compiler.compile())
            is_first = False
            await asyncio.sleep(_FILE_POLL_S)

    async def _poll(self, *, is_first: bool) -> bool:
        """Whether anything has changed."""
        file, text = self._settings.picker_file, self._settings.picker_text or None
        if file is not None:
            text = await asyncio.to_thread(read_bounded_text, file)
        changed = is_first or text != self._text
        if changed:
            self._text = text
            self._compiler.put_config(text)
            self._find_endpoints(text)
        return await self._poll_endpoints() or changed

    def _find_endpoints(self, text: str | None) -> None:
        """A file that does not say where endpoints are leaves them where they were."""
        message, found = "", None
        try:
            found = None if text is None else parse_file_discovery(read_picker_file(_FILE, text).config)
            if text is not None and found is None:
                message = "dataLayer.discovery is gone; write it again, or restart to follow a cluster"
        except DiscoveryInvalid as error:
            message = str(error)
        except ConfigInvalid:
            # reported of the whole file
            return
        self._compiler.set_discovery_problem(message)
        if found is not None and found != self._discovery:
            self._discovery, self._endpoints, self._is_fixed = found, None, False

    async def _poll_endpoints(self) -> bool:
        discovery = self._discovery
        if discovery is None or self._is_fixed:
            return False
        text = await asyncio.to_thread(read_bounded_text, Path(discovery.path), MAX_ENDPOINTS_BYTES)
        if text is not None and text == self._endpoints:
            return False
        self._endpoints = text
        self._compiler.put_endpoints(discovery.path, text)
        # what is not watched is read until it can be used
        self._is_fixed = self._compiler.has_endpoints and not discovery.watches
        return True


async def _no_event(reason: str, message: str, type_: EventType) -> None:
    """Without a cluster there are no Events; the log and the metrics have it."""


def _informers(cache: InformerSet, settings: InferencePoolSettings) -> dict[str, Informer]:
    _, name = split_key(settings.pool)
    pools = INFERENCE_POOLS if settings.group == INFERENCE_POOLS.group else ALPHA_INFERENCE_POOLS
    found = {
        OBJECTIVES: cache.add(INFERENCE_OBJECTIVES, optional=True),
        LLM_D: cache.add(LLM_D_OBJECTIVES, optional=True),
        REWRITES: cache.add(MODEL_REWRITES, optional=True),
        LLM_D_REWRITES: cache.add(LLM_D_MODEL_REWRITES, optional=True),
        "Pod": cache.add(PODS, transform=trimmed_engine_pod),
    }
    if settings.fixed_pool is None:
        found[KIND] = cache.add(pools, fields=f"metadata.name={name}")
    if settings.picker_file is None and settings.reads_config_maps:
        if settings.picker_config is not None:
            found["ConfigMap"] = cache.add(CONFIG_MAPS, fields=f"metadata.name={settings.picker_config}")
        else:
            found["ConfigMap"] = cache.add(CONFIG_MAPS, labels=LABEL)
    return found


def _as_config_map(file: Path) -> Mapping[str, Any] | None:
    """None if it cannot be read."""
    text = read_bounded_text(file)
    return None if text is None else {"data": {"config": text}}


def read_bounded_text(file: Path, most_bytes: int = MAX_YAML_BYTES) -> str | None:
    """None if it cannot be read. One byte more than ``most_bytes`` is read, so that who bounds it can tell."""
    try:
        with open_regular_file(file) as opened:
            return opened.read(most_bytes + 1).decode()
    except (OSError, UnicodeDecodeError):
        return None

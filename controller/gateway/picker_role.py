# SPDX-License-Identifier: Apache-2.0
"""The gateway role in picker mode: one InferencePool to an extproc's directory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.picker_mode import LLM_D_OBJECTIVES as LLM_D
from controller.gateway.compile.picker_mode import OBJECTIVES, PickerCompiler
from controller.gateway.compile.pods import trimmed_pod
from controller.gateway.compile.pools import KIND
from controller.gateway.compile.servers import LABEL
from controller.gateway.directory import DirectoryWriter
from controller.gateway.inputs import Inputs
from controller.gateway.metrics import PickerMetrics
from controller.gateway.picker_problems import PickerProblems
from controller.kube.controller import Controller, ControllerSettings, Outcome
from controller.kube.informer import Informer, InformerTiming
from controller.kube.resources import (
    ALPHA_INFERENCE_POOLS,
    CONFIG_MAPS,
    INFERENCE_OBJECTIVES,
    INFERENCE_POOLS,
    LLM_D_OBJECTIVES,
    PODS,
    split_key,
)
from extproc.api.picker_config import check_shape_alone

if TYPE_CHECKING:
    from controller.gateway.compile.picker_mode import PickerOutcome
    from controller.gateway.directory import Written
    from controller.gateway.metrics import GatewayMetrics
    from controller.kube.cache import Cache
    from controller.kube.client import Client
    from controller.kube.resources import Object
    from extproc.api.picker_config import PickerCheck

log = logging.getLogger(__name__)

CONTROLLER: Final = "attache-picker"
_TOGETHER_S: Final = 0.03
_RETRY_S: Final = 1.0
_FILE_POLL_S: Final = 1.0
# The name, as if a ConfigMap held it, of an EndpointPickerConfig that is a file here.
_FILE: Final = "from-a-file"


class PickerSettings(msgspec.Struct, frozen=True, kw_only=True):
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


class PickerRole:
    """``run`` does all of it; ``ready`` is set once the directory has been written."""

    def __init__(
        self,
        client: Client,
        settings: PickerSettings,
        metrics: GatewayMetrics,
        *,
        check_picker: PickerCheck = check_shape_alone,
        timing: InformerTiming = InformerTiming(),  # noqa: B008 - frozen
    ) -> None:
        namespace, _ = split_key(settings.pool)
        named = _FILE if settings.picker_file is not None else settings.picker_config
        self._file_key = f"{namespace}/{_FILE}"
        self._settings = settings
        controller = Controller[str](
            client,
            self._reconcile,
            component=CONTROLLER,
            settings=ControllerSettings(namespace=namespace, workers=1, coalesce_s=_TOGETHER_S, informers=timing),
        )
        informers = _informers(controller.cache, settings)
        self._inputs = Inputs(informers, lambda: controller.enqueue_soon(settings.pool))
        picker = None if named is None else f"{namespace}/{named}"
        self._compiler = PickerCompiler(settings.pool, picker, settings.server_fields, check_picker=check_picker)
        if settings.fixed_pool is not None:
            self._compiler.put(KIND, settings.pool, settings.fixed_pool)
        self._writer = DirectoryWriter(settings.config)
        self._metrics = metrics
        self._pool_metrics = PickerMetrics(metrics.registry, settings.pool)
        self._problems = PickerProblems(client, self._pool_metrics, self._pool, CONTROLLER)
        self.ready = asyncio.Event()
        # even where there is nothing, that is something to report
        controller.on_synced(lambda: controller.enqueue_soon(settings.pool))
        if settings.picker_file is not None:
            controller.add_source("picker file", partial(self._poll_file, settings.picker_file))
        self._controller = controller

    def _pool(self) -> Object | None:
        return None if self._settings.fixed_pool is not None else self._inputs.get(KIND, self._settings.pool)

    async def run(self) -> None:
        """Run until cancelled."""
        await self._controller.run()

    async def _reconcile(self, _: str) -> Outcome:
        with self._inputs.changes() as changed:
            began_s = time.perf_counter()
            for kind, key in changed:
                self._compiler.put(kind, key, self._thing(kind, key))
            compiled = self._compiler.compile()
            self._metrics.compiled(len(changed), time.perf_counter() - began_s)
        await self._publish(compiled)
        await self._problems.report(compiled.problems)
        return Outcome("written")

    def _thing(self, kind: str, key: str) -> Mapping[str, Any] | None:
        if key == self._file_key and self._settings.picker_file is not None:
            return _as_config_map(self._settings.picker_file)
        return self._inputs.get(kind, key)

    async def _publish(self, outcome: PickerOutcome) -> None:
        self._metrics.refused.set(outcome.files is None)
        if outcome.files is None:
            return
        done = await self._write(outcome.files)
        if done.written or done.removed:
            log.info("%s has %d endpoints, %d of them ready", self._settings.pool, outcome.endpoints, outcome.ready)
        self._metrics.published(len(done.written), len(done.removed), len(outcome.files))
        self._pool_metrics.counted(outcome.endpoints, outcome.ready)
        self.ready.set()

    async def _write(self, files: Mapping[str, bytes]) -> Written:
        while True:
            try:
                return await asyncio.to_thread(self._writer.write, files)
            except OSError as error:
                self._metrics.failures.inc()
                log.error("the directory cannot be written, tried again in %g s: %s", _RETRY_S, error)
            await asyncio.sleep(_RETRY_S)

    async def _poll_file(self, file: Path) -> None:
        """Polling works on every file system, mounted ConfigMaps included."""
        known: object = ()
        while True:
            found = await asyncio.to_thread(_as_config_map, file)
            if found != known:
                known = found
                self._inputs.note("ConfigMap", self._file_key)
            await asyncio.sleep(_FILE_POLL_S)


def _informers(cache: Cache, settings: PickerSettings) -> dict[str, Informer]:
    _, name = split_key(settings.pool)
    pools = INFERENCE_POOLS if settings.group == INFERENCE_POOLS.group else ALPHA_INFERENCE_POOLS
    found = {
        OBJECTIVES: cache.add(INFERENCE_OBJECTIVES, optional=True),
        LLM_D: cache.add(LLM_D_OBJECTIVES, optional=True),
        "Pod": cache.add(PODS, transform=trimmed_pod),
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
    try:
        return {"data": {"config": file.read_text()}}
    except (OSError, UnicodeDecodeError):
        return None

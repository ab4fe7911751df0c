# SPDX-License-Identifier: Apache-2.0
"""The gateway role in picker mode: one InferencePool to an extproc's directory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.picker_mode import LLM_D_OBJECTIVES as LLM_D
from controller.gateway.compile.picker_mode import OBJECTIVES, PickerCompiler
from controller.gateway.compile.pickers import LABEL
from controller.gateway.compile.pods import slim_pod
from controller.gateway.compile.pools import KIND
from controller.gateway.directory import DirectoryWriter
from controller.gateway.picker_metrics import PickerMetrics
from controller.gateway.picker_problems import PickerProblems
from controller.gateway.watched import Watched
from controller.kube.informer import Informer, InformerTiming, Selection
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
        self._watched = Watched(client, _informers(client, settings, timing))
        picker = None if named is None else f"{namespace}/{named}"
        self._compiler = PickerCompiler(settings.pool, picker, settings.server_fields, check_picker=check_picker)
        if settings.fixed_pool is not None:
            self._compiler.put(KIND, settings.pool, settings.fixed_pool)
        self._writer = DirectoryWriter(settings.config)
        self._metrics = metrics
        self._pool_metrics = PickerMetrics(metrics.registry, settings.pool)
        self._problems = PickerProblems(client, self._pool_metrics, self._pool, CONTROLLER)
        self.ready = asyncio.Event()

    def _pool(self) -> Object | None:
        return None if self._settings.fixed_pool is not None else self._watched.get(KIND, self._settings.pool)

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watched.run(), name="informers")
            tasks.create_task(self._follow(), name="compile and write")
            if self._settings.picker_file is not None:
                tasks.create_task(self._follow_file(self._settings.picker_file), name="picker file")

    async def _follow(self) -> None:
        await self._watched.synced()
        while True:
            changed = await self._watched.changes(_TOGETHER_S)
            began_s = time.perf_counter()
            for kind, key in changed:
                self._compiler.put(kind, key, self._thing(kind, key))
            outcome = self._compiler.compile()
            self._metrics.compiled(len(changed), time.perf_counter() - began_s)
            await self._publish(outcome)
            await self._problems.tell(outcome.problems)

    def _thing(self, kind: str, key: str) -> Mapping[str, Any] | None:
        if key == self._file_key and self._settings.picker_file is not None:
            return _as_config_map(self._settings.picker_file)
        return self._watched.get(kind, key)

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

    async def _follow_file(self, file: Path) -> None:
        """Polling works on every file system, mounted ConfigMaps included."""
        known: object = ()
        while True:
            found = await asyncio.to_thread(_as_config_map, file)
            if found != known:
                known = found
                self._watched.note("ConfigMap", self._file_key)
            await asyncio.sleep(_FILE_POLL_S)


def _informers(client: Client, settings: PickerSettings, timing: InformerTiming) -> dict[str, Informer]:
    namespace, name = split_key(settings.pool)
    pools = INFERENCE_POOLS if settings.group == INFERENCE_POOLS.group else ALPHA_INFERENCE_POOLS
    everything, one_pool = Selection(namespace), Selection(namespace, fields=f"metadata.name={name}")
    found = {
        OBJECTIVES: Informer(client, INFERENCE_OBJECTIVES, everything, timing=timing),
        LLM_D: Informer(client, LLM_D_OBJECTIVES, everything, timing=timing),
        "Pod": Informer(client, PODS, everything, timing=timing, slim=slim_pod),
    }
    if settings.fixed_pool is None:
        found[KIND] = Informer(client, pools, one_pool, timing=timing)
    if settings.picker_file is None and settings.reads_config_maps:
        chosen = Selection(namespace, labels=LABEL)
        if settings.picker_config is not None:
            chosen = Selection(namespace, fields=f"metadata.name={settings.picker_config}")
        found["ConfigMap"] = Informer(client, CONFIG_MAPS, chosen, timing=timing)
    return found


def _as_config_map(file: Path) -> Mapping[str, Any] | None:
    """None if it cannot be read."""
    try:
        return {"data": {"config": file.read_text()}}
    except (OSError, UnicodeDecodeError):
        return None

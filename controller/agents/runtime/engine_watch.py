# SPDX-License-Identifier: Apache-2.0
"""Probes the engine, one request at a time, and reads its metrics."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from controller.agents.runtime.drain import EngineLoad
from controller.agents.runtime.engine_client import (
    PROBES,
    EngineFailed,
    EngineUnreachable,
    build_model_request,
    is_model_output,
    is_wrong_api_status,
    warm_up_prompts,
)
from controller.agents.runtime.engine_health import (
    EngineHealth,
    on_connection_refused,
    on_metrics_read,
    on_probe_failed,
    on_probe_ok,
    on_probe_sent,
    on_warm_up_done,
    why_not_alive,
    why_not_ready,
)
from controller.agents.runtime.metrics import parse_engine_metrics
from extproc.engines.engine_responses import parse_base_model
from extproc.engines.prometheus_text import MetricsPageRefused
from extproc.wire_names import READY_PATH

if TYPE_CHECKING:
    from collections.abc import Callable

    from controller.agents.runtime.engine_client import EngineClient, ModelRequest
    from controller.agents.runtime.metrics import AgentCounters, EngineMetricsPage
    from controller.agents.runtime.settings import AgentSettings
    from extproc.wire_names import Api

_METRICS_TIMEOUT_S: Final = 5.0

log = logging.getLogger(__name__)


class EngineWatch:
    """``clock``: monotonic seconds; ``unix_clock``: that of engines' timestamps."""

    def __init__(
        self,
        settings: AgentSettings,
        client: EngineClient,
        counters: AgentCounters,
        *,
        clock: Callable[[], float],
        unix_clock: Callable[[], float],
    ) -> None:
        self.health = EngineHealth()
        self._settings = settings
        self._client = client
        self._counters = counters
        self._clock = clock
        self._unix_clock = unix_clock
        self._model = settings.model
        self._api: Api | None = None
        self._page: EngineMetricsPage | None = None
        self._is_gone = False
        self._read_at_s = -1e9
        self._reading = asyncio.Lock()
        self._said = ""

    def why_not_ready(self, *, is_draining: bool = False) -> str:
        """Empty if it is."""
        return why_not_ready(self.health, self._settings.health, is_draining=is_draining, now_s=self._clock())

    def why_not_alive(self) -> str:
        """Empty if it is."""
        return why_not_alive(self.health, self._settings.health, self._clock())

    async def probe_forever(self) -> None:
        """Send a probe only when the one before was answered, or abandoned after minutes."""
        while True:
            await self._probe()
            if self.health.phase == "warming":
                await self._warm_up()
            self._log_change()
            await asyncio.sleep(self._settings.probe_interval_s)

    async def poll_metrics_forever(self) -> None:
        """Reads metrics, by which an engine that computes nothing is found."""
        while True:
            page = await self.metrics_page()
            running = None if page is None else page.total("running_requests")
            progress = () if page is None else page.progress_counters
            self.health = on_metrics_read(self.health, running=running, progress=progress, now_s=self._clock())
            self._log_change()
            await asyncio.sleep(self._settings.metrics_interval_s)

    async def metrics_page(self, max_age_s: float = 0.0) -> EngineMetricsPage | None:
        """The metrics; None if they cannot be read. Concurrent callers share one read."""
        wanted_at_s = self._clock() - max_age_s
        async with self._reading:
            # a read that began after this call is used, with or without success
            if self._read_at_s < wanted_at_s:
                await self._read()
        return self._page

    async def engine_load(self) -> EngineLoad:
        """What the engine has to do, for a drain."""
        page = await self.metrics_page()
        if page is None:
            return EngineLoad(is_gone=self._is_gone)
        return EngineLoad(page.total("running_requests"), page.total("waiting_requests"))

    def _log_change(self) -> None:
        """In the log, when the engine begins to serve or stops doing so."""
        message = self.why_not_ready() or "serves"
        if message != self._said:
            log.info("the engine %s", message if message == "serves" else f"does not serve: {message}")
            self._said = message

    async def _read(self) -> None:
        self._read_at_s = self._clock()
        self._is_gone = False
        try:
            answer = await self._client.get(self._settings.metrics_url, timeout_s=_METRICS_TIMEOUT_S)
            self._page = parse_engine_metrics(
                answer.expect_success("metrics"), self._settings.dialect, unix_s=self._unix_clock()
            )
        except EngineUnreachable:
            self._page, self._is_gone = None, True
        except (EngineFailed, MetricsPageRefused):
            self._page = None

    async def _probe(self) -> None:
        self.health = on_probe_sent(self.health, self._clock())
        try:
            if self.health.phase == "starting":
                await self._ask_model()
            else:
                path = _of_model(self._settings.dialect.health, self._settings.model)
                answer = await self._client.get(path, timeout_s=self._settings.health.dead_after_s)
                answer.expect_success("the health check")
        except EngineUnreachable:
            self.health = on_connection_refused(self.health)
        except EngineFailed as error:
            log.debug("%s", error)
            self.health = on_probe_failed(self.health)
        else:
            if self.health.phase == "starting":
                self._counters.starts += 1
            self.health = on_probe_ok(self.health, self._clock())
            self._counters.probes["good"] += 1
            return
        self._counters.probes["bad"] += 1

    async def _ask_model(self) -> None:
        """Request one token of the model; raises EngineFailed without one."""
        if self._settings.probe is not None:
            await self._must_answer(self._settings.probe)
            return
        if self._settings.dialect.ready:
            await self._ask_server()
            return
        timeout_s = self._settings.answer_timeout_s
        if not self._settings.model:
            listed = await self._client.get("/v1/models", timeout_s=timeout_s)
            try:
                self._model = parse_base_model(listed.expect_success("the list of models"))
            except ValueError as error:
                raise EngineFailed(str(error)) from error
        why = ""
        for api in PROBES:
            request = build_model_request(
                api, model=self._model, prompt="Hello", max_tokens=1, more=self._settings.own_request_fields
            )
            try:
                if await self._must_answer(request):
                    self._api = api
                    return
            except _OtherApi as error:
                why = str(error)
        raise EngineFailed(why)

    async def _ask_server(self) -> None:
        """Ask whether the model is loaded, as its inputs are not known; raises EngineFailed."""
        path = _of_model(self._settings.dialect.ready, self._model) if self._model else READY_PATH
        if not self._model and self._settings.adapters.file is not None:
            # servers may not be ready as long as one of many models is broken, which must not cost the others
            path = self._settings.dialect.health
        (await self._client.get(path, timeout_s=self._settings.answer_timeout_s)).expect_success(path)

    async def _must_answer(self, request: ModelRequest) -> bool:
        """True; raises EngineFailed."""
        answer = await self._client.post(
            request.path, request.body, timeout_s=self._settings.answer_timeout_s, is_form=request.is_form
        )
        if is_wrong_api_status(answer.status):
            raise _OtherApi(f"{request.path}: status {answer.status}")
        if not is_model_output(answer.expect_success(request.path), request.proof):
            raise EngineFailed(f"{request.path}: status {answer.status}, but no answer of a model")
        return True

    async def _warm_up(self) -> None:
        began_s = self._clock()
        try:
            async with asyncio.timeout(self._settings.warm_up.timeout_s):
                await self._send_warm_up()
        except TimeoutError:
            log.warning("the warm-up is not over after %g s; the engine serves now", self._settings.warm_up.timeout_s)
            self._counters.warm_up_failures += 1
        self._counters.warm_up_s = self._clock() - began_s
        self.health = on_warm_up_done(self.health)

    async def _send_warm_up(self) -> None:
        for request in self._warm_up_requests():
            self.health = on_probe_sent(self.health, self._clock())
            try:
                answer = await self._client.post(
                    request.path,
                    request.body,
                    timeout_s=self._settings.warm_up.timeout_s,
                    is_form=request.is_form,
                )
                answer.expect_success(request.path)
            except EngineUnreachable:
                self.health = on_connection_refused(self.health)
                return
            except EngineFailed as error:
                log.warning("warm-up: %s", error)
                self._counters.warm_up_failures += 1
                self.health = on_probe_failed(self.health)
            else:
                self.health = on_probe_ok(self.health, self._clock())

    def _warm_up_requests(self) -> list[ModelRequest]:
        warm_up = self._settings.warm_up
        if self._settings.probe is not None:
            return [self._settings.probe] * warm_up.rounds
        if self._api is None:
            return []
        return [
            build_model_request(
                self._api,
                model=self._model,
                prompt=prompt,
                max_tokens=warm_up.max_tokens,
                more=self._settings.own_request_fields,
            )
            for prompt in warm_up_prompts(warm_up.rounds, warm_up.lengths, warm_up.prompts)
        ]


def _of_model(path: str, model: str) -> str:
    return path.replace("{name}", quote(model, safe=""))


class _OtherApi(EngineFailed):
    """The engine has no such API, or not for this model."""

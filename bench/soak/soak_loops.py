# SPDX-License-Identifier: Apache-2.0
"""The loops of a soak: load, changes, what is used of them, and samples."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import statistics
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec

from bench.soak import model_changes
from bench.soak.clients import APIS, Audience, RequestOutcome, SoakClient, SoakRequest, classify_outcome
from bench.soak.gateway import JUDGED, KV, MIXED_NAME, SoakGateway, running_gateway
from bench.soak.hostile_engines import HOSTILE, MIXED, TRAP_HOST, TRAPPED_PATH, adapter_of
from bench.soak.model_changes import BROKEN, BROKEN_EVERY, ModelChange, SoakModel
from bench.soak.verdict import (
    BrokenFileRefusal,
    ConfigAdoption,
    Latency,
    LostRequest,
    ProcessSample,
    Sample,
    SoakLimits,
    SoakRecord,
)
from bench.stack.processes import cpu_seconds, rss_bytes
from extproc.api.status_page_contents import REPORT_PATH, ConfigReport, content_digest

if TYPE_CHECKING:
    from collections.abc import Mapping

_REPORT_S: Final = 0.5
_PROBE_S: Final = 0.5
_REFUSAL_S: Final = 60.0
# Further requests are not sent while so many are open: a client's memory has bounds, too.
_MOST_OPEN: Final = 500
_MOST_RSS_BYTES: Final = 4 * 1024**3
_MOST_LOSSES: Final = 2_000
_MOST_LOG_LINES: Final = 100
_PAGE_TIMEOUT: Final = aiohttp.ClientTimeout(total=10)
_TRACEBACK: Final = "Traceback (most recent call last)"
_ERROR: Final = re.compile(r"[\s|]*([\w.]+(?:Error|Exception|Events|Invalid)\b.*)")
_BAD_LOG: Final = ("please report", "never retrieved", "[critical]", "assert failure")
# Series of extproc's page that are summed up, by the counter that they are recorded as.
_COUNTERS: Final[Mapping[str, str]] = {
    "configurations used": 'attache_config_reloads_total{result="applied"',
    "feed engines' reports": "attache_engine_reports_total{",
    "feed KV events": f'attache_kv_events_total{{result="received",server="default/{KV}"',
    "KV events not read": 'attache_kv_events_total{result="unreadable"',
}


class SoakSettings(msgspec.Struct, frozen=True):
    """``rate``: requests a second to honest models, and ``fill_rate`` until ``fill_s``, so that extproc's state of
    engines and models is full before memory is checked. ``hostile``: names of hostile engines. ``change_s`` and
    ``sample_s``: between two changes, and between two samples.
    """

    minutes: float
    models: int
    rate: float = 15.0
    fill_rate: float = 30.0
    fill_s: float = SoakLimits().warm_up_s
    hostile: tuple[str, ...] = ()
    hostile_rate: float = 2.0
    mixed_rate: float = 1.0
    engines: int = 3
    change_s: float = 1.0
    sample_s: float = 10.0
    seed: int = 0


class ProbeTarget(msgspec.Struct, frozen=True):
    """A model name for requests, and the mark of its right answer."""

    echoes: frozenset[str]
    hosts: frozenset[str]


def probe_targets(model: SoakModel, before: SoakModel | None = None) -> dict[str, ProbeTarget]:
    """The model names for requests. Until a change is used, engines may still get the previous name."""
    echoes = model.engine_model_names | (before.engine_model_names if before is not None else frozenset())
    plain = ProbeTarget(echoes, model.hosts)
    return {model.public_name: plain} | {
        name: ProbeTarget(frozenset({name}), model.hosts) for name in model.adapter_names
    }


async def soak(settings: SoakSettings, directory: Path, stop: asyncio.Event) -> SoakRecord:
    """Run until the time is over, something ends, or ``stop``. Raises StartFailed and EnvoyMissing."""
    models = model_changes.initial_models(settings.models, settings.engines)
    size = settings.models + model_changes.spare_model_count(settings.models)
    async with (
        running_gateway(
            directory, models, size=size, engine_count=settings.engines, hostile=settings.hostile
        ) as gateway,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        run = _Soak(settings, gateway, http, models, stop)
        await run.run()
    run.record.log_lines = await asyncio.to_thread(find_log_errors, directory)
    return run.record


class _Soak:
    """``known``: names that were seen to be served, and that are not about to go."""

    def __init__(
        self,
        settings: SoakSettings,
        gateway: SoakGateway,
        http: aiohttp.ClientSession,
        models: dict[int, SoakModel],
        stop: asyncio.Event,
    ) -> None:
        self.record = SoakRecord(settings.models, 0.0, settings.hostile)
        self._settings, self._gateway, self._http, self._fleet, self._stop = settings, gateway, http, models, stop
        self._clock = asyncio.get_running_loop().time
        self._began_at_s = self._clock()
        self._client = SoakClient(gateway.url, http, self._began_at_s)
        self._rng = random.Random(settings.seed)
        self._known = {name: one for model in models.values() for name, one in probe_targets(model).items()}
        self._known[KV] = ProbeTarget(frozenset({KV}), frozenset())
        self._names = sorted(self._known)
        self._pending: dict[str, tuple[ConfigAdoption, str | None]] = {}
        self._reports: dict[str, ConfigReport] = {}
        self._outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._firsts: list[float] = []
        self._slowest_page_s = 0.0
        self._probes: set[asyncio.Task[None]] = set()

    @property
    def _now_s(self) -> float:
        return self._clock() - self._began_at_s

    async def run(self) -> None:
        """All loops, until the time is over."""
        loops = [asyncio.create_task(one) for one in (self._change(), self._follow_reports(), self._sample())]
        load = asyncio.create_task(self._load())
        try:
            timer = asyncio.get_running_loop().call_later(60 * self._settings.minutes, self._stop.set)
            waits = asyncio.create_task(self._stop.wait())
            done, _ = await asyncio.wait([waits, load, *loops], return_when=asyncio.FIRST_COMPLETED)
            timer.cancel()
            self.record.seconds = self._now_s
            if waits in done and self.record.seconds < 59 * self._settings.minutes and not self.record.stopped_by:
                self.record.stopped_by = f"stopped after {self.record.seconds:.0f} s"
            self._stop.set()
            await load
            for one in done:
                one.result()
            await self._take_sample()
            if self._settings.hostile:
                trap = f"http://{TRAP_HOST}:{self._gateway.hostile_port}{TRAPPED_PATH}"
                self.record.trapped = int(await self._page(trap))
        finally:
            for task in (load, waits, *loops, *self._probes):
                task.cancel()
            await asyncio.gather(load, waits, *loops, *self._probes, return_exceptions=True)

    # load

    async def _load(self) -> None:
        """Requests at an even rate, whatever becomes of those before; ends when all have their answers."""
        settings, rng = self._settings, random.Random(self._settings.seed + 1)
        rates: dict[Audience, float] = {"honest": settings.rate}
        if settings.hostile:
            rates["hostile"] = settings.hostile_rate
        if MIXED in settings.hostile:
            rates["mixed"] = settings.mixed_rate
        number, due_s = 0, 0.0
        async with asyncio.TaskGroup() as tasks:
            open_now: set[asyncio.Task[RequestOutcome]] = set()
            while not self._stop.is_set():
                number += 1
                rates["honest"] = settings.fill_rate if due_s < settings.fill_s else settings.rate
                (audience,) = rng.choices(list(rates), list(rates.values()))
                if len(open_now) < _MOST_OPEN:
                    task = tasks.create_task(self._ask(self._question(audience, number, rng)))
                    open_now.add(task)
                    task.add_done_callback(open_now.discard)
                else:
                    self._outcomes[audience]["not sent"] += 1
                due_s += 1 / sum(rates.values())
                await asyncio.sleep(max(0.0, self._began_at_s + due_s - self._clock()))

    def _question(self, audience: Audience, number: int, rng: random.Random) -> SoakRequest:
        if audience == "mixed":
            return SoakRequest(audience, MIXED_NAME, number)
        if audience == "hostile":
            name = rng.choice(self._settings.hostile)
            loads = HOSTILE[name].loads_adapters
            return SoakRequest(audience, adapter_of(name) if loads else name, number, leaves=rng.random() < 0.1)
        name = KV if rng.random() < 0.15 else rng.choice(list(self._known))
        target = self._known[name]
        (api,) = rng.choices(list(APIS), [7, 1, 1, 1])
        return SoakRequest(
            audience,
            name,
            number,
            api=api,
            is_streamed=rng.random() < 0.8,
            leaves=rng.random() < 0.03,
            echoes=target.echoes,
            hosts=target.hosts,
        )

    async def _ask(self, question: SoakRequest) -> RequestOutcome:
        """Send a request, and record its outcome."""
        outcome = await self._client.ask(question)
        audience = question.audience
        result = classify_outcome(question, outcome, is_gone=question.model not in self._known)
        self._outcomes[audience][result] += 1
        self.record.totals.setdefault(audience, {}).setdefault(result, 0)
        self.record.totals[audience][result] += 1
        if audience == "honest" and outcome.first_s:
            self._firsts.append(outcome.first_s)
        if result == "lost" and len(self.record.losses) < _MOST_LOSSES:
            self.record.losses.append(LostRequest(outcome.at_s, audience, question.model, question.api, outcome.error))
        return outcome

    # changes

    async def _change(self) -> None:
        """A change of the directory every second; every so often one that must be refused."""
        settings, number = self._settings, 0
        next_at_s = self._clock()
        while True:
            next_at_s = max(next_at_s + settings.change_s, self._clock())
            await asyncio.sleep(next_at_s - self._clock())
            number += 1
            if number % BROKEN_EVERY == BROKEN_EVERY // 2:
                await self._break(number // BROKEN_EVERY)
            else:
                change = model_changes.next_change(
                    self._fleet, self._rng, size=settings.models, engines=settings.engines
                )
                self._apply(change)

    def _apply(self, change: ModelChange) -> None:
        before, after = change.before, change.after
        model = after or before
        assert model is not None
        had = {} if before is None else probe_targets(before)
        has = {} if after is None else probe_targets(after, before)
        gone = had.keys() - has.keys()
        for name in gone:
            self._known.pop(name, None)
        text = None if after is None else model_changes.model_file_content(after, self._gateway.ports)
        self._gateway.write(model.file, text)
        self._fleet = model_changes.apply_change(self._fleet, change)
        adoption = ConfigAdoption(change.name, model.file, self._now_s)
        self.record.uptakes.append(adoption)
        if model.file in self._pending:
            self._pending[model.file][0].is_superseded = True
        self._pending[model.file] = adoption, None if text is None else content_digest(text.encode())
        for name, target in has.items():
            if name in self._known:
                self._known[name] = target
            elif name not in had:
                self._start(self._probe_new(name, target, model.number, adoption))
        if after is None and before is not None:
            self._start(self._probe_gone(before.public_name, adoption))

    def _start(self, probe: Any) -> None:  # noqa: ANN401 - a coroutine
        task = asyncio.create_task(probe)
        self._probes.add(task)
        task.add_done_callback(self._probes.discard)

    async def _probe_new(self, name: str, target: ProbeTarget, number: int, adoption: ConfigAdoption) -> None:
        """Request a new name until it is served; from then on the load uses it. Until then, only "unknown" is a valid
        answer.
        """
        pause_s = _PROBE_S
        while (model := self._fleet.get(number)) is not None and name in probe_targets(model):
            question = SoakRequest(
                "known", name, 0, echoes=target.echoes | model.engine_model_names, hosts=target.hosts
            )
            outcome = await self._ask(question)
            # the model may have changed again during the request
            model = self._fleet.get(number)
            if not outcome.error and model is not None and (now := probe_targets(model).get(name)) is not None:
                adoption.client_s = outcome.at_s - adoption.at_s
                self._known[name] = ProbeTarget(target.echoes | now.echoes, now.hosts)
                return
            await asyncio.sleep(pause_s)
            pause_s = min(SoakLimits().probe_s, 1.2 * pause_s)

    async def _probe_gone(self, name: str, adoption: ConfigAdoption) -> None:
        """Request a deleted name until it is unknown. Until then, only a normal answer is valid."""
        outcome = await self._ask(SoakRequest("known", name, 0))
        while outcome.status != 404:
            await asyncio.sleep(_PROBE_S)
            outcome = await self._ask(SoakRequest("known", name, 0))
        adoption.client_s = outcome.at_s - adoption.at_s

    async def _break(self, number: int) -> None:
        """Break a model's file, see both refuse it while its model is served, and mend it."""
        what = list(BROKEN)[number % len(BROKEN)]
        model = self._rng.choice(list(self._fleet.values()))
        refusal = BrokenFileRefusal(what, self._now_s)
        self._gateway.write(model.file, BROKEN[what])
        refusal.extproc_s = await self._seen("extproc", is_refused=True)
        refusal.bundle_s = await self._seen("bundle", is_refused=True)
        if (target := self._known.get(model.public_name)) is not None:
            await self._ask(SoakRequest("honest", model.public_name, number, echoes=target.echoes, hosts=target.hosts))
        self._gateway.write(model.file, model_changes.model_file_content(model, self._gateway.ports))
        # the whole directory was refused, with the changes before
        for adoption, _ in self._pending.values():
            adoption.at_s = self._now_s
        mended = [await self._seen(one, is_refused=False) for one in ("extproc", "bundle")]
        if None not in mended:
            refusal.mended_s = self._now_s - refusal.at_s
        self.record.refusals.append(refusal)

    async def _seen(self, process: str, *, is_refused: bool) -> float | None:
        """Seconds until a process's report has the change; None if that takes a minute."""
        began_at_s = self._clock()
        while self._clock() - began_at_s < _REFUSAL_S:
            report = self._reports.get(process)
            if report is not None and bool(report.refused) == is_refused:
                return self._clock() - began_at_s
            await asyncio.sleep(0.1)
        return None

    # what is used

    async def _follow_reports(self) -> None:
        """Read twice a second which files extproc uses, and which Envoy, by the bundle's word."""
        pages = {"extproc": self._gateway.extproc, "bundle": self._gateway.bundle}
        while True:
            for name, url in pages.items():
                asked_at_s = self._clock()
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):  # the samples show whether it runs
                    self._reports[name] = msgspec.json.decode(await self._page(url + REPORT_PATH), type=ConfigReport)
                if name == "extproc":
                    self._slowest_page_s = max(self._slowest_page_s, self._clock() - asked_at_s)
            self._match()
            await asyncio.sleep(_REPORT_S)

    def _match(self) -> None:
        for file, (adoption, digest) in list(self._pending.items()):
            taken_s = self._now_s - adoption.at_s
            extproc, bundle = (self._reports.get(name) for name in ("extproc", "bundle"))
            if adoption.extproc_s is None and extproc is not None and extproc.files.get(file) == digest:
                adoption.extproc_s = taken_s
            if adoption.envoy_s is None and bundle is not None and bundle.files.get(file) == digest:
                adoption.envoy_s = taken_s
            if adoption.extproc_s is not None and adoption.envoy_s is not None:
                del self._pending[file]

    async def _page(self, url: str) -> bytes:
        async with self._http.get(url, timeout=_PAGE_TIMEOUT) as response:
            return await response.read()

    # samples

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(self._settings.sample_s)
            ended = [name for name in JUDGED if not self._gateway.processes.is_running(name)]
            if not ended:
                await self._take_sample()
                held = self.record.samples[-1].processes
                ended = [name for name, one in held.items() if one.rss_bytes > _MOST_RSS_BYTES]
            if ended:
                self.record.ended = [f"{name} ended or took all memory before {self._now_s:.0f} s" for name in ended]
                self.record.stopped_by = f"{' and '.join(ended)} did not last"
                self._stop.set()
                return

    async def _take_sample(self) -> None:
        processes = {
            name: sample_process(self._gateway.processes.pid(name))
            for name in JUDGED
            if self._gateway.processes.is_running(name)
        }
        firsts, self._firsts = sorted(self._firsts), []
        outcomes, self._outcomes = self._outcomes, defaultdict(Counter)
        slowest_page_s, self._slowest_page_s = self._slowest_page_s, 0.0
        self.record.samples.append(
            Sample(
                at_s=self._now_s,
                processes=processes,
                outcomes={who: dict(counts) for who, counts in outcomes.items()},
                latency=latency_percentiles(firsts),
                counters=await self._counters(),
                slowest_page_s=slowest_page_s,
            )
        )

    async def _counters(self) -> dict[str, float]:
        """Of extproc and of Envoy; those of a process whose pages do not answer are missing."""
        found: dict[str, float] = {}
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            page = (await self._page(f"{self._gateway.extproc}/metrics")).decode()
            found = {name: sum_series(page, prefix) for name, prefix in _COUNTERS.items()}
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            stats = await self._page(f"{self._gateway.admin}/stats?filter=update_(rejected|failure|success)$")
            for kind in ("rejected", "failure", "success"):
                found[f"envoy {kind}"] = sum_series(stats.decode(), "", f"update_{kind}:")
        return found


def sum_series(page: str, prefix: str, word: str = "") -> float:
    """The sum of the values of the lines that begin with ``prefix`` and have ``word``."""
    lines = (line for line in page.splitlines() if line.startswith(prefix) and word in line and line[:1] != "#")
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def latency_percentiles(firsts: list[float]) -> Latency:
    """Of times in rising order; zeros if there are none."""
    if len(firsts) < 2:
        return Latency(*(firsts or [0.0]) * 3)
    cuts = statistics.quantiles(firsts, n=100, method="inclusive")
    return Latency(cuts[49], cuts[98], firsts[-1])


def sample_process(pid: int) -> ProcessSample:
    """A process as it is now."""
    folder = Path(f"/proc/{pid}")
    return ProcessSample(
        rss_bytes=rss_bytes(pid),
        cpu_s=cpu_seconds(pid),
        fds=sum(1 for _ in (folder / "fd").iterdir()),
        threads=sum(1 for _ in (folder / "task").iterdir()),
    )


def find_log_errors(logs: Path) -> list[str]:
    """What the judged processes' logs must not have: tracebacks, by their errors, and lines of bugs; with counts."""
    found: Counter[str] = Counter()
    for file in (logs / f"{name}.log" for name in JUDGED):
        is_traced = False
        with file.open(errors="replace") as lines:
            for line in lines:
                # a traceback's last line has the error
                if is_traced and (error := _ERROR.match(line)) is not None:
                    is_traced = False
                    found[f"{file.name}: {error[1][:200]}"] += 1
                elif any(word in line for word in _BAD_LOG):
                    found[f"{file.name}: {line.strip()[:200]}"] += 1
                is_traced = is_traced or _TRACEBACK in line
    return [f"{text} ({count} times)" for text, count in found.most_common(_MOST_LOG_LINES)]

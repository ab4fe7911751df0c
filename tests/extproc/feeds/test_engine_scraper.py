# SPDX-License-Identifier: Apache-2.0
"""Scraping engines over real HTTP."""

from __future__ import annotations

import asyncio
import gc
import random
import ssl
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import load_snapshot
from extproc.core.core import Core
from extproc.engines.metrics import LoraState
from extproc.feeds import engine_scraper
from extproc.feeds.engine_http import EngineCredentials
from extproc.feeds.engine_scraper import EngineScraper, back_off_s
from extproc.llmd.picker_builder import PickerFactory
from extproc.metrics.request_metrics import Metrics
from tests.certificates import Authority
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from extproc.core.peer_events import EngineReported
    from extproc.scheduling.pool import Pool

CONFIG = """
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {{name: llama}}
spec:
  model: llama
  scrapeInterval: 20ms
  endpoints: [{endpoints}]
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {{name: chat}}
spec:
  modelName: chat
  loraAdapters: [sql]
  rules: [{{targetModels: [{{modelServerName: llama}}]}}]
"""


class Engine:
    """A server of metrics pages that can be changed."""

    def __init__(self) -> None:
        self.waiting = 2
        self.count = 10
        self.models = ["llama"]
        # the whole list, if not empty
        self.models_text = ""
        self.status = 200
        self.asked = self.listed = 0
        # the whole page, if not empty
        self.text = ""
        self.path = "/metrics"

    def page(self) -> str:
        return self.text or (
            f'vllm:num_requests_waiting{{engine="0"}} {self.waiting}\n'
            f'vllm:num_requests_running{{engine="0"}} 1\nvllm:kv_cache_usage_perc{{engine="0"}} 0.5\n'
            f'vllm:time_to_first_token_seconds_sum{{engine="0"}} {self.count}\n'
            f'vllm:time_to_first_token_seconds_count{{engine="0"}} {self.count}\n'
            'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1\n'
        )

    async def metrics(self, _: web.Request) -> web.Response:
        self.asked += 1
        return web.Response(text=self.page(), status=self.status)

    async def list(self, _: web.Request) -> web.Response:
        self.listed += 1
        if self.models_text:
            return web.Response(text=self.models_text)
        return web.json_response({"data": [{"id": name} for name in self.models]})


@asynccontextmanager
async def scraped(
    engine: Engine, *more: str, config: str = CONFIG, before: Callable[[EngineReported], None] = lambda _: None
) -> AsyncIterator[tuple[Pool, Metrics, Core, str]]:
    """``before``: gets each report before the core does."""
    app = web.Application()
    app.add_routes([web.get(engine.path, engine.metrics), web.get("/v1/models", engine.list)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    address = f"127.0.0.1:{runner.addresses[0][1]}"
    endpoints = ", ".join(f'{{address: "{one}"}}' for one in (address, *more))
    core = Core(
        load_snapshot({"a.yaml": config.format(endpoints=endpoints).encode()}),
        rng=random.Random(0),
        ticket_prefix="t",
        make_picker=PickerFactory(),
    )
    clock = asyncio.get_running_loop().time
    metrics = Metrics(core.pools.values, lambda: 0.0, clock)

    def deliver(event: EngineReported) -> None:
        before(event)
        core.on_engine_report(event, clock())

    scraper = EngineScraper(
        core,
        metrics,
        access=EngineCredentials({}, clock),
        clock=clock,
        rng=random.Random(0),
        deliver=deliver,
    )
    task = asyncio.create_task(scraper.run())
    try:
        yield core.pools["default/llama"], metrics, core, address
    finally:
        task.cancel()
        await asyncio.wait([task])
        await runner.cleanup()


async def test_pools_receive_engines_reports() -> None:
    engine = Engine()
    async with scraped(engine) as (pool, _, _, _):
        await eventually(lambda: pool.table.waiting[0] == 2 and pool.table.loras[0].served is not None)
        assert pool.table.running[0] == 1
        assert pool.table.kv_usage[0] == 0.5
        assert pool.table.loras[0].served == frozenset({"llama"})
        assert pool.caches.index.first_block_bytes == 64
        engine.waiting = 9
        await eventually(lambda: pool.table.waiting[0] == 9)


async def test_pools_know_the_longest_prompt_that_engines_list() -> None:
    engine = Engine()
    engine.models_text = '{"data": [{"id": "llama", "max_model_len": 4096}]}'
    engine.text = (
        engine.page() + 'vllm:lora_requests_info{max_lora="4",running_lora_adapters="",waiting_lora_adapters=""} 1\n'
    )
    async with scraped(engine) as (pool, _, _, _):
        await eventually(lambda: pool.max_prompt_tokens() == 4096)
        asked = engine.asked
        await eventually(lambda: engine.asked > asked + 3)
        assert pool.table.loras[0].max_active == 4
        assert pool.max_prompt_tokens() == 4096


async def test_a_restart_empties_the_index_of_its_cache() -> None:
    engine = Engine()
    async with scraped(engine) as (pool, _, _, _):
        await eventually(lambda: pool.table.reported_at_s[0] > 0)
        pool.caches.index.record(0, [32, 64], 0.0)
        engine.count = 1
        await eventually(lambda: pool.caches.index.blocks_held(0) == 0)


async def test_a_failing_engine_is_scraped_less_often_and_the_others_go_on() -> None:
    engine = Engine()
    async with scraped(engine, "127.0.0.1:1") as (pool, metrics, _, _):
        await eventually(lambda: engine.asked >= 10)
        failed = metrics.registry.get_sample_value(
            "attache_engine_reports_total", {"server": "default/llama", "result": "failed"}
        )
        assert failed is not None
        assert 1 <= failed <= 6
        assert not pool.table.has_reported(1)
        engine.status = 500
        await eventually(
            lambda: (
                (
                    metrics.registry.get_sample_value(
                        "attache_engine_reports_total", {"server": "default/llama", "result": "failed"}
                    )
                    or 0
                )
                > failed
            )
        )
        assert pool.table.waiting[0] == 2, "what was known stays, and grows old"
        engine.status, engine.waiting = 200, 5
        await eventually(lambda: pool.table.waiting[0] == 5)


def test_an_engine_that_is_back_is_read_within_two_seconds_however_long_it_was_away() -> None:
    pauses = [0.2]
    for _ in range(20):
        pauses.append(back_off_s(pauses[-1], 0.2))
    assert pauses[:5] == [0.2, 0.4, 0.8, 1.6, 2.0]
    assert pauses[-1] == 2.0
    assert back_off_s(5.0, 5.0) == 5.0, "of very many engines"


async def test_a_removed_endpoint_is_not_scraped() -> None:
    engine = Engine()
    async with scraped(engine) as (_, _, core, _):
        await eventually(lambda: engine.asked > 2)
        core.apply(load_snapshot({"a.yaml": CONFIG.format(endpoints="").encode()}), 0.0)
        await asyncio.sleep(0.3)
        asked = engine.asked
        await asyncio.sleep(0.15)
        assert engine.asked == asked


async def test_a_removed_endpoint_leaves_nothing_to_the_collector() -> None:
    """Else readers and buffers of each engine that came and went would stay until a collection of all objects."""

    def there() -> Counter[str]:
        names = Counter(type(one).__name__ for one in gc.get_objects())
        return Counter({kind: names[kind] for kind in ("_Poll", "KeptConnection", "MetricsReader")})

    engine = Engine()
    gc.collect()
    # those of other tests, which something may keep
    before = there()
    async with scraped(engine) as (_, _, core, _):
        await eventually(lambda: engine.asked > 2)
        gc.collect()
        gc.disable()
        try:
            core.apply(load_snapshot({"a.yaml": CONFIG.format(endpoints="").encode()}), 0.0)
            await eventually(lambda: there() <= before)
        finally:
            gc.enable()


async def test_a_page_without_a_known_metric_is_no_report(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.text = "<html>It works!</html>"
    async with scraped(engine) as (pool, metrics, _, _):
        await eventually(lambda: engine.asked >= 3)
        assert not pool.table.has_reported(0), "zeros would make it look idle"
        labels = {"server": "default/llama", "result": "failed"}
        assert metrics.registry.get_sample_value("attache_engine_reports_total", labels)
        said = [one.getMessage() for one in caplog.records if "no metric of vLLM" in one.getMessage()]
        assert len(said) == 1, "a warning comes once"
        assert "set 'engine' of its ModelServer" in said[0]
        engine.text = ""
        await eventually(lambda: pool.table.has_reported(0))


async def test_another_failure_is_another_warning(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.text = "nothing known"

    def warnings() -> list[str]:
        return [one.getMessage() for one in caplog.records if "cannot scrape" in one.getMessage()]

    async with scraped(engine):
        await eventually(lambda: len(warnings()) == 1)
        engine.status = 500
        await eventually(lambda: len(warnings()) == 2)
        assert "500" in warnings()[1]


TRTLLM = """trtllm_num_requests_running{model_name="m"} 6
trtllm_num_requests_waiting{model_name="m"} 3
trtllm_kv_cache_utilization{model_name="m"} 0.9
"""


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ("engine: TensorRT-LLM", "/prometheus/metrics"),
        ("engine: TensorRT-LLM\n  metricsPath: /metrics", "/metrics"),
        ("engine: TensorRT-LLM\n  metricsPath: /engines/7/metrics?format=text", "/engines/7/metrics"),
    ],
)
async def test_metrics_are_where_the_engine_shows_them_or_where_the_server_says(fields: str, path: str) -> None:
    engine = Engine()
    engine.path, engine.text = path, TRTLLM
    config = CONFIG.replace("  model: llama\n", f"  model: llama\n  {fields}\n")
    async with scraped(engine, config=config) as (pool, _, _, _):
        await eventually(lambda: pool.table.waiting[0] == 3)
        assert pool.table.running[0] == 6
        assert pool.table.kv_usage[0] == 0.9


@asynccontextmanager
async def page_elsewhere(text: str, context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """The port of a page that has nothing but metrics, as a sidecar's."""

    async def show(_: web.Request) -> web.Response:
        return web.Response(text=text)

    app = web.Application()
    app.add_routes([web.get("/metrics", show)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


ELSEWHERE = 'vllm:num_requests_waiting{model_name="m"} 7\nvllm:num_requests_running{model_name="m"} 1\n'


async def test_metrics_may_have_a_port_of_their_own_and_models_stay_on_the_endpoints() -> None:
    engine = Engine()
    engine.models = ["llama", "sql"]
    async with page_elsewhere(ELSEWHERE) as port:
        config = CONFIG.replace("  model: llama\n", f"  model: llama\n  metricsPort: {port}\n")
        async with scraped(engine, config=config) as (pool, metrics, _, _):
            await eventually(lambda: pool.table.waiting[0] == 7 and pool.table.loras[0].served is not None)
            assert pool.table.loras[0].served == frozenset({"llama", "sql"})
            reads = metrics.registry.get_sample_value
            labels = {"server": "default/llama", "result": "read"}
            known = reads("attache_engine_reports_total", labels) or 0
            await eventually(lambda: (reads("attache_engine_reports_total", labels) or 0) > known + 3)
            assert engine.asked == 0


SOURCE = """
---
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
  - {{type: metrics-data-source, parameters: {parameters}}}
  - {{type: random-picker}}
"""


def source_of(parameters: str) -> str:
    """A file with such a source, as text that is formatted."""
    return SOURCE.replace("{parameters}", parameters.replace("{", "{{").replace("}", "}}"))


@pytest.mark.parametrize(
    "parameters",
    [
        "{port: PORT}",
        "{port: PORT, scheme: https}",
        "{port: PORT, scheme: https, insecureSkipVerify: false, caCertPath: AUTHORITY, interval: 10ms}",
        "{port: PORT, scheme: https, clientCertPath: CERT, clientKeyPath: KEY}",
    ],
)
async def test_llm_ds_source_of_metrics_says_where_they_are(tmp_path: Path, parameters: str) -> None:
    authority, clients = Authority("engines"), Authority("clients")
    files = authority.issue(ips=["127.0.0.1"]).write(tmp_path, "engine")
    shown = clients.issue("scraper").write(tmp_path, "client")
    (tmp_path / "ca.pem").write_bytes(authority.cert)
    (tmp_path / "clients.pem").write_bytes(clients.cert)
    context = None
    if "https" in parameters:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files["certFile"], files["keyFile"])
    if context is not None and "clientCertPath" in parameters:
        context.load_verify_locations(tmp_path / "clients.pem")
        context.verify_mode = ssl.CERT_REQUIRED
    async with page_elsewhere(ELSEWHERE, context) as port:
        names = {"PORT": str(port), "AUTHORITY": str(tmp_path / "ca.pem"), "CERT": shown["certFile"]}
        names["KEY"] = shown["keyFile"]
        for name, value in names.items():
            parameters = parameters.replace(name, value)
        config = CONFIG.replace("  model: llama\n", "  model: llama\n  pickerConfig: a.yaml\n")
        async with scraped(Engine(), config=config + source_of(parameters)) as (pool, _, _, _):
            await eventually(lambda: pool.table.waiting[0] == 7)


async def test_a_certificate_of_another_authority_is_not_taken(tmp_path: Path) -> None:
    files = Authority("engines").issue(ips=["127.0.0.1"]).write(tmp_path, "engine")
    (tmp_path / "ca.pem").write_bytes(Authority("others").cert)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["certFile"], files["keyFile"])
    parameters = f"{{scheme: https, insecureSkipVerify: false, caCertPath: {tmp_path / 'ca.pem'}, port: "
    async with page_elsewhere(ELSEWHERE, context) as port:
        config = CONFIG.replace("  model: llama\n", "  model: llama\n  pickerConfig: a.yaml\n")
        async with scraped(Engine(), config=config + source_of(f"{parameters}{port}}}")) as (pool, metrics, _, _):
            labels = {"server": "default/llama", "result": "failed"}
            await eventually(lambda: metrics.registry.get_sample_value("attache_engine_reports_total", labels) == 1)
            assert pool.table.waiting[0] == 0


SGLANG = "sglang:num_running_reqs 4\nsglang:num_queue_reqs 3\nsglang:token_usage 0.25\n"


@pytest.mark.parametrize("label", ["llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type"])
async def test_engines_of_one_pool_may_be_of_several_types(label: str) -> None:
    engine = Engine()
    async with page_elsewhere(SGLANG) as port:
        config = CONFIG.replace(
            "[{endpoints}]", f'[{{endpoints}}, {{{{address: "127.0.0.1:{port}", labels: {{{{{label}: sglang}}}}}}}}]'
        )
        async with scraped(engine, config=config) as (pool, _, _, _):
            await eventually(lambda: pool.table.waiting[0] == 2 and pool.table.waiting[1] == 3)
            assert pool.table.kv_usage.tolist()[:2] == [0.5, 0.25]


async def test_an_engine_of_a_type_with_few_metrics_keeps_no_other_from_being_read() -> None:
    typed = '{{address: "127.0.0.1:1", labels: {{llm-d.ai/engine-type: triton}}}}'
    async with scraped(Engine(), config=CONFIG.replace("[{endpoints}]", f"[{typed}, {{endpoints}}]")) as (pool, *_):
        await eventually(lambda: pool.table.waiting[1] == 2)


@pytest.mark.parametrize("path", ["metrics", "", "/a b", "/a\\r\\nx-evil: 1", "/é"])
def test_a_path_that_cannot_stand_in_a_request_is_refused(path: str) -> None:
    config = CONFIG.replace("  model: llama\n", f'  model: llama\n  metricsPath: "{path}"\n')
    with pytest.raises(ConfigInvalid, match="metricsPath"):
        load_snapshot({"a.yaml": config.format(endpoints='{address: "127.0.0.1:1"}').encode()})


async def test_adapters_are_read_though_no_route_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a gateway with one pool there are no routes, and plugins ask for the state of adapters all the same."""
    monkeypatch.setattr(engine_scraper, "_MODELS_LONG_INTERVAL_S", 0.2)
    engine = Engine()
    engine.models = ["llama", "poet"]
    engine.text = engine.page() + (
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="poet",waiting_lora_adapters="sql"} 7\n'
    )
    config = CONFIG.partition("---")[0]
    async with scraped(engine, config=config) as (pool, _, _, _):
        await eventually(lambda: pool.table.loras[0].served is not None and bool(pool.table.loras[0].active))
        assert pool.table.loras[0] == LoraState(
            active=frozenset({"poet"}),
            waiting=frozenset({"sql"}),
            max_active=4,
            served=frozenset({"llama", "poet"}),
            base=frozenset({"llama", "poet"}),
        )
        assert pool.adapters == frozenset()
        eligible = pool.rows_that_may_serve("poet", None)
        assert eligible is not None
        assert eligible[0]
        # one that is loaded later is seen, too
        engine.models.append("new")
        await eventually(lambda: "new" in (pool.table.loras[0].served or ()))


async def raw_server(answer: bytes) -> tuple[asyncio.Server, str]:
    """Gives this answer to every request."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.read(65536):
                writer.write(answer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    return server, f"{host}:{port}"


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (HEAD + b"-6\r\nabc\r\n0\r\n\r\n", "a chunk's size is -6"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9999999\r\n\r\n", "more than 4194304 bytes"),
        (b"HTTP/1.1 307 X\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n", "answered HTTP/1.1 307"),
        (
            HEAD + b"8000\r\n" + b"vllm:num_requests_waiting 1\n" * 1170 + b"12345678\r\n0\r\n\r\n",
            "more than 1024 series",
        ),
    ],
)
async def test_an_engine_whose_pages_are_refused_backs_off_and_the_others_are_scraped(
    answer: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    server, address = await raw_server(answer)
    engine = Engine()
    async with server, scraped(engine, address) as (pool, metrics, _, _):
        await eventually(lambda: engine.asked >= 15 and pool.table.waiting[0] == 2)
        labels = {"server": "default/llama", "result": "failed"}
        assert 1 <= (metrics.registry.get_sample_value("attache_engine_reports_total", labels) or 0) <= 8
        assert not pool.table.has_reported(1)
        said = [one.getMessage() for one in caplog.records if "cannot scrape" in one.getMessage()]
        assert len(said) == 1, "a warning comes once"
        assert why in said[0]


@pytest.mark.parametrize("fails_on", ["metrics", "models"])
async def test_our_own_failure_on_one_engine_is_logged_once_and_it_is_scraped_again(
    fails_on: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine, other = Engine(), Engine()
    is_broken = True

    def fail(event: EngineReported) -> None:
        if is_broken and event.address == broken and (event.models is None) is (fails_on == "metrics"):
            raise ZeroDivisionError("of this test")

    app = web.Application()
    app.add_routes([web.get("/metrics", other.metrics), web.get("/v1/models", other.list)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    broken = f"127.0.0.1:{runner.addresses[0][1]}"
    async with scraped(engine, broken, before=fail) as (pool, _, _, _):
        await eventually(
            lambda: engine.asked >= 15 and (other.asked >= 3 if fails_on == "metrics" else other.listed > 0)
        )
        assert pool.table.has_reported(1) is (fails_on == "models"), "metrics do not depend on the list of models"
        traced = [one for one in caplog.records if one.exc_info and "of this test" in one.getMessage()]
        assert len(traced) == 1
        if fails_on == "metrics":
            is_broken = False
            await eventually(lambda: pool.table.has_reported(1))
    await runner.cleanup()


@pytest.mark.parametrize(
    "text", ['{"data":' + "[" * 100_000, "x" * 5_000_000, '{"data":[' + "{}," * 20_000 + "{}]}", "404"]
)
async def test_metrics_are_read_though_nobody_can_read_the_list_of_models(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine()
    engine.models_text = text
    async with scraped(engine) as (pool, _, _, _):
        await eventually(lambda: engine.listed == 1)
        asked = engine.asked
        await eventually(lambda: engine.asked >= asked + 5)
        assert pool.table.has_reported(0)
        assert pool.table.loras[0].served is None
        said = [one for one in caplog.records if one.levelname in {"WARNING", "ERROR"}]
        assert len(said) == 1
        assert "shows no list of its models" in said[0].getMessage()
        assert said[0].exc_info is None

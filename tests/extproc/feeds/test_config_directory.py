# SPDX-License-Identifier: Apache-2.0
"""Changes of the configuration directory, and what Envoy's admin interface lists."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from bench.stack.processes import free_ports
from extproc.api.config_loader import ConfigDirectory
from extproc.api.status_page_contents import ConfigReport, content_digest
from extproc.core.core import Core
from extproc.core.request_record import RequestHead
from extproc.feeds import config_directory as directory
from extproc.feeds.config_directory import DirectoryFeed, fetch_envoy_endpoints
from extproc.llmd.picker_builder import PickerFactory
from extproc.metrics.request_metrics import Metrics
from extproc.refusals import NoEndpoint
from extproc.scheduling.framework import ConfiguredPicker
from tests.extproc.conftest import CONFIG
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Mapping
    from pathlib import Path

    from extproc.core.request_record import Arrival


def assignment(cluster: str, *addresses: tuple[str, int]) -> dict[str, Any]:
    """As Envoy 1.40 dumps it."""
    endpoints = [
        {"endpoint": {"address": {"socket_address": {"address": ip, "port_value": port}}}, "health_status": "HEALTHY"}
        for ip, port in addresses
    ]
    localities = [{"locality": {}, "lb_endpoints": endpoints}] if endpoints else []
    kind = "type.googleapis.com/envoy.admin.v3.EndpointsConfigDump.DynamicEndpointConfig"
    return {"@type": kind, "endpoint_config": {"cluster_name": cluster, "endpoints": localities}}


@pytest.mark.parametrize(
    ("status", "page", "known"),
    [
        (
            200,
            {"configs": [assignment("server/a/b", ("10.0.0.1", 8000), ("fd00::1", 80)), assignment("server/a/c")]},
            {"a/b": {("10.0.0.1", 8000), ("fd00::1", 80)}, "a/c": set()},
        ),
        (200, {}, {}),
        (200, {"configs": [{}]}, {"": set()}),
        # no Envoy, or none that tells
        (200, {"configs": "something else"}, None),
        (302, {}, None),
        (404, {"configs": [assignment("server/a/b")]}, None),
    ],
)
async def test_what_it_says_of_servers(status: int, page: object, known: object) -> None:
    asked: list[str] = []

    async def dump(request: web.Request) -> web.Response:
        asked.append(request.query["name_regex"])
        # where it is followed, it comes back to this page
        return web.json_response(page, status=status, headers={"location": str(request.url)})

    app = web.Application()
    app.add_routes([web.get("/config_dump", dump)])
    runner = web.AppRunner(app)
    await runner.setup()
    (port,) = free_ports(1)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        assert await fetch_envoy_endpoints(f"0.0.0.0:{port}", {"a/c", "a/b.x"}) == known
    finally:
        await runner.cleanup()
    assert asked == [r"server/(a/b\.x|a/c)"]


async def test_a_page_that_is_nested_without_end_or_no_text_says_nothing() -> None:
    pages = iter((b'{"configs":' + b"[" * 100_000, b'{"x":' + b"[" * 100_000, b'{"configs":[{"x":"\xff"}]}', b""))

    async def dump(_: web.Request) -> web.Response:
        return web.Response(body=next(pages))

    app = web.Application()
    app.add_routes([web.get("/config_dump", dump)])
    runner, (port,) = web.AppRunner(app), free_ports(1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    for _ in range(4):
        assert not any((await fetch_envoy_endpoints(f"127.0.0.1:{port}", {"a/b"}) or {}).values())
    await runner.cleanup()


async def test_nobody_answers() -> None:
    (port,) = free_ports(1)
    assert await fetch_envoy_endpoints(f"127.0.0.1:{port}", {"a/b"}) is None


class Watched:
    def __init__(self, directory: Path) -> None:
        self.file = directory / "all.yaml"
        self.file.write_bytes(CONFIG)
        followed = ConfigDirectory(directory)
        snapshot = followed.read()
        self.core = Core(snapshot, rng=random.Random(0), ticket_prefix="t", make_picker=PickerFactory())
        self.metrics = Metrics(self.core.pools.values, lambda: 0.0, lambda: 0.0)
        self.now = 0.0
        # what Envoy answers, the last for ever; None: there is none
        self.envoy: list[Mapping[str, Collection[tuple[str, int]]] | None] = [None]
        self.feed = DirectoryFeed(
            followed,
            self.core,
            self.metrics,
            settle_s=0.3,
            apply=lambda new: self.core.apply(new, 0.0),
            clock=lambda: self.now,
            known_to_envoy=self.known_to_envoy,
        )
        self.feed.set_initial_snapshot(snapshot)

    async def known_to_envoy(
        self, admin: str, servers: Collection[str]
    ) -> Mapping[str, Collection[tuple[str, int]]] | None:
        """At the usual address there may be one that serves something else."""
        del admin, servers
        self.now += 1.0
        return self.envoy.pop(0) if len(self.envoy) > 1 else self.envoy[0]

    def names(self) -> list[str]:
        return [model.name for model in self.core.builder.models]

    def sample(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)

    async def until(self, holds: Callable[[], bool]) -> None:
        async def answer() -> bool:
            return holds()

        await eventually(answer)


@pytest.fixture
async def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    monkeypatch.setattr(directory, "_ASK_S", 0.02)
    one = Watched(tmp_path)
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(one.feed.watch())
        yield one
        watching.cancel()


async def test_a_replaced_file_is_applied(watched: Watched) -> None:
    fresh = watched.file.with_suffix(".new")
    fresh.write_bytes(CONFIG.replace(b"modelName: chat", b"modelName: talk"))
    fresh.replace(watched.file)

    await watched.until(lambda: watched.names() == ["talk", "sql"])
    assert watched.sample("attache_config_reloads_total", result="applied") == 2


@pytest.mark.parametrize("content", [b"", b"kind: [", CONFIG[: len(CONFIG) // 2], b"kind: ModelRoot\n"])
async def test_a_broken_or_half_written_file_changes_nothing_until_it_is_mended(
    watched: Watched, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    in_use = watched.feed.report.files
    assert in_use == {"all.yaml": content_digest(CONFIG)}
    watched.file.write_bytes(content)
    await watched.until(lambda: watched.sample("attache_config_valid") == 0)
    assert watched.names() == ["chat", "sql"]
    assert watched.feed.report.files == in_use
    assert "all.yaml" in watched.feed.report.refused
    assert not any("\n" in one.getMessage() for one in caplog.records)

    watched.file.write_bytes(CONFIG)
    await watched.until(lambda: watched.sample("attache_config_valid") == 1)
    assert watched.names() == ["chat", "sql"]
    assert watched.feed.report == ConfigReport(files=in_use)
    assert "which is in use, is what the directory has again" in caplog.records[-1].getMessage()


async def test_a_directory_that_is_gone_for_a_while_changes_nothing(watched: Watched) -> None:
    directory = watched.file.parent
    directory.rename(directory.with_name("away"))
    await watched.until(lambda: watched.sample("attache_config_valid") == 0)
    assert watched.names() == ["chat", "sql"]

    directory.with_name("away").rename(directory)
    await watched.until(lambda: watched.sample("attache_config_valid") == 1)


async def test_a_new_server_waits_until_envoy_knows_it_too(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[float, list[str]]] = []
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        waits.append((seconds, sorted(watched.core.pools)))
        await real_sleep(0.01)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    watched.file.write_bytes(CONFIG.split(b"---")[0].replace(b"name: llama}", b"name: other}") + b"---" + CONFIG)
    await watched.until(lambda: "default/other" in watched.core.pools)
    assert (0.3, ["default/llama"]) in waits

    waits.clear()
    watched.file.write_bytes(CONFIG.replace(b"modelName: chat", b"modelName: talk"))
    await watched.until(lambda: watched.names() == ["talk", "sql"])
    assert 0.3 not in {seconds for seconds, _ in waits}


async def test_changes_during_every_wait_keep_no_new_server_from_being_used(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = 0
    real_sleep = asyncio.sleep
    new = CONFIG.split(b"---")[0].replace(b"name: llama}", b"name: other}") + b"---" + CONFIG

    async def sleep(seconds: float) -> None:
        nonlocal waits
        if seconds == 0.3:
            waits += 1
            watched.file.write_bytes(new.replace(b"modelName: chat", b"modelName: chat%d" % waits))
        await real_sleep(0.01)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    watched.file.write_bytes(new)

    await watched.until(lambda: "default/other" in watched.core.pools)
    # and what came meanwhile is used next, without another wait
    await watched.until(lambda: watched.names() == ["chat1", "sql"])
    assert waits == 1


async def test_a_new_server_is_used_once_an_envoy_that_reads_slowly_has_it(watched: Watched) -> None:
    new = CONFIG.split(b"---")[0].replace(b"name: llama}", b"name: other}") + b"---" + CONFIG
    watched.envoy = [{}, {"default/llama": ()}, {"default/other": ()}]
    watched.file.write_bytes(new)
    await watched.until(lambda: "default/other" in watched.core.pools)
    assert watched.envoy == [{"default/other": ()}]
    assert watched.now == 3.0


async def test_a_server_that_envoy_never_has_is_not_waited_for_for_ever(watched: Watched) -> None:
    new = CONFIG.split(b"---")[0].replace(b"name: llama}", b"name: other}") + b"---" + CONFIG
    watched.envoy = [{}]
    watched.file.write_bytes(new)
    await watched.until(lambda: "default/other" in watched.core.pools)
    assert watched.now == 15.0


async def test_a_server_that_is_gone_again_before_envoy_has_it_is_not_waited_for(watched: Watched) -> None:
    new = CONFIG.split(b"---")[0].replace(b"name: llama}", b"name: %s}") + b"---" + CONFIG
    watched.envoy = [{}, {}, {}, {"default/third": ()}]
    watched.file.write_bytes(new % b"skipped")
    await watched.until(lambda: len(watched.envoy) < 4)
    watched.file.write_bytes(new % b"third")
    await watched.until(lambda: "default/third" in watched.core.pools)
    assert "default/skipped" not in watched.core.pools
    assert watched.now <= 5.0
    assert watched.sample("attache_config_reloads_total", result="applied") == 2


@pytest.fixture
def broken_at_once(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A directory with a new server, which is broken right after it was read first."""
    new = CONFIG.split(b"---")[0].replace(b"name: llama}", b"name: other}") + b"---" + CONFIG
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        if seconds == 0.3:
            watched.file.write_bytes(b"kind: [")
        await real_sleep(0.01)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    watched.envoy = [{}]
    watched.file.write_bytes(new)
    return new


async def test_a_new_server_that_envoy_lacks_is_not_used_while_the_directory_is_broken(
    watched: Watched, broken_at_once: bytes
) -> None:
    await watched.until(lambda: watched.now > 20.0)
    assert "default/other" not in watched.core.pools
    assert "all.yaml" in watched.feed.report.refused
    assert watched.sample("attache_config_valid") == 0

    # the process that configures Envoy takes a while for the mended one, too
    watched.envoy = [{}] * 8 + [{"default/other": ()}]
    watched.file.write_bytes(broken_at_once)
    await watched.until(lambda: "default/other" in watched.core.pools)
    assert len(watched.envoy) == 1
    await watched.until(lambda: watched.sample("attache_config_valid") == 1)


async def test_a_new_server_that_envoy_has_is_used_though_the_directory_is_broken_since(
    watched: Watched, broken_at_once: bytes
) -> None:
    del broken_at_once
    await watched.until(lambda: watched.now > 20.0)
    watched.envoy = [{"default/other": ()}]
    await watched.until(lambda: "default/other" in watched.core.pools)
    await watched.until(lambda: watched.sample("attache_config_valid") == 0)


async def test_what_is_read_while_a_server_is_waited_for_is_used_afterwards(watched: Watched) -> None:
    new = CONFIG.split(b"---")[0].replace(b"name: llama}", b"name: other}") + b"---" + CONFIG
    watched.envoy = [{}, {}, {}, {"default/other": ()}]
    watched.file.write_bytes(new)
    await watched.until(lambda: len(watched.envoy) < 4)
    watched.file.write_bytes(new.replace(b"modelName: chat", b"modelName: talk"))
    await watched.until(lambda: watched.names() == ["talk", "sql"])
    assert "default/other" in watched.core.pools


async def test_an_envoy_that_is_busy_for_a_moment_is_asked_again(watched: Watched) -> None:
    new = CONFIG.split(b"---")[0].replace(b"name: llama}", b"name: other}") + b"---" + CONFIG
    watched.envoy = [{}, None, None, {"default/other": ()}]
    watched.file.write_bytes(new)
    await watched.until(lambda: "default/other" in watched.core.pools)
    assert watched.now == 4.0


PICKER = b"""
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins: [{type: queue-scorer}, {type: random-picker}]
"""


async def test_a_picker_is_replaced_with_its_file_and_a_broken_one_is_refused(watched: Watched) -> None:
    file = watched.file.with_name("epp.yaml")
    file.write_bytes(PICKER)
    watched.file.write_bytes(CONFIG.replace(b"spec:\n  model:", b"spec:\n  pickerConfig: epp.yaml\n  model:"))

    def picker() -> object:
        return watched.core.pools["default/llama"].picker

    await watched.until(lambda: isinstance(picker(), ConfiguredPicker))
    pool = watched.core.pools["default/llama"]
    pool.table.in_flight[0] = 3
    file.write_bytes(PICKER.replace(b"random-picker", b"max-score-picker"))
    await watched.until(lambda: "MaxScore" in repr(picker()))
    assert watched.core.pools["default/llama"] is pool
    assert pool.table.in_flight[0] == 3, "what is known of the engines stays"
    file.write_bytes(PICKER.replace(b"queue-scorer", b"queue-scorr"))
    await watched.until(lambda: watched.sample("attache_config_valid") == 0)
    assert "MaxScore" in repr(picker())
    file.write_bytes(PICKER)
    await watched.until(lambda: "Random" in repr(picker()))


OTHER = CONFIG.split(b"---")[0].replace(b"name: llama}", b"name: other}")
HTTP_ROUTE = b"""---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: team}
spec:
  rules: [{backendRefs: [{group: attache.dev, kind: ModelServer, name: %s}]}]
"""


def chosen(watched: Watched, server: str) -> Arrival:
    """A request for which Envoy has chosen ``server``."""
    return watched.core.builder.build_for_server(server, RequestHead("GET", "/team", {}, has_body=False), b"")


async def test_a_server_that_leaves_as_its_http_route_moves_is_served_until_envoy_has_moved_too(
    watched: Watched,
) -> None:
    watched.file.write_bytes(OTHER + b"---" + CONFIG + HTTP_ROUTE % b"other")
    await watched.until(lambda: watched.core.asks_origin)
    pool = watched.core.pools["default/other"]
    watched.now = 100.0
    watched.file.write_bytes(CONFIG + HTTP_ROUTE % b"llama")
    await watched.until(lambda: watched.sample("attache_config_reloads_total", result="applied") == 3)
    # Envoy still has its former routes
    assert chosen(watched, "default/other").pool is pool

    watched.now = 104.9
    watched.file.write_bytes(CONFIG.replace(b"modelName: chat", b"modelName: talk") + HTTP_ROUTE % b"llama")
    await watched.until(lambda: watched.names() == ["talk", "sql"])
    assert chosen(watched, "default/other").pool is pool

    watched.now = 105.0
    await watched.until(lambda: "default/other" not in watched.core.pools)
    with pytest.raises(NoEndpoint):
        chosen(watched, "default/other")


async def test_a_server_that_left_is_served_while_the_directory_is_broken_as_envoy_may_not_have_moved(
    watched: Watched,
) -> None:
    watched.file.write_bytes(OTHER + b"---" + CONFIG + HTTP_ROUTE % b"other")
    await watched.until(lambda: watched.core.asks_origin)
    pool = watched.core.pools["default/other"]
    watched.now = 100.0
    watched.file.write_bytes(CONFIG + HTTP_ROUTE % b"llama")
    await watched.until(lambda: watched.sample("attache_config_reloads_total", result="applied") == 3)
    watched.file.write_bytes(b"kind: [")
    await watched.until(lambda: watched.sample("attache_config_valid") == 0)

    watched.now = 200.0
    watched.file.write_bytes(CONFIG.replace(b"modelName: chat", b"modelName: talk") + HTTP_ROUTE % b"llama")
    await watched.until(lambda: watched.names() == ["talk", "sql"])
    assert chosen(watched, "default/other").pool is pool
    watched.now = 205.0
    await watched.until(lambda: "default/other" not in watched.core.pools)


async def test_a_server_that_no_http_route_named_is_gone_at_once(watched: Watched) -> None:
    watched.file.write_bytes(OTHER + b"---" + CONFIG + HTTP_ROUTE % b"llama")
    await watched.until(lambda: "default/other" in watched.core.pools)
    watched.file.write_bytes(CONFIG + HTTP_ROUTE % b"llama")
    await watched.until(lambda: watched.sample("attache_config_reloads_total", result="applied") == 3)
    assert set(watched.core.pools) == {"default/llama"}


async def test_a_server_that_leaves_with_its_pickers_file_is_served_by_the_default_picker(watched: Watched) -> None:
    file = watched.file.with_name("epp.yaml")
    file.write_bytes(PICKER)
    other = OTHER.replace(b"spec:\n  model:", b"spec:\n  pickerConfig: epp.yaml\n  model:")
    watched.file.write_bytes(other + b"---" + CONFIG + HTTP_ROUTE % b"other")
    await watched.until(lambda: watched.core.asks_origin)
    pool = watched.core.pools["default/other"]
    assert isinstance(pool.picker, ConfiguredPicker)
    watched.file.write_bytes(CONFIG + HTTP_ROUTE % b"llama")
    file.unlink()
    await watched.until(lambda: not isinstance(pool.picker, ConfiguredPicker))
    assert chosen(watched, "default/other").pool is pool
    assert watched.sample("attache_config_valid") == 1


async def test_a_first_engine_is_used_once_envoy_knows_it_and_others_change_meanwhile(watched: Watched) -> None:
    text = CONFIG.decode()
    listed = text[text.index("endpoints: [") : text.index("]", text.index("endpoints: [")) + 1]

    def has(name: str) -> int:
        return len(watched.core.pools[name].table)

    watched.file.write_text(text.replace(listed, "endpoints: []"))
    await watched.until(lambda: not has("default/llama"))
    watched.file.write_text(text.replace("modelName: chat", "modelName: talk"))
    await watched.until(lambda: watched.names() == ["talk", "sql"])
    assert not has("default/llama")
    assert watched.feed.warming_servers == {"default/llama"}
    watched.now += 0.31
    await watched.until(lambda: bool(has("default/llama")))
    assert watched.feed.warming_servers == frozenset()

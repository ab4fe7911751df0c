# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from controller.agents.downloader.cache import WeightCache
from tests.controller.agents.downloader.downloads import MIB, Told, below, command, fetched, random_bytes
from tests.controller.agents.downloader.s3_server import s3_server
from tests.controller.agents.downloader.servers import Files, Hub, Proxy, Registry, WebHdfs, serving
from tests.examples import slow
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

LARGE = random_bytes(4 * MIB)
# requests of 256 KiB, two at a time: a crash costs at most these; their headers come on top
WORDS = ("--parallel", "2", "--part-size", "256Ki", "--keep-free", "1Mi")
LOST = 2 * 256 * 1024 + 100_000


Source = Callable[[], "contextlib.AbstractAsyncContextManager[tuple[Proxy, str, dict[str, str]]]"]


@contextlib.asynccontextmanager
async def http() -> AsyncIterator[tuple[Proxy, str, dict[str, str]]]:
    async with serving(Files({"/m.bin": LARGE}).answer) as host:
        proxy = Proxy(host)
        async with proxy.running() as front:
            yield proxy, f"http://{front}/m.bin", {}


@contextlib.asynccontextmanager
async def hub() -> AsyncIterator[tuple[Proxy, str, dict[str, str]]]:
    one = Hub({"m.bin": LARGE})
    async with one.running() as endpoint:
        proxy = Proxy(one.store_host)
        async with proxy.running() as front:
            one.store_host = front
            yield proxy, "hf://org/model", {"HF_ENDPOINT": endpoint}


@contextlib.asynccontextmanager
async def registry() -> AsyncIterator[tuple[Proxy, str, dict[str, str]]]:
    one = Registry()
    one.push("v1", [("application/octet-stream", "m.bin", LARGE)])
    async with one.running() as host:
        proxy = Proxy(one.store_host)
        async with proxy.running() as front:
            one.store_host = front
            yield proxy, f"oci://{host}/org/model:v1", {}


@contextlib.asynccontextmanager
async def hdfs() -> AsyncIterator[tuple[Proxy, str, dict[str, str]]]:
    one = WebHdfs({"/m/m.bin": LARGE}, user="u")
    async with one.running() as host:
        proxy = Proxy(one.data_host)
        async with proxy.running() as front:
            one.data_host = front
            yield proxy, f"hdfs://{host}/m", {"HADOOP_USER_NAME": "u"}


@contextlib.asynccontextmanager
async def s3() -> AsyncIterator[tuple[Proxy, str, dict[str, str]]]:
    with s3_server() as server:
        server.put("bucket", "m/m.bin", LARGE)
        proxy = Proxy(server.host)
        async with proxy.running() as front:
            yield proxy, "s3://bucket/m", {**server.environment, "AWS_ENDPOINT_URL_S3": f"http://{front}"}


@pytest.mark.parametrize("source", [http, slow(hub), slow(registry), slow(hdfs), s3])
async def test_a_download_that_is_killed_half_way_goes_on_where_it_was(tmp_path: Path, source: Source) -> None:
    async with source() as (proxy, uri, environment):
        proxy.hold_after = len(LARGE) // 2
        killed = await command(uri, "--cache", str(tmp_path), *WORDS, **environment)
        async with asyncio.timeout(120):
            await proxy.is_holding.wait()
        killed.kill()
        assert await killed.wait() == -signal.SIGKILL
        assert not below(tmp_path, "ready.json")
        before = proxy.sent
        proxy.release()
        again = await command(uri, "--cache", str(tmp_path), *WORDS, **environment)
        said, errors = await again.communicate()
        assert again.returncode == 0, errors.decode()
        # not even half of it, but for what the crash cost
        assert proxy.sent - before < len(LARGE) - before + LOST
        assert proxy.sent < len(LARGE) + LOST
        (found,) = below(tmp_path, "content/m.bin")
        assert str(found.parent) == said.decode().strip()
        assert found.read_bytes() == LARGE


async def test_two_processes_at_once_make_one_download_and_the_second_takes_over_if_the_first_dies(
    tmp_path: Path,
) -> None:
    async with http() as (proxy, uri, _):
        proxy.hold_after = len(LARGE) // 2
        first = await command(uri, "--cache", str(tmp_path), *WORDS)
        async with asyncio.timeout(120):
            await proxy.is_holding.wait()
        # the second asks for the first byte, and then waits for the first: let that request through
        progress = tmp_path / "progress.json"
        proxy.hold_after = None
        second = await command(uri, "--cache", str(tmp_path), "--progress", str(progress), *WORDS)
        await eventually(lambda: progress.exists() and json.loads(progress.read_text())["phase"] == "Waiting")
        first.kill()
        await first.wait()
        proxy.release()
        _, errors = await second.communicate()
        assert second.returncode == 0, errors.decode()
        assert proxy.sent < len(LARGE) + LOST
        (found,) = below(tmp_path, "content/m.bin")
        assert found.read_bytes() == LARGE


async def test_five_downloads_at_once_fetch_every_byte_once(tmp_path: Path) -> None:
    store = Files({"/m.bin": LARGE[: 3 * MIB]})
    async with serving(store.answer) as host:
        proxy = Proxy(host)
        async with proxy.running() as front:
            told = [Told() for _ in range(5)]
            uri = f"http://{front}/m.bin"
            paths = await asyncio.gather(*(fetched(uri, tmp_path, told=one) for one in told))
    assert len(set(paths)) == 1
    assert proxy.sent < 3 * MIB + 100_000
    assert sum("Waiting" in one.phases for one in told) == 4
    assert sum("Downloading" in one.phases for one in told) == 1


async def test_a_complete_model_is_used_again_without_a_byte_and_also_while_its_source_is_away(tmp_path: Path) -> None:
    store = Files({"/m.bin": LARGE[:MIB]})
    async with serving(store.answer) as host:
        uri = f"http://{host}/m.bin"
        path = await fetched(uri, tmp_path)
        store.seen.clear()
        assert await fetched(uri, tmp_path) == path
        assert [one.headers["range"] for one in store.seen] == ["bytes=0-0"]
    told = Told()
    assert await fetched(uri, tmp_path, told=told) == path  # nobody listens there any more
    assert told.all[-1].phase == "Ready"
    away = await command(uri, "--cache", str(tmp_path), "--no-stale", "--attempts", "1")
    _, errors = await away.communicate()
    assert away.returncode == 5
    assert uri in errors.decode()


async def test_sigterm_keeps_what_is_there_and_says_so_by_its_status(tmp_path: Path) -> None:
    async with http() as (proxy, uri, _):
        proxy.hold_after = len(LARGE) // 2
        running = await command(uri, "--cache", str(tmp_path), *WORDS)
        async with asyncio.timeout(120):
            await proxy.is_holding.wait()
        running.send_signal(signal.SIGTERM)
        async with asyncio.timeout(120):
            assert await running.wait() == 143
        (journal,) = below(tmp_path, "journal")
        lines = [one.split() for one in journal.read_text().splitlines()[1:] if one]
        noted = sum(int(end) - int(start) for _, start, end, _ in lines)
        assert noted > len(LARGE) // 2 - LOST


def test_a_lock_is_free_as_soon_as_its_holder_is_dead(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path)
    cache.create_directories()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        cache.fill_lock("key").acquire()
        os.write(write, b"x")
        signal.pause()
    os.read(read, 1)
    assert not cache.fill_lock("key").acquire()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert cache.fill_lock("key").acquire()

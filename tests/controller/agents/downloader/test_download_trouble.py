# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import subprocess
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import pytest
from aiohttp import ClientSession, web

from bench.stack.processes import free_ports
from controller.agents.downloader import fetch as fetching
from controller.agents.downloader.cache import WeightCache
from controller.agents.downloader.core.errors import (
    CacheUnusable,
    DiskFull,
    DownloadTimeout,
    LibraryMissing,
    SourceUnavailable,
)
from controller.agents.downloader.download import CacheFillSettings, download
from controller.agents.downloader.environment import EnvironmentReader, import_optional
from controller.agents.downloader.progress import ProgressTracker
from controller.agents.downloader.transfer import Timeouts
from tests.controller.agents.downloader.downloads import MIB, QUICK, Told, below, command, fetched, job, random_bytes
from tests.controller.agents.downloader.servers import Files, Hub, serving
from tests.programs import not_tested, program

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LARGE = random_bytes(2 * MIB)


Fault = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def half(request: web.Request) -> web.StreamResponse:
    """The right headers of a range, half of its bytes, and the end of the connection."""
    start, end = (int(one) for one in request.headers["range"].removeprefix("bytes=").split("-"))
    answer = web.StreamResponse(status=206)
    answer.headers["Content-Range"] = f"bytes {start}-{end}/{len(LARGE)}"
    answer.content_length = end + 1 - start
    await answer.prepare(request)
    await answer.write(LARGE[start : (start + end) // 2])
    assert request.transport is not None
    request.transport.abort()
    return answer


async def unavailable(_: web.Request) -> web.StreamResponse:
    return web.Response(status=503, headers={"Retry-After": "0"})


async def silent(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response(status=500)


async def dripping(request: web.Request) -> web.StreamResponse:
    """A byte every now and then: no read of it ever takes long."""
    answer = web.StreamResponse(status=206)
    start, end = (int(one) for one in request.headers["range"].removeprefix("bytes=").split("-"))
    answer.headers["Content-Range"] = f"bytes {start}-{end}/{len(LARGE)}"
    answer.content_length = end + 1 - start
    await answer.prepare(request)
    for at in range(start, end):
        await answer.write(LARGE[at : at + 1])
        await asyncio.sleep(0.05)
    return answer


async def test_connections_that_break_and_servers_that_fail_are_asked_again_for_the_rest(tmp_path: Path) -> None:
    store = Files({"/m.bin": LARGE})
    told = Told()
    async with serving(store.answer) as host:
        head = store.answer
        store.faults = [lambda request: _without_faults(store, request), half, unavailable, half, half]
        path = await fetched(f"http://{host}/m.bin", tmp_path, told=told)
        assert head is not None
    assert (path / "m.bin").read_bytes() == LARGE
    assert told.all[-1].retries == 4
    assert told.all[-1].bytes_done == len(LARGE)
    starts = [one.headers["range"] for one in store.seen[1:]]
    assert len(starts) == len(set(starts)) + 1  # only the 503 had to be asked for once more


async def _without_faults(store: Files, request: web.Request) -> web.StreamResponse:
    faults, store.faults = store.faults, []
    try:
        return await store.answer(request)
    finally:
        store.faults = faults


async def test_a_source_that_fails_for_good_is_given_up_with_its_own_words(tmp_path: Path) -> None:
    store = Files({"/m.bin": LARGE})
    async with serving(store.answer) as host:
        store.faults = [unavailable] * 10
        with pytest.raises(SourceUnavailable, match="answers 503"):
            await fetched(f"http://{host}/m.bin?sig=secret", tmp_path)
        assert len(store.seen) == 3


@pytest.mark.parametrize("fault", [silent, dripping])
async def test_a_server_that_stalls_is_left_and_asked_again(tmp_path: Path, fault: Fault) -> None:
    store = Files({"/m.bin": LARGE})
    told = Told()
    async with serving(store.answer) as host:
        store.faults = [lambda request: _without_faults(store, request), fault]
        timeouts = Timeouts(connect_s=2, stall_s=0.4, least_rate=100_000)
        path = await fetched(f"http://{host}/m.bin", tmp_path, told=told, timeouts=timeouts)
    assert (path / "m.bin").read_bytes() == LARGE
    # on a busy machine, a good answer may stall as well
    assert told.all[-1].retries >= 1


async def test_all_of_it_has_a_time_limit_and_the_next_run_goes_on(tmp_path: Path) -> None:
    store = Files({"/m.bin": LARGE})
    told = Told()
    async with serving(store.answer) as host:
        store.faults = [lambda request: _without_faults(store, request), half, silent, silent, silent]
        with pytest.raises(DownloadTimeout, match="took longer than 1 s"):
            await fetched(f"http://{host}/m.bin", tmp_path, told=told, timeout_s=1.0)
        assert told.all[-1].phase == "Failed"
        assert told.all[-1].reason == "TimedOut"
        store.faults, store.seen = [], []
        path = await fetched(f"http://{host}/m.bin", tmp_path)
        asked = sum(_length(one) for one in store.seen[1:])
    assert (path / "m.bin").read_bytes() == LARGE
    assert asked < len(LARGE)


def _length(request: web.BaseRequest) -> int:
    start, end = request.headers["range"].removeprefix("bytes=").split("-")
    return int(end) + 1 - int(start)


async def test_a_disk_without_room_is_found_before_the_first_byte(tmp_path: Path) -> None:
    store = Files({"/m.bin": LARGE})
    async with serving(store.answer) as host:
        rules = CacheFillSettings(retry=QUICK, keep_free=2**62)
        with pytest.raises(DiskFull, match=rf"{len(LARGE)} bytes are needed in .*, and \d+ are free"):
            await fetched(f"http://{host}/m.bin", tmp_path, rules=rules)
    assert len(store.seen) == 1


async def test_a_file_without_an_end_leaves_the_disk_what_is_to_stay_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        answer = web.StreamResponse()
        await answer.prepare(request)
        while sent < 64 * MIB:
            await answer.write(LARGE[:MIB])
            sent += MIB
        return answer

    def free_bytes(cache: WeightCache) -> int:
        """A disk of 8 MiB."""
        return 8 * MIB - sum(one.stat().st_size for one in below(cache.root) if one.is_file())

    monkeypatch.setattr(WeightCache, "free_bytes", free_bytes)
    async with serving(endless) as host:
        with pytest.raises(DiskFull, match="stay free"):
            await fetched(f"http://{host}/m.bin", tmp_path, rules=CacheFillSettings(retry=QUICK, keep_free=2 * MIB))
    assert free_bytes(WeightCache(tmp_path)) >= MIB


@pytest.mark.parametrize(
    "theirs", [{}, {"ATTACHE_HTTP_HEADERS": '{"authorization": "other"}'}, {"HTTPS_PROXY": "http://127.0.0.1:1"}]
)
async def test_what_somebody_got_by_credentials_is_no_answer_to_who_has_others(
    tmp_path: Path, theirs: dict[str, str]
) -> None:
    """Whoever makes a source unreachable for himself would be given what others of the node have fetched."""
    ours = {"ATTACHE_HTTP_HEADERS": '{"authorization": "secret"}'}
    store = Files({"/m.bin": LARGE})
    async with serving(store.answer) as host:
        uri = f"http://{host}/m.bin"
        path = await fetched(uri, tmp_path, ours)
    assert await fetched(uri, tmp_path, ours) == path
    with pytest.raises(SourceUnavailable):
        await fetched(uri, tmp_path, theirs)


def test_files_with_credentials_are_part_of_who_asks(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a")
    one = EnvironmentReader({"HF_TOKEN_FILE": str(file), "HOSTNAME": "a"})
    before = one.source_settings_digest()
    assert EnvironmentReader({"HF_TOKEN_FILE": str(file), "HOSTNAME": "b"}).source_settings_digest() == before
    file.write_text("b")
    assert one.source_settings_digest() != before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB, where tests may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        [program("mount"), "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], check=False, capture_output=True
    )
    if mounted.returncode:
        not_tested("MOUNT", "this process may not mount a file system; run the tests as root")
    yield disk
    subprocess.run([program("umount"), str(disk)], check=True)


async def test_a_disk_that_fills_up_meanwhile_ends_the_download_and_what_is_there_is_used_later(
    small_disk: Path,
) -> None:
    store = Files({"/m.bin": LARGE})
    hog = small_disk / "hog"

    async def fill(request: web.Request) -> web.StreamResponse:
        hog.write_bytes(bytes(small_disk_free(small_disk) - 1_300_000))
        return await _without_faults(store, request)

    async with serving(store.answer) as host:
        store.faults = [lambda request: _without_faults(store, request), fill]
        with pytest.raises(DiskFull, match="no room left to write"):
            await fetched(f"http://{host}/m.bin", small_disk / "cache")
        hog.unlink()
        store.faults, store.seen = [], []
        path = await fetched(f"http://{host}/m.bin", small_disk / "cache")
        assert sum(_length(one) for one in store.seen[1:]) < len(LARGE)
    assert (path / "m.bin").read_bytes() == LARGE


def small_disk_free(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


async def test_the_command_ends_with_7_when_no_more_can_be_written(tmp_path: Path) -> None:
    async with serving(Files({"/m.bin": LARGE}).answer) as host:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
        try:
            running = await command(f"http://{host}/m.bin", "--cache", str(tmp_path), "--keep-free", "1")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        _, errors = await running.communicate()
    assert running.returncode == 7
    assert "no room left to write to the cache" in errors.decode()
    assert "Traceback" not in errors.decode()


async def test_an_error_of_the_disk_while_the_journal_is_written_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fetching.os, "fdatasync", full)
    async with serving(Files({"/m.bin": LARGE}).answer) as host:
        with pytest.raises(DiskFull):
            await fetched(f"http://{host}/m.bin", tmp_path)
    assert not below(tmp_path, "ready.json")


async def test_a_cache_that_cannot_be_made_and_a_link_that_is_in_the_way_are_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with serving(Files({"/m.bin": LARGE}).answer) as host:
        with pytest.raises(CacheUnusable, match="cannot be made"):
            await fetched(f"http://{host}/m.bin", tmp_path / "file")
        with pytest.raises(CacheUnusable, match="is no link of ours"):
            await fetched(f"http://{host}/m.bin", tmp_path / "c", link=tmp_path / "file")


async def test_a_link_is_replaced_and_a_directory_gets_a_link_for_each_file(tmp_path: Path) -> None:
    mounted = tmp_path / "models"
    mounted.mkdir()
    (mounted / "mine.txt").write_text("kept")
    store = Files({"/a.bin": LARGE, "/b.bin": b"b"})
    async with serving(store.answer) as host:
        for name in ("a.bin", "b.bin"):
            await fetched(f"http://{host}/{name}", tmp_path / "c", link=mounted)
            await fetched(f"http://{host}/{name}", tmp_path / "c", link=tmp_path / "link")
    assert sorted(one.name for one in mounted.iterdir()) == ["b.bin", "mine.txt"]
    assert (mounted / "b.bin").read_bytes() == (tmp_path / "link" / "b.bin").read_bytes() == b"b"


async def test_the_least_recently_used_weights_go_but_not_those_that_are_held(tmp_path: Path) -> None:
    store = Files({f"/{name}.bin": random_bytes(MIB, seed) for seed, name in enumerate("abcd")})
    rules = CacheFillSettings(retry=QUICK, cache_limit=int(2.5 * MIB))
    async with serving(store.answer) as host:
        paths = {}
        held = None
        for age, name in enumerate("abc"):
            one = job(f"http://{host}/{name}.bin", tmp_path, rules=rules)
            done = await download(one, EnvironmentReader({}), ProgressTracker(one.shown_uri))
            paths[name] = done.path
            assert done.use is not None
            os.utime(done.path.parent / "used", (1000 + age, 1000 + age))
            for old in ("journal", "ready.json"):
                if (done.path.parent / old).exists():
                    os.utime(done.path.parent / old, (1000 + age, 1000 + age))
            os.utime(done.path.parent, (1000 + age, 1000 + age))
            if name == "a":
                held = done.use
            else:
                done.use.release()
        # a is the oldest, and held: b went for c
        assert [name for name in "abc" if paths[name].exists()] == ["a", "c"]
        assert held is not None
        held.release()
        await fetched(f"http://{host}/d.bin", tmp_path, rules=rules)
        assert [name for name in "abc" if paths[name].exists()] == ["c"]
        with pytest.raises(DiskFull, match="the cache may have"):
            await fetched(f"http://{host}/b.bin", tmp_path, rules=CacheFillSettings(retry=QUICK, cache_limit=1000))


async def test_hold_keeps_the_weights_until_a_signal_and_metrics_tell(tmp_path: Path) -> None:
    async with serving(Files({"/m.bin": LARGE}).answer) as host:
        metrics = f"127.0.0.1:{free_ports(1)[0]}"
        words = ("--cache", str(tmp_path), "--hold", "--metrics", metrics, "--progress", "-", "--keep-free", "1Mi")
        running = await command(f"http://{host}/m.bin", *words)
        assert running.stdout is not None
        lines = []
        async with asyncio.timeout(120):
            # at its end there is nothing to wait for, so the time would never be over
            while not running.stdout.at_eof() and not (lines and lines[-1].startswith("/")):
                lines.append((await running.stdout.readline()).decode())
        assert lines[-1].startswith("/"), lines
        key = next(one.name for one in (one.parent for one in below(tmp_path, "ready.json")))
        assert not WeightCache(tmp_path).use_lock(key).acquire()
        async with ClientSession() as http:
            async with http.get(f"http://{metrics}/readyz") as answer:
                assert answer.status == 200
            async with http.get(f"http://{metrics}/metrics") as answer:
                said = await answer.text()
        running.terminate()
        async with asyncio.timeout(120):
            assert await running.wait() == 0
    assert WeightCache(tmp_path).use_lock(key).acquire()
    assert 'attache_download_phase{phase="Ready"} 1.0' in said
    figures = dict(line.rsplit(" ", 1) for line in said.splitlines() if not line.startswith("#"))
    assert float(figures["attache_download_fetched_bytes_total"]) == len(LARGE)
    assert float(figures["attache_download_done_bytes"]) == len(LARGE)
    assert [json.loads(one)["phase"] for one in lines[:-1]][:: len(lines) - 2] == ["Resolving", "Ready"]


async def test_no_credential_is_in_the_cache_or_in_what_is_said(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("hf_secret_of_a_file\n")
    async with Hub({"m.bin": LARGE}, token="hf_secret_of_a_file").running() as endpoint:  # noqa: S106 - of a double
        words = ("hf://org/model", "--cache", str(tmp_path / "c"), "--progress", "-", "--keep-free", "1Mi")
        running = await command(*words, HF_ENDPOINT=endpoint, HF_TOKEN_FILE=str(token))
        said, errors = await running.communicate()
        assert running.returncode == 0, errors.decode()
        refused = await command(*words, "--revision", "none", HF_ENDPOINT=endpoint, HF_TOKEN_FILE=str(token))
        more, more_errors = await refused.communicate()
        assert refused.returncode == 3
    for text in (said, errors, more, more_errors):
        assert b"secret" not in text
        assert b"signed" not in text
    for path in (tmp_path / "c").rglob("*"):
        assert not path.is_file() or b"secret" not in path.read_bytes()


def test_a_library_that_is_missing_says_what_to_install() -> None:
    with pytest.raises(LibraryMissing, match=r"pip install 'attache\[s3\]'"):
        import_optional("no_such_library.part", "s3")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["ftp://x"], "must begin with one of"),
        (["hf://o/m", "--sha256", "a=12"], "64 hexadecimal digits"),
        (["hf://o/m", "--parallel", "0"], "1 to 256"),
        (["hf://o/m", "--timeout", "soon"], "is not a duration"),
        (["s3://bucket/x", "--revision", "v1"], "has no revisions"),
    ],
)
async def test_mistakes_in_the_options_are_status_2(tmp_path: Path, words: list[str], says: str) -> None:
    running = await command(*words, "--cache", str(tmp_path / "c"), AWS_REGION="us-east-1")
    _, errors = await running.communicate()
    assert running.returncode == 2
    assert says in errors.decode()

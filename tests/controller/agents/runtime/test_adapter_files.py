# SPDX-License-Identifier: Apache-2.0
"""Running the downloader: success, failure, silence, and no process left behind."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING

import pytest

from controller.agents.runtime.adapter_files import DownloaderProcess, DownloadFailed
from tests.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """\
import os, pathlib, sys, time
uri, cache, link = sys.argv[1], sys.argv[3], pathlib.Path(sys.argv[5])
assert sys.argv[2] == "--cache" and sys.argv[4] == "--link", sys.argv
pathlib.Path(cache, "pid").write_text(str(os.getpid()))
if uri.endswith("missing"):
    print("progress", file=sys.stderr)
    sys.exit("hf://acme/missing: 404")
if uri.endswith("slow"):
    time.sleep(60)
if uri.endswith("chatty"):
    sys.stderr.write("x" * 1_000_000)
if not uri.endswith("lying"):
    link.mkdir()
"""


@pytest.fixture
def downloads(tmp_path: Path) -> DownloaderProcess:
    program = tmp_path / "download.py"
    program.write_text(PROGRAM)
    return DownloaderProcess(tmp_path, timeout_s=30.0, command=(sys.executable, str(program)))


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("name", ["sql", "chatty"])
async def test_the_link_leads_to_the_files_afterwards(name: str, downloads: DownloaderProcess, tmp_path: Path) -> None:
    await downloads.fetch(f"hf://acme/{name}", tmp_path / "link")
    assert (tmp_path / "link").is_dir()


async def test_the_last_line_says_why_it_failed(downloads: DownloaderProcess, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match=r"^hf://acme/missing: 404$"):
        await downloads.fetch("hf://acme/missing", tmp_path / "link")


async def test_a_success_without_files_is_a_failure(downloads: DownloaderProcess, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match="made no"):
        await downloads.fetch("hf://acme/lying", tmp_path / "link")


async def test_no_downloader_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match="cannot be started"):
        await DownloaderProcess(tmp_path, timeout_s=1.0, command=("/nonexistent",)).fetch("hf://a/b", tmp_path / "link")


async def test_one_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    program = tmp_path / "download.sh"
    # a shell is there in milliseconds, where an interpreter may need the whole time
    program.write_text('echo $$ > "$3/pid"; exec sleep 600')
    impatient = DownloaderProcess(tmp_path, timeout_s=3.0, command=("/bin/sh", str(program)))
    with pytest.raises(DownloadFailed, match="longer than 3 s"):
        await impatient.fetch("hf://acme/slow", tmp_path / "link")
    assert not is_running(int((tmp_path / "pid").read_text()))


async def test_nothing_runs_on_when_the_agent_ends(downloads: DownloaderProcess, tmp_path: Path) -> None:
    fetching = asyncio.create_task(downloads.fetch("hf://acme/slow", tmp_path / "link"))
    await eventually((tmp_path / "pid").exists)
    await eventually(lambda: bool((tmp_path / "pid").read_text()))
    fetching.cancel()
    await asyncio.gather(fetching, return_exceptions=True)
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_the_command_is_our_own_by_default(tmp_path: Path) -> None:
    assert DownloaderProcess(tmp_path, timeout_s=1.0)._command == (sys.executable, "-m", "attache", "download")

# SPDX-License-Identifier: Apache-2.0
"""Workers of ``--workers N`` and their supervisor, in this process."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import closing
from typing import TYPE_CHECKING

from extproc.cli import supervisor
from extproc.cli.workers import _supervise
from extproc.listen_sockets import listen
from tests.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

CONFIG = """
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec: {model: llama, endpoints: [{address: 127.0.0.1:8000}]}
"""


async def test_each_line_of_the_log_has_the_number_of_its_worker(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "all.yaml").write_text(CONFIG)
    addresses = [f"unix:{tmp_path / f'streams.{number}'}" for number in range(2)]
    words = ["--config", str(tmp_path), "--metrics", "off", "--listen", f"unix:{tmp_path / 'streams'}"]
    lines: list[str] = []

    def have_logged() -> bool:
        lines.extend(capfd.readouterr().err.splitlines())
        return all(any(line.endswith(f" worker={number}") for line in lines) for number in range(2))

    with closing(listen(addresses[0])) as first, closing(listen(addresses[1])) as second:
        run = asyncio.create_task(_supervise([*words, "--workers", "2"], 2, [[first, second], [], []]))
        await eventually(have_logged)
        os.kill(os.getpid(), signal.SIGTERM)
        await run


async def test_a_worker_that_hangs_before_its_first_report_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "_START_S", 2.0)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "all.yaml").write_text(CONFIG)
    # nobody writes it, so whoever opens it to read waits for ever
    os.mkfifo(pipe := tmp_path / "pipe")
    words = ["--config", str(tmp_path / "config"), "--metrics", "off", "--tls-cert", str(pipe), "--tls-key", str(pipe)]
    address = f"unix:{tmp_path / 'streams'}"
    with closing(listen(address)) as listening:
        run = asyncio.create_task(_supervise([*words, "--listen", address, "--workers", "1"], 1, [[listening], [], []]))
        await eventually(lambda: "worker-0 has not reported since its start, and is killed" in caplog.text)
        os.kill(os.getpid(), signal.SIGTERM)
        await run

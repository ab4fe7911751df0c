# SPDX-License-Identifier: Apache-2.0
"""The commands that start Envoy, in a short form."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from typing import TYPE_CHECKING

import httpx
import pytest

from bench.stack.processes import free_ports
from tests.named_commands import ROOT
from tests.short_forms import SHORT_FORMS, ShortForm, as_parameter, check, command_line, environment

if TYPE_CHECKING:
    from pathlib import Path

    from bench.stack.orphan_reaper import ProcessGuard


@pytest.mark.parametrize("short", [as_parameter(one) for one in SHORT_FORMS if one.needs_envoy])
def test_a_short_form_works(short: ShortForm, tmp_path: Path, guard: ProcessGuard, envoy: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENVOY", envoy)
        check(short, tmp_path, guard)


@pytest.mark.asyncio
async def test_a_stack_that_is_left_running_serves_until_it_is_interrupted(guard: ProcessGuard, envoy: str) -> None:
    """``attache up``, which ``make up`` runs: the request that it prints is answered."""
    listen = f"127.0.0.1:{free_ports(1)[0]}"
    up = await asyncio.create_subprocess_exec(
        *command_line("attache up", f"--engines 1 --listen {listen}"),
        cwd=ROOT,
        env={**environment(), "ENVOY": envoy},
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    guard.add(up.pid)
    assert up.stdout is not None
    try:
        said = ""
        async with asyncio.timeout(90):
            while "Ctrl-C" not in said and not up.stdout.at_eof():
                said += (await up.stdout.readline()).decode()
            (url, question) = re.findall(r"curl -N (\S+) .* -d '(.*)'$", said, re.MULTILINE)[0]
            assert url == f"http://{listen}/v1/chat/completions"
            async with httpx.AsyncClient(timeout=60) as http:
                answer = await http.post(url, content=question, headers={"content-type": "application/json"})
            assert answer.text.rstrip().endswith("data: [DONE]")
            up.send_signal(signal.SIGINT)
            rest, _ = await up.communicate()
        assert "all processes are ended" in rest.decode()
        assert up.returncode == 0
    finally:
        if up.returncode is None:
            os.killpg(up.pid, signal.SIGKILL)
            await up.wait()
        guard.remove(up.pid)

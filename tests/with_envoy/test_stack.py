# SPDX-License-Identifier: Apache-2.0
"""A stack comes up although another program takes one of its ports between the check and its use."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import httpx
import pytest

from bench.stack import loopback_stack as stacks
from bench.stack.loopback_stack import ALIAS, EngineFlags, running_stack
from bench.stack.processes import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def other_program() -> Iterator[socket.socket]:
    """Has no port yet."""
    with socket.socket() as one:
        yield one


@pytest.mark.parametrize("taken", [1, 2, 3, 4], ids=["envoy", "extproc", "metrics", "engine"])
async def test_a_stack_whose_port_is_taken_starts_on_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_program: socket.socket, taken: int
) -> None:
    given: list[list[int]] = []

    def found(count: int) -> list[int]:
        given.append(free_ports(count))
        if len(given) == 1:
            other_program.bind(("127.0.0.1", given[0][taken]))
        return given[-1]

    monkeypatch.setattr(stacks, "free_ports", found)
    async with running_stack(tmp_path, EngineFlags(count=1)) as stack, httpx.AsyncClient(timeout=60) as http:
        assert (await http.get(f"{stack.url}/v1/models/{ALIAS}")).status_code == 200
        assert stack.url.endswith(f":{given[1][0]}")
    assert len(given) == 2

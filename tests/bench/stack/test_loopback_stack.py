# SPDX-License-Identifier: Apache-2.0
"""When a stack that failed to start is started again."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from bench.stack.loopback_stack import Stack, is_port_taken, retry_on_other_ports
from bench.stack.processes import StartFailed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

TAKEN = StartFailed("engines ended with status 1; its log ends so:\n[Errno 98] address already in use")


@pytest.mark.parametrize(
    ("said", "is_so"),
    [
        (
            "[Errno 98] error while attempting to bind on address ('127.0.0.1', 20784): address already in use",
            1,
        ),
        ("cannot bind '127.0.0.1:20784': Address already in use", 1),
        ("envoy is not ready after 180 s; its log ends so:\n(empty)", 0),
        ("engines ended with status 2; its log ends so:\nunrecognized arguments: --lora", 0),
    ],
)
def test_a_port_that_is_taken_is_told_from_other_failures(said: str, is_so: int) -> None:
    assert is_port_taken(StartFailed(said)) is bool(is_so)


class Starts:
    """Starts that fail in turn, each of which writes its configuration as if it were the first."""

    def __init__(self, *failures: StartFailed | None) -> None:
        self.failures = list(failures)
        self.ended = 0

    @contextlib.asynccontextmanager
    async def run(self, directory: Path, name: str) -> AsyncIterator[Stack]:
        (directory / "config").mkdir()
        (directory / "config" / name).write_text("")
        try:
            if (failure := self.failures.pop(0)) is not None:
                raise failure
            yield None  # type: ignore[misc]  # no program
        finally:
            self.ended += 1


async def test_a_start_whose_port_was_taken_is_followed_by_one_more(tmp_path: Path) -> None:
    starts = Starts(TAKEN, None)
    async with retry_on_other_ports(starts.run)(tmp_path, "a.yaml"):
        assert (tmp_path / "config" / "a.yaml").is_file()
        assert starts.ended == 1
    assert (starts.failures, starts.ended) == ([], 2)


@pytest.mark.parametrize(
    ("failures", "left"), [((StartFailed("garbage"), None), 1), ((TAKEN, TAKEN, None), 1)], ids=["another", "again"]
)
async def test_other_failures_and_a_second_one_are_failures(
    tmp_path: Path, failures: tuple[StartFailed | None, ...], left: int
) -> None:
    starts = Starts(*failures)
    with pytest.raises(StartFailed):
        async with retry_on_other_ports(starts.run)(tmp_path, "a.yaml"):
            pass
    assert len(starts.failures) == left


async def test_what_fails_once_it_runs_is_not_started_again(tmp_path: Path) -> None:
    starts = Starts(None, None)
    with pytest.raises(StartFailed):
        async with retry_on_other_ports(starts.run)(tmp_path, "a.yaml"):
            raise TAKEN
    assert (len(starts.failures), starts.ended) == (1, 1)

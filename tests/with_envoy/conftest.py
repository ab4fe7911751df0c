# SPDX-License-Identifier: Apache-2.0
"""The whole system with a real Envoy. Without its binary these tests are skipped, loudly; where it must be there, they
fail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import openai
import pytest
import pytest_asyncio

from bench.stack import processes
from bench.stack.loopback_stack import ALIAS, EngineFlags, EnvoyMissing, Stack, envoy_binary, running_stack
from tests.fork_server import REAL_SPAWN, forked_starts
from tests.programs import not_tested

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

FLAGS = EngineFlags(count=3, speed=20.0, stream_headers="first-token", adapters=("sql",))


@pytest.fixture(scope="session", autouse=True)
def envoy() -> str:
    """The path of the binary."""
    try:
        return envoy_binary()
    except EnvoyMissing as error:
        not_tested("ENVOY", str(error))


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> Iterator[None]:
    """Our programs start in a tenth of the time."""
    with forked_starts():
        yield


@pytest.fixture
def full_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs start as they do elsewhere: where it matters how long an engine is away."""
    monkeypatch.setattr(processes, "spawn", REAL_SPAWN)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Three fast engines, extproc, a bundle that follows its configuration, Envoy: one for the tests of a module."""
    async with running_stack(tmp_path_factory.mktemp("stack"), FLAGS, watch=True) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client, which retries nothing by itself."""
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=30) as one:
        yield one


@pytest.fixture
def model() -> str:
    """The name that clients ask for; the engines know another."""
    return ALIAS

# SPDX-License-Identifier: Apache-2.0
"""What holds for all tests: how hypothesis chooses its examples, how many workers there are; and nothing outlives a
runner that is killed.
"""

from __future__ import annotations

import asyncio
import gc
import os
from asyncio.selector_events import BaseSelectorEventLoop
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import certifi
import pytest
from hypothesis import settings

from bench.stack.orphan_reaper import ProcessGuard
from tests.examples import IS_CI, IS_SLOW

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

# A machine that is busy must not fail a test by its time. In CI the examples are the same every time, but not where all
# of them are tried.
_EXAMPLES: Final = 100 if IS_SLOW else 40
settings.register_profile("local", deadline=None, max_examples=_EXAMPLES)
settings.register_profile("ci", deadline=None, max_examples=_EXAMPLES, derandomize=True, print_blob=True)
settings.load_profile("ci" if IS_CI and not IS_SLOW else "local")

# Else pytest-asyncio makes a loop for want of one, before its first test, and drops it unclosed: whichever test runs
# when the garbage is collected would fail for it.
asyncio.set_event_loop(None)


def _drop_what_was_accepted_as_its_server_closed() -> None:
    """Close such connections, as later Pythons do. Python 3.11 fails an assertion while it makes their transports, and
    the test that runs when the garbage is collected fails for it (https://github.com/python/cpython/issues/109564).
    """
    accept = BaseSelectorEventLoop._accept_connection2  # type: ignore[attr-defined]  # private, and so is its order

    async def unless_closed(loop: object, made: object, accepted: socket.socket, *more: Any) -> None:  # noqa: ANN401
        server = more[2]
        if server is not None and not server.is_serving():
            accepted.close()
        else:
            await accept(loop, made, accepted, *more)

    BaseSelectorEventLoop._accept_connection2 = unless_closed  # type: ignore[attr-defined]


_drop_what_was_accepted_as_its_server_closed()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """For ``-n auto``: two more than there are processors, as tests wait for a third of their time."""
    return len(os.sched_getaffinity(0)) + 2


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Thousands of tests are objects that stay: without them the garbage collector has a tenth to look through."""
    gc.collect()
    gc.freeze()


_END_OF_ONE: Final = "-----END CERTIFICATE-----"


@pytest.fixture(scope="session", autouse=True)
def _one_authority(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Trust one certificate authority instead of 140, which every httpx client and every process would read in 40
    ms.
    """
    trusted = Path(certifi.where()).read_text()
    file = tmp_path_factory.mktemp("authorities") / "one.pem"
    file.write_text(trusted[: trusted.index(_END_OF_ONE) + len(_END_OF_ONE)])
    os.environ["SSL_CERT_FILE"] = str(file)


@pytest.fixture(scope="session")
def guard() -> Iterator[ProcessGuard]:
    """Ends the process groups that were added to it if this runner is killed."""
    with ProcessGuard() as one:
        yield one

# SPDX-License-Identifier: Apache-2.0
"""A real PostgreSQL. Without its binaries these tests are skipped, loudly; where they must be there, they fail."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa

from bench.stack.processes import free_ports
from tests.programs import program

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.stack.orphan_reaper import ProcessGuard

# It refuses to run as root.
_USERS = ("postgres", "nobody")


class Postgres:
    """A server that can be ended and started again on its port. ``url``: of a database in it, by name."""

    def __init__(self, folder: Path, guard: ProcessGuard) -> None:
        self._guard = guard
        self._initdb, self._binary, self._isready = program("initdb"), program("postgres"), program("pg_isready")
        self._data = folder / "data"
        self._log = folder / "log"
        (self.port,) = free_ports(1)
        self._process: subprocess.Popen[bytes] | None = None
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            names = {one.pw_name for one in pwd.getpwall()}
            user = next(one for one in _USERS if one in names)
            shutil.chown(folder, user)
            self._user = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
        command = [self._initdb, "--auth=trust", "--username=attache", "--no-sync", "--encoding=UTF8", "--locale=C"]
        subprocess.run([*command, "-D", self._data], check=True, capture_output=True, cwd=folder, **self._user)

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def url(self, name: str) -> str:
        return f"postgresql://attache@127.0.0.1:{self.port}/{name}"

    def start(self) -> None:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "fsync": "off",
            "shared_buffers": "32MB",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [self._binary, "-D", self._data, *options],
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self._data.parent,
                **self._user,
            )
        self._guard.add(self._process.pid)
        command = [self._isready, "-h", "127.0.0.1", "-p", str(self.port), "-t", "60", "-q"]
        while subprocess.run(command, check=False).returncode:
            assert self._process.poll() is None, self._log.read_text()

    def stop(self) -> None:
        """As in a failure: connections are cut."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(60)
            self._guard.remove(self._process.pid)
            self._process = None

    def make_database(self, name: str) -> str:
        engine = sa.create_engine(self.url("postgres").replace("postgresql:", "postgresql+psycopg:"))
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(sa.text(f'CREATE DATABASE "{name}"'))
        engine.dispose()
        return self.url(name)


@contextmanager
def _running(guard: ProcessGuard) -> Iterator[Postgres]:
    program("initdb")
    folder = Path(tempfile.mkdtemp(prefix="attache-postgres-"))
    server = Postgres(folder, guard)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(name="postgres", scope="session")
def running_postgres(guard: ProcessGuard) -> Iterator[Postgres]:
    """A running server, one for all tests of a process."""
    with _running(guard) as server:
        yield server


@pytest.fixture
def own_postgres(guard: ProcessGuard) -> Iterator[Postgres]:
    """A running server for a test that stops it."""
    with _running(guard) as server:
        yield server

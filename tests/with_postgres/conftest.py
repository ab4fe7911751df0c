# SPDX-License-Identifier: Apache-2.0
"""Both databases: SQLite in a file, and a real PostgreSQL."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest

from tests.postgres_server import own_postgres, running_postgres

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["own_postgres", "running_postgres"]


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/usage.db"
    url: str = request.getfixturevalue("postgres").make_database(f"usage-{uuid.uuid4().hex}")
    return url

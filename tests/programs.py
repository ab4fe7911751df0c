# SPDX-License-Identifier: Apache-2.0
"""Programs and services that pip does not bring. A test that lacks one is skipped, loudly, with the way to get it.

Where it must be there, as in CI, the test fails instead. Every test asks here before it starts anything.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NoReturn

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

_PROMETHEUS: Final = ("PROMETHEUS", "apt-get install --no-install-recommends prometheus")
_POSTGRES: Final = ("POSTGRES", "apt-get install --no-install-recommends postgresql")
_REDIS: Final = ("REDIS", "apt-get install redis-server")
# By program: in what it is missed, and how to get it.
PROGRAMS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "bash": ("BASH", "apt-get install bash"),
        "chromium": ("CHROMIUM", "apt-get install chromium"),
        "initdb": _POSTGRES,
        "make": ("MAKE", "apt-get install make"),
        "mount": ("MOUNT", "apt-get install mount"),
        "pg_isready": _POSTGRES,
        "postgres": _POSTGRES,
        "prometheus": _PROMETHEUS,
        "promtool": _PROMETHEUS,
        "redis-cli": _REDIS,
        "redis-server": _REDIS,
        "skopeo": ("SKOPEO", "apt-get install --no-install-recommends skopeo"),
        "umount": ("MOUNT", "apt-get install mount"),
        "unshare": ("NAMESPACES", "apt-get install util-linux"),
        "systemd-analyze": ("SYSTEMD", "apt-get install systemd"),
    }
)
# CI installs these, or has what tests need of them.
_IN_CI: Final = frozenset({"BASH", "ENVOY", "MAKE", "REDIS"})


def program(name: str, *others: str) -> str:
    """Its path. ``others``: names under which it goes, too."""
    # the distribution's packages put PostgreSQL's programs on nobody's path
    folders = [os.environ.get("PATH", ""), *map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True))]
    found = next(filter(None, (shutil.which(one, path=os.pathsep.join(folders)) for one in (name, *others))), None)
    if found is None:
        what, how = PROGRAMS[name]
        not_tested(what, f"there is no {name}; {how}")
    return found


def not_tested(what: str, why: str) -> NoReturn:
    """``what``: is missing, in one word, as in the variable ATTACHE_REQUIRE_WHAT. ``why``: and how to get it."""
    if os.environ.get(f"ATTACHE_REQUIRE_{what}") or (os.environ.get("CI") and what in _IN_CI):
        pytest.fail(f"{what} is required here: {why}")
    pytest.skip(f"NOT TESTED WITH {what}: {why}")

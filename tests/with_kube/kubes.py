# SPDX-License-Identifier: Apache-2.0
"""The API servers that tests run against, and marks for tests that only one of them can take."""

from __future__ import annotations

from typing import Final

import msgspec
import pytest

from bench.cluster.control_plane import ControlPlane
from controller.kube.access import ClusterAccess
from tests.fake_api.server import FakeServer

FAKE: Final = pytest.mark.parametrize("kube", ["fake"], indirect=True)
"""For faults that a real server does not have on demand."""

REAL: Final = pytest.mark.parametrize("kube", ["real"], indirect=True)
"""For what the fake server lacks: controllers, service accounts, processes to stop."""


class Kube(msgspec.Struct, frozen=True):
    """An API server: the fake one or a real one. ``nobody`` is authenticated and may do nothing."""

    admin: ClusterAccess
    nobody: ClusterAccess
    fake: FakeServer | None = None
    plane: ControlPlane | None = None

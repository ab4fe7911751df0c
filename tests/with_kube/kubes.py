# SPDX-License-Identifier: Apache-2.0
"""The API servers that tests run against, and marks for tests that only one of them can take."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Final

import msgspec
import pytest

from bench.cluster.local_control_plane import ControlPlane
from controller.kube.api_resources import NAMESPACES, SERVICE_ACCOUNTS
from controller.kube.cluster_access import ClusterAccess
from tests.fake_api.server import FakeServer
from tests.waiting import eventually

if TYPE_CHECKING:
    from controller.kube.client import Client

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


async def make_namespace(client: Client, kube: Kube) -> str:
    """A namespace of a name of its own; it is never deleted."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    await client.create(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    async def has_account() -> bool:
        return await client.get_or_none(SERVICE_ACCOUNTS, "default", name) is not None

    if kube.plane is not None:
        # pods are refused until the controllers have made it
        await eventually(has_account)
    return name

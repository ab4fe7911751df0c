# SPDX-License-Identifier: Apache-2.0
"""Kubernetes twice: the fake server, and a real control plane. Without its binaries the real one is skipped, loudly."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import pytest
import pytest_asyncio

from bench.cluster.kubernetes_binaries import AssetsMissing, ClusterBinaries, find_assets
from bench.cluster.local_control_plane import ControlPlane, ControlPlaneOptions, running_control_plane
from controller.kube.api_resources import DEPLOYMENTS, NODES, PODS, key_of
from controller.kube.client import Client, connect
from extproc.api.status_page_contents import LOADS_LABEL
from tests.fake_api.server import FakeServer, running_fake_api_server
from tests.fork_server import forked_starts
from tests.programs import not_tested
from tests.with_kube.kubes import Kube, make_namespace

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


# Files whose tests take a minute and more, the longest first.
_LONGEST: Final = (
    "test_autoscaling_end_to_end.py",
    "test_under_load.py",
    "test_end_to_end.py",
    "test_manager_end_to_end.py",
    "test_picker_end_to_end.py",
    "test_model_end_to_end.py",
    "test_external_metrics.py",
    "test_scaling.py",
    "test_control_plane.py",
    "test_gateway_role.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of these tests share an event loop: the control plane lives in it."""
    here = os.path.dirname(__file__)  # noqa: PTH120
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
            if _needs_real(item):
                item.add_marker(pytest.mark.real_kube)
    # a worker that begins one of these last would run alone
    items.sort(key=lambda item: _LONGEST.index(item.path.name) if item.path.name in _LONGEST else len(_LONGEST))


def _needs_real(item: pytest.Item) -> bool:
    asked = {"assets", "plane", "real_kube"} & set(getattr(item, "fixturenames", ()))
    return bool(asked) or (getattr(item, "callspec", None) is not None and "real" in item.callspec.params.values())


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> Iterator[None]:
    """Our programs, those in pods too, start in a tenth of the time."""
    with forked_starts():
        yield


@pytest.fixture(scope="session")
def assets() -> ClusterBinaries:
    """The control plane's binaries."""
    try:
        return find_assets()
    except AssetsMissing as error:
        not_tested("KUBE", str(error))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def plane(assets: ClusterBinaries, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ControlPlane]:
    """A real control plane with everything, shared by all tests."""
    with pytest.MonkeyPatch.context() as patch:
        # Go collects garbage a third as often: a fifth less processor time of the API server, for more of its memory
        patch.setenv("GOGC", "300")
        patch.setenv("GOMEMLIMIT", "1GiB")
        async with running_control_plane(tmp_path_factory.mktemp("kube"), assets, ControlPlaneOptions()) as running:
            yield running
            async with connect(running.admin, manager="test") as client:
                assert await left_over(client) == [], (
                    "later tests may meet these: the fixture that made them should delete them"
                )


async def left_over(client: Client) -> list[str]:
    """What changes how other tests' pods run and are drained: nodes, Deployments, gateways."""
    found = [*(await client.list(NODES)).items, *(await client.list(DEPLOYMENTS)).items]
    found += (await client.list(PODS, labels=LOADS_LABEL)).items
    return sorted(key_of(one) for one in found)


@pytest.fixture
def real_kube(plane: ControlPlane) -> Kube:
    """The real one, which all tests share."""
    return Kube(plane.admin, plane.nobody, plane=plane)


@pytest_asyncio.fixture(loop_scope="session")
async def fake_kube() -> AsyncIterator[Kube]:
    """A fake one of the test's own."""
    async with running_fake_api_server(bookmark_s=0.2) as fake:
        yield Kube(fake.admin, fake.nobody, fake=fake.server)


@pytest.fixture(params=["fake", "real"])
def kube(request: pytest.FixtureRequest) -> Kube:
    """An API server of each sort."""
    found: Kube = request.getfixturevalue(f"{request.param}_kube")
    return found


@pytest.fixture
def fake(kube: Kube) -> FakeServer:
    """The fake server, for tests that are marked with FAKE."""
    assert kube.fake is not None
    return kube.fake


@pytest_asyncio.fixture(loop_scope="session")
async def client(kube: Kube) -> AsyncIterator[Client]:
    """A client that may do everything."""
    async with connect(kube.admin, manager="test") as one:
        yield one


@pytest_asyncio.fixture(loop_scope="session")
async def namespace(client: Client, kube: Kube) -> str:
    """A namespace of the test's own; it is never deleted."""
    return await make_namespace(client, kube)

# SPDX-License-Identifier: Apache-2.0
"""The autoscaler with gateways, the manager and engines as processes around a real control plane.

How fast it is, and that of very many cycles none loses anybody, is measured by ``python -m bench.cluster.scaling``.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from bench.cluster.scaling.cycles import cycled
from bench.cluster.scaling.faults import survived
from bench.cluster.scaling.leaving import scaled_in
from bench.cluster.scaling.reaction import overloads, wakings
from bench.cluster.scaling.site import running_site

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bench.cluster.control_plane import ControlPlane
    from bench.cluster.scaling.site import Site

CYCLES = 3


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def site(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """Two gateways; shared by all tests here, each of which has models of its own."""
    folder = tmp_path_factory.mktemp("site")
    async with running_site(plane, folder, namespace=f"test-{uuid.uuid4().hex[:8]}", gateways=2) as running:
        yield running


@pytest.mark.parametrize("has_queue", [True, False])
async def test_overload_is_answered_by_more_replicas(site: Site, has_queue: bool) -> None:
    found = await overloads(site, 1, has_queue=has_queue)
    assert [one.replicas for one in found] == [2]


async def test_a_request_at_zero_is_answered_by_a_replica(site: Site) -> None:
    found = await wakings(site, 2)
    assert [one.replicas for one in found] == [1, 1]


@pytest.mark.parametrize("kind", ["Deployment", "ModelInfer"])
async def test_from_zero_to_one_and_back_nobody_is_lost(site: Site, kind: str) -> None:
    found = await cycled(site, kind, CYCLES)
    assert found.lost == ()
    assert found.cycles >= CYCLES
    assert found.asked >= CYCLES


@pytest.mark.parametrize("kind", ["Deployment", "ModelInfer"])
async def test_scaling_in_under_load_cuts_no_stream(site: Site, kind: str) -> None:
    found = await scaled_in(site, kind, streams=9)
    assert found.cut == ()
    assert found.whole >= 9
    assert (found.replicas[0], found.replicas[-1]) == (3, 1)


async def test_nothing_is_scaled_in_because_of_faults(site: Site) -> None:
    found = await survived(site, for_s=12.0)
    assert {one.fault: one.falls for one in found} == dict.fromkeys((one.fault for one in found), 0)

# SPDX-License-Identifier: Apache-2.0
"""The manager gives engines the image that it runs from itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from controller.kube.api_resources import PODS
from controller.kube.client import connect
from controller.manager.runner import find_own_image
from tests.with_kube.kubes import FAKE

if TYPE_CHECKING:
    import pytest

    from controller.kube.client import Client
    from tests.with_kube.kubes import Kube

pytestmark = FAKE


async def test_the_image_of_the_container_manager(client: Client, kube: Kube, namespace: str) -> None:
    containers = [{"name": "proxy", "image": "x"}, {"name": "manager", "image": "registry.example.org/attache:1"}]
    metadata = {"name": "manager-0", "namespace": namespace}
    await client.create(
        PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": containers}}
    )
    async with connect(msgspec.structs.replace(kube.admin, namespace=namespace), manager="test") as inside:
        assert await find_own_image(inside, "manager-0") == "registry.example.org/attache:1"
        assert await find_own_image(inside, "elsewhere") == "attache"


async def test_who_may_not_look_gets_the_default(kube: Kube, caplog: pytest.LogCaptureFixture) -> None:
    async with connect(kube.nobody, manager="test") as inside:
        assert await find_own_image(inside, "manager-0") == "attache"
    assert "set --image" in caplog.text

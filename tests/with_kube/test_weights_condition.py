# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from controller.agents.downloader.progress import CONDITION, PodConditionWriter, Progress
from controller.kube.api_resources import PODS
from controller.kube.client import Client, connect
from tests.with_kube.kubes import REAL
from tests.with_kube.pods import make_pod

if TYPE_CHECKING:
    import pytest

    from tests.with_kube.kubes import Kube


async def conditions(client: Client, namespace: str) -> dict[str, Any]:
    pod = await client.get(PODS, "engine", namespace)
    return {one["type"]: one for one in pod["status"]["conditions"]}


@REAL  # the fake server does not know that conditions are merged by their types
async def test_a_download_is_a_condition_of_its_pod_beside_the_kubelets(client: Client, namespace: str) -> None:
    await make_pod(client, namespace, "engine", "10.0.0.1")
    condition = PodConditionWriter(client, namespace, "engine")
    condition.update(Progress("Downloading", "hf://o/m", files_total=2, bytes_total=10**9, bytes_done=4 * 10**8))
    async with condition.writing_in_background():
        pass
    found = await conditions(client, namespace)
    assert found["Ready"]["status"] == "True"
    assert (found[CONDITION]["status"], found[CONDITION]["reason"]) == ("False", "Downloading")
    assert found[CONDITION]["message"] == "Downloading hf://o/m: 0 of 2 files, 400 of 1000 MB (40%)"
    async with condition.writing_in_background():
        condition.update(Progress("Ready", "hf://o/m", message="hf://o/m is at /mnt/models"))
    found = await conditions(client, namespace)
    assert (found[CONDITION]["status"], found[CONDITION]["reason"]) == ("True", "Ready")
    assert found[CONDITION]["message"] == "hf://o/m is at /mnt/models"


async def test_a_failure_is_told_with_its_reason(client: Client, namespace: str) -> None:
    await make_pod(client, namespace, "engine", "10.0.0.1")
    condition = PodConditionWriter(client, namespace, "engine")
    async with condition.writing_in_background():
        condition.update(Progress("Failed", "hf://o/m", reason="DiskFull", message="9 bytes are needed"))
    found = (await conditions(client, namespace))[CONDITION]
    assert (found["status"], found["reason"], found["message"]) == ("False", "DiskFull", "9 bytes are needed")


async def test_whoever_may_not_write_it_is_warned_once_and_goes_on(
    kube: Kube, client: Client, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    await make_pod(client, namespace, "engine", "10.0.0.1")
    async with connect(kube.nobody, manager="test") as nobody:
        condition = PodConditionWriter(nobody, namespace, "engine")
        async with condition.writing_in_background():
            condition.update(Progress("Downloading", "hf://o/m"))
    assert CONDITION not in await conditions(client, namespace)
    assert "the pod's condition is not written" in caplog.text

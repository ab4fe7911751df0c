# SPDX-License-Identifier: Apache-2.0
"""Random histories of a ModelInfer on a real API server, held against the oracle of the virtual cluster."""

from __future__ import annotations

import asyncio
import copy
import time
from random import Random
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest

from controller.kube.api_resources import MODEL_INFERS, PODS, SERVICES, ApiResource, Object
from controller.kube.errors import NotFound
from controller.models.model_infer import names
from controller.models.model_infer.reconcile import reconcile
from tests.controller.models.model_infer.chaos.ending import has_what_it_should
from tests.controller.models.model_infer.chaos.oracle import Broken, Oracle
from tests.examples import slow
from tests.virtual_cluster.manager import OWNED, ReconcileRecord
from tests.with_kube import test_manager_end_to_end as end_to_end
from tests.with_kube.managing import managing

if TYPE_CHECKING:
    from controller.kube.client import Client
    from controller.kube.reconcile_plan import Plan
    from controller.models.model_infer.model_infer_state import ModelInferState
    from tests.controller.models.model_infer.chaos.specs import Spec
    from tests.with_kube.kubes import Kube
    from tests.with_kube.test_manager_end_to_end import Place

place = end_to_end.place
PATIENCE_S: Final = 120.0
RUNS: Final = ["sh", "-c", "exec sleep 3600"]
CRASHES: Final = ["sh", "-c", "exit 3"]


class Seen(msgspec.Struct):
    """What a manager has seen is taken for true: the oracle asks no further."""

    found: list[Object]

    def pods(self) -> list[Object]:
        return self.found

    def living(self) -> list[tuple[str, str, str]]:
        return []

    def in_flight(self, _: str) -> int:
        return 0

    @property
    def now_s(self) -> float:
        return time.time()  # noqa: TID251 - this is an edge


class Watching:
    """The reconciler, and an oracle that sees each of its plans."""

    def __init__(self) -> None:
        self.oracle = Oracle()
        self.broken: list[Broken] = []

    def __call__(self, observed: ModelInferState, now_s: float) -> Plan:
        plan = reconcile(observed, now_s)
        fat = msgspec.structs.replace(observed, pods=[*map(_fat, observed.pods)])
        record = ReconcileRecord(now_s, fat, plan)
        self.oracle.cluster = Seen(list(fat.pods))
        self.oracle.forgive()
        try:
            self.oracle.record_reconcile(record)
            for action in plan.actions:
                self.oracle.before_action(record, action)
        except Broken as broken:
            broken.add_note("\n".join(self.oracle.log))
            self.broken.append(broken)
        return plan


def _fat(pod: Object) -> Object:
    """With what the manager's copies leave out and the oracle asks for."""
    size = 2 if pod["metadata"]["labels"][names.ROLE] == "decode" else 1
    container = {"name": "engine", "env": [{"name": "GROUP_SIZE", "value": str(size)}]}
    return {**pod, "spec": {**pod["spec"], "containers": [container]}}


class Snapshot:
    """The namespace at one moment, as the oracle's ending reads it."""

    def __init__(self, spec: Spec, found: dict[ApiResource, list[Object]]) -> None:
        self.spec = spec
        self._found = found

    def thing(self) -> Object:
        return self._found[MODEL_INFERS][0]

    def all(self, resource: ApiResource) -> list[Object]:
        owned = resource == MODEL_INFERS
        found = self._found.get(resource, [])
        return [one for one in found if owned or one["metadata"].get("ownerReferences")]


class History:
    """Random things that a user does and that befall pods."""

    def __init__(self, place: Place, rng: Random) -> None:
        self.place, self.rng = place, rng
        self.client: Client = place.client
        self.images = 1
        roles = [self._role("prefill", 1, 0), self._role("decode", 1, 1)]
        rollout = {"maxUnavailable": 1, "maxSurge": rng.choice([0, 1]), "unit": rng.choice(["Group", "Role"])}
        self.spec: Spec = {
            "replicas": 2,
            "recovery": rng.choice(["Role", "Group", "Pod"]),
            "template": {"roles": roles, "drainTimeout": "1s"},
            "rollout": rollout,
        }

    async def create(self) -> None:
        metadata = {"name": "llama", "namespace": self.place.namespace}
        await self.client.create(MODEL_INFERS, {**_typed(MODEL_INFERS), "metadata": metadata, "spec": self.spec})

    async def happen(self) -> None:
        await self.rng.choice([self._scale, self._change, self._break, self._kill, self._delete_pod, self._drift])()

    async def make_good(self) -> None:
        await self._change()

    async def snapshot(self) -> Snapshot:
        found: dict[ApiResource, list[Object]] = {}
        for one in (MODEL_INFERS, *OWNED):
            try:
                found[one] = list((await self.client.list(one, self.place.namespace)).items)
            except NotFound:
                found[one] = []  # nobody serves this kind
        return Snapshot(self.spec, found)

    async def _scale(self) -> None:
        self.spec = {**self.spec, "replicas": self.rng.randint(1, 3)}
        await self._write()

    async def _change(self) -> None:
        await self._image(RUNS)

    async def _break(self) -> None:
        await self._image(CRASHES)

    async def _image(self, command: list[str]) -> None:
        self.images += 1
        self.spec = copy.deepcopy(self.spec)
        for one in self.spec["template"]["roles"]:
            for name in ("entryTemplate", "workerTemplate"):
                if name in one:
                    one[name]["spec"]["containers"][0].update(image=f"attache/host:{self.images}", command=command)
        await self._write()

    async def _write(self) -> None:
        name, namespace = "llama", self.place.namespace
        await self.client.merge_patch(MODEL_INFERS, name, namespace, {"spec": self.spec})

    async def _kill(self) -> None:
        if self.place.node.workers:
            key = self.rng.choice(sorted(self.place.node.workers))
            self.place.node.kill(key)

    async def _delete_pod(self) -> None:
        await self._delete_one(PODS)

    async def _drift(self) -> None:
        await self._delete_one(SERVICES)

    async def _delete_one(self, resource: ApiResource) -> None:
        found = (await self.client.list(resource, self.place.namespace)).items
        owned = sorted(one["metadata"]["name"] for one in found if one["metadata"].get("ownerReferences"))
        if owned:
            try:
                await self.client.delete(resource, self.rng.choice(owned), self.place.namespace)
            except NotFound:
                return  # somebody was faster

    def _role(self, name: str, replicas: int, workers: int) -> dict[str, Any]:
        made = self.place.role(name, replicas=replicas, workers=workers)
        for one in ("entryTemplate", "workerTemplate"):
            if one in made:
                container = {"name": "engine", "image": "attache/host:1", "command": RUNS}
                made[one] = {"spec": {**made[one]["spec"], "containers": [container]}}
        return {"workerReplicas": 0, **made}


def _typed(resource: ApiResource) -> Object:
    return {"apiVersion": resource.api_version, "kind": resource.kind}


@pytest.mark.parametrize("seed", [1, slow(2), slow(3)])
async def test_a_random_history_ends_as_on_the_virtual_cluster(
    place: Place, kube: Kube, namespace: str, seed: int
) -> None:
    rng = Random(seed)
    history, decide = History(place, rng), Watching()
    await history.create()
    for _ in range(6):
        if kube.fake is not None:
            kube.fake.faults.refuse(rng.randint(0, 3), 500, of=lambda call: call.verb in ("create", "delete", "patch"))
        async with managing(kube.admin, namespace, decide=decide):
            for _ in range(rng.randint(0, 3)):
                await asyncio.sleep(rng.uniform(0.0, 0.6))
                await _unless_refused(history)
    if kube.fake is not None:
        kube.fake.faults.heal()
    await history.make_good()
    async with managing(kube.admin, namespace, decide=decide) as manager:
        await _ends_well(history)
        if decide.broken:
            raise decide.broken[0]
        writes = manager.writes()
        # resyncs come every two seconds
        await asyncio.sleep(5)
        assert manager.writes() == writes


async def _unless_refused(history: History) -> None:
    """The faults of the server may meet the user as well."""
    for _ in range(5):
        try:
            await history.happen()
        except Exception:  # noqa: BLE001 - whatever the server makes up
            await asyncio.sleep(0.05)
        else:
            return


async def _ends_well(history: History) -> None:
    deadline_s = time.monotonic() + PATIENCE_S  # noqa: TID251 - this is an edge
    while True:
        try:
            has_what_it_should(await history.snapshot())
        except (Broken, KeyError, IndexError) as error:
            if time.monotonic() > deadline_s:  # noqa: TID251 - this is an edge
                raise error from None
        else:
            return
        await asyncio.sleep(0.3)

# SPDX-License-Identifier: Apache-2.0
"""A ModelInfer and what it owns, as an API server would have them after each plan: for stories about reconciling."""

from __future__ import annotations

import copy
import itertools
from typing import Any, Final

import msgspec

from controller.kube.api_resources import (
    CONTROLLER_REVISIONS,
    MODEL_INFER_ROLES,
    PODS,
    SCHEDULER_POD_GROUPS,
    SERVICES,
    VOLCANO_POD_GROUPS,
    ApiResource,
    key_of,
    timestamp_of,
)
from controller.kube.reconcile_plan import Annotate, Apply, Create, Delete, Plan, SetStatus
from controller.models.model_infer.model_infer_state import GangSchedulingApis, ModelInferState, NodeCapacity, PodLoad
from controller.models.model_infer.reconcile import reconcile
from tests.kube_objects import resource

Object = dict[str, Any]

START_S: Final = 1_800_000_000.0
ENGINE: Final[Object] = {"spec": {"containers": [{"name": "engine", "image": "vllm:1"}]}}


def template(image: str = "vllm:1", **fields: Any) -> Object:  # noqa: ANN401 - any part of a PodSpec
    """Of a pod with one engine."""
    return {"spec": {"containers": [{"name": "engine", "image": image}], **fields}}


def role(name: str = "all", **fields: Any) -> Object:  # noqa: ANN401 - any field of a role
    """A role of one pod, if not said otherwise."""
    return {"name": name, "entryTemplate": template(), **fields}


def model_infer(*roles: Object, name: str = "llama", **spec: Any) -> Object:  # noqa: ANN401 - any field of the spec
    """``template`` in ``spec`` has further fields of the template."""
    whole = {"roles": list(roles or [role()]), "drainTimeout": "0s", **spec.pop("template", {})}
    return resource("ModelInfer", name, {"template": whole, **spec}, uid="uid-of-" + name)


class Cluster:
    """Keeps objects by resource and key. ``pods`` run and become ready only as the test says."""

    def __init__(self, thing: Object) -> None:
        self.thing = thing
        self.now_s = START_S
        self.things: dict[ApiResource, dict[str, Object]] = {}
        self.loads: dict[str, PodLoad] = {}
        self.asked: frozenset[str] = frozenset()
        self.lost_nodes: dict[str, float] = {}
        self.room: list[NodeCapacity] | None = None
        self.gang = GangSchedulingApis()
        self.log_tails: dict[str, str] = {}
        self.plan = Plan()
        self._uids = itertools.count(1)

    def observed(self) -> ModelInferState:
        """Copies, so that nobody can change what is kept."""
        groups = [*self.of(VOLCANO_POD_GROUPS).values(), *self.of(SCHEDULER_POD_GROUPS).values()]
        return copy.deepcopy(
            ModelInferState(
                thing=self.thing,
                pods=list(self.of(PODS).values()),
                services=list(self.of(SERVICES).values()),
                revisions=list(self.of(CONTROLLER_REVISIONS).values()),
                pod_groups=groups,
                role_scales=list(self.of(MODEL_INFER_ROLES).values()),
                lost_nodes=self.lost_nodes,
                node_capacities=self.room,
                loads=self.loads,
                loads_asked_of=self.asked,
                log_tails=self.log_tails,
                gang=self.gang,
            )
        )

    def of(self, kind: ApiResource) -> dict[str, Object]:
        """Objects by key."""
        return self.things.setdefault(kind, {})

    def look(self, after_s: float = 0.0) -> Plan:
        """Time passes, one look, and what it asks for is done. Deleted pods stay as going, until ``gone``."""
        self.now_s += after_s
        self.plan = reconcile(self.observed(), self.now_s)
        for action in self.plan.actions:
            self._do(action)
        self.asked = self.plan.asks_loads_of
        if self.plan.status is not None:
            self._write_status(msgspec.to_builtins(self.plan.status))
        return self.plan

    def settle(self, looks: int = 50) -> None:
        """Looks until nothing is done any more; pods become ready at once, and go at once."""
        for _ in range(looks):
            self.look(after_s=1.0)
            self.gone()
            self.ready()
            if not self.plan.actions and not self.plan.asks_loads_of and self.look().actions == ():
                return
        msg = f"it never settles: {self.plan.actions}"
        raise AssertionError(msg)

    def ready(self, *names: str, yes: bool = True) -> None:
        """These pods, or all that are not going, are running and ready or not."""
        for one in self._pods(names):
            if not one["metadata"].get("deletionTimestamp"):
                self.run(one["metadata"]["name"], ready=yes)

    def run(self, name: str, *, ready: bool, phase: str = "Running", **container: object) -> None:
        """``container``: fields of the engine's status."""
        pod = self.of(PODS)[f"default/{name}"]
        pod["spec"].setdefault("nodeName", "node-1")
        known = next(iter(pod.get("status", {}).get("conditions", ())), {})
        value = "True" if ready else "False"
        created = pod["metadata"]["creationTimestamp"]
        since = known["lastTransitionTime"] if known.get("status") == value else timestamp_of(self.now_s)
        if not known and not ready:
            since = created
        status = {
            "name": "engine",
            "ready": ready,
            "restartCount": 0,
            "state": {"running": {"startedAt": created}},
        }
        pod["status"] = {
            "phase": phase,
            "conditions": [{"type": "Ready", "status": value, "lastTransitionTime": since}],
            "containerStatuses": [{**status, **container}],
        }

    def gone(self, *names: str) -> None:
        """These pods, or all that are going, are gone."""
        for one in self._pods(names):
            if one["metadata"].get("deletionTimestamp"):
                del self.of(PODS)[key_of(one)]

    def pod(self, name: str) -> Object:
        """As it is now."""
        return self.of(PODS)[f"default/{name}"]

    def names(self) -> list[str]:
        """Of all pods; those that are going have a minus behind."""
        return [
            one["metadata"]["name"] + ("-" if one["metadata"].get("deletionTimestamp") else "")
            for one in sorted(self.of(PODS).values(), key=lambda one: one["metadata"]["name"])
        ]

    def images(self) -> dict[str, str]:
        """Of the engines, by pod."""
        return {
            key.partition("/")[2]: one["spec"]["containers"][0]["image"] for key, one in sorted(self.of(PODS).items())
        }

    def condition(self, type_: str) -> Object:
        """As the status says."""
        return next((one for one in self.thing["status"]["conditions"] if one["type"] == type_), {})

    def change(self, **spec: Any) -> None:  # noqa: ANN401 - any field of the spec
        """The user writes these fields of the spec."""
        self.thing["spec"].update(spec)
        self.thing["metadata"]["generation"] += 1

    def change_image(self, image: str, *roles: str) -> None:
        """Of these roles, or all."""
        for one in self.thing["spec"]["template"]["roles"]:
            if not roles or one["name"] in roles:
                one["entryTemplate"] = template(image)
        self.thing["metadata"]["generation"] += 1

    def _pods(self, names: tuple[str, ...]) -> list[Object]:
        return [one for one in list(self.of(PODS).values()) if not names or one["metadata"]["name"] in names]

    def _do(self, action: object) -> None:
        match action:
            case Create(resource=kind, thing=thing):
                assert key_of(thing) not in self.of(kind), f"{key_of(thing)} is there already"
                self._make(kind, thing)
            case Apply(resource=kind, thing=thing):
                known = self.of(kind).get(key_of(thing))
                if known is None:
                    self._make(kind, thing)
                else:
                    known["spec"] = thing["spec"]
                    known["metadata"] |= {key: value for key, value in thing["metadata"].items() if key != "uid"}
            case Annotate(resource=kind, key=key, annotations=annotations, labels=labels):
                metadata = self.of(kind)[key]["metadata"]
                for field, values in (("annotations", annotations), ("labels", labels)):
                    merged = {**metadata.get(field, {}), **values}
                    metadata[field] = {name: value for name, value in merged.items() if value is not None}
            case Delete(resource=kind, key=key, uid=uid):
                assert self.of(kind)[key]["metadata"]["uid"] == uid
                if kind == PODS and action.grace_s != 0:
                    self.of(kind)[key]["metadata"]["deletionTimestamp"] = timestamp_of(self.now_s)
                else:
                    del self.of(kind)[key]
            case SetStatus(resource=kind, key=key, fields=fields):
                self.of(kind)[key].setdefault("status", {}).update(fields)

    def _make(self, kind: ApiResource, thing: Object) -> None:
        made = copy.deepcopy(thing)
        made["metadata"] |= {"uid": f"uid-{next(self._uids)}", "creationTimestamp": timestamp_of(self.now_s)}
        self.of(kind)[key_of(made)] = made

    def _write_status(self, status: Object) -> None:
        known = {one["type"]: one for one in self.thing.get("status", {}).get("conditions", ())}
        for one in status.get("conditions", ()):
            old = known.get(one["type"], {})
            same = old.get("status") == one["status"]
            one["lastTransitionTime"] = old["lastTransitionTime"] if same else timestamp_of(self.now_s)
        self.thing["status"] = {**self.thing.get("status", {}), **status}

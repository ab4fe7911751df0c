# SPDX-License-Identifier: Apache-2.0
"""The objects of one model: engines, ModelServer, ModelRoute, policy and binding."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.kube.resources import (
    AUTOSCALING_POLICIES,
    AUTOSCALING_POLICY_BINDINGS,
    DEPLOYMENTS,
    MODEL_INFERS,
    MODEL_ROUTES,
    MODEL_SERVERS,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from controller.kube.resources import Object, Resource

ENTRY_LABELS: Final = ("attache.dev/model-infer", "attache.dev/entry")


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """What is scaled. ``kind``: Deployment or ModelInfer. ``engine``: words of the simulated engine. ``start_s``: that
    an engine waits before it begins to start. ``policy``: spec of its policy. ``server``: more of its ModelServer.
    ``target``: more of the binding's target.
    """

    name: str
    kind: str = "Deployment"
    replicas: int = 1
    most: int = 4
    engine: tuple[str, ...] = ()
    start_s: float = 0.0
    drain_s: int = 60
    policy: Mapping[str, Any] = {}
    server: Mapping[str, Any] = {}
    target: Mapping[str, Any] = {}

    @property
    def resource(self) -> Resource:
        """Of what is scaled."""
        return MODEL_INFERS if self.kind == "ModelInfer" else DEPLOYMENTS

    def objects(self, namespace: str) -> Iterator[tuple[Resource, Object]]:
        """All of them, in the order in which they are made."""
        selected = {ENTRY_LABELS[0]: self.name, ENTRY_LABELS[1]: "true"}
        labels = selected if self.kind == "ModelInfer" else {"app": self.name}
        selecting = {"workloadSelector": {"matchLabels": labels}, "workloadPort": {"port": 8000}}
        rules = [{"targetModels": [{"modelServerName": self.name}]}]
        reference = {"apiVersion": self.resource.api_version, "kind": self.kind, "name": self.name}
        target = {"name": "main", "ref": reference, "minReplicas": 0, "maxReplicas": self.most, **self.target}
        specs = (
            (self.resource, self._model_infer() if self.kind == "ModelInfer" else self._deployment(labels)),
            (MODEL_SERVERS, {"model": "org/llama", **selecting, **self.server}),
            (MODEL_ROUTES, {"modelName": self.name, "rules": rules}),
            (AUTOSCALING_POLICIES, dict(self.policy)),
            (AUTOSCALING_POLICY_BINDINGS, {"policyRef": self.name, "targets": [target]}),
        )
        metadata = {"name": self.name, "namespace": namespace}
        for resource, spec in specs:
            yield (
                resource,
                {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata, "spec": spec},
            )

    def _deployment(self, labels: Mapping[str, str]) -> Object:
        template = {"metadata": {"labels": labels}, "spec": self._pod()}
        return {"replicas": self.replicas, "selector": {"matchLabels": labels}, "template": template}

    def _model_infer(self) -> Object:
        role = {"name": "all", "replicas": 1, "entryTemplate": {"spec": self._pod()}}
        return {"replicas": self.replicas, "template": {"drainTimeout": f"{self.drain_s}s", "roles": [role]}}

    def _pod(self) -> Object:
        words = ["--model", "org/llama", "--port", "8000", *self.engine]
        container: Object = {
            "name": "engine",
            "image": "attache/engine-sim",
            "args": words,
            "ports": [{"name": "http", "containerPort": 8000}],
            # a machine with other work on it is slow, and so are its engines: that is no reason to take them out
            "readinessProbe": {
                "httpGet": {"path": "/health", "port": "http"},
                "periodSeconds": 1,
                "timeoutSeconds": 10,
                "failureThreshold": 30,
            },
            # nothing new comes by the time that the engine is told to stop
            "lifecycle": {"preStop": {"sleep": {"seconds": 3}}},
        }
        if self.start_s:
            engine = shlex.join([sys.executable, "-m", "bench.engine", "--host", "0.0.0.0", *words])  # noqa: S104 - becomes the pod's address
            container |= {
                "image": "attache/host",
                "command": ["sh", "-c", f"sleep {self.start_s:g}; exec {engine}"],
                "args": [],
            }
        return {"containers": [container], "terminationGracePeriodSeconds": 60}

# SPDX-License-Identifier: Apache-2.0
"""What the manager makes of a Model, for engines of this machine in place of pods."""

from __future__ import annotations

from typing import Any

import msgspec

from controller.commands.render import render_models
from extproc.api.spec import API_VERSION


class RenderedModel(msgspec.Struct, frozen=True):
    """``engine`` and ``sidecar``: the containers. ``server`` and ``route``: the ModelServer and the ModelRoute."""

    engine: dict[str, Any]
    sidecar: dict[str, Any]
    server: dict[str, Any]
    route: dict[str, Any]

    def documents(self, *addresses: str, **more: object) -> list[dict[str, Any]]:
        """Of a directory, without gRPC. ``more``: of the ModelServer's spec."""
        spec = {name: value for name, value in self.server["spec"].items() if not name.startswith("workload")}
        spec |= {"endpoints": [{"address": one} for one in addresses], **more}
        name = self.server["metadata"]["name"]
        rules = [
            {**rule, "targetModels": [one for one in rule["targetModels"] if one["modelServerName"] == name]}
            for rule in self.route["spec"]["rules"]
        ]
        route = {**self.route, "spec": {**self.route["spec"], "rules": rules}}
        return [_named({**self.server, "spec": spec}), _named(route)]


def rendered_model(name: str, **spec: object) -> RenderedModel:
    """Of a Model with one backend."""
    thing = {
        "apiVersion": API_VERSION,
        "kind": "Model",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"uri": f"s3://models/{name}", **spec},
    }
    (made,) = render_models([thing])
    assert not made.problem, made.problem
    infer, server, route = (
        next(dict(one) for one in made.children if one["kind"] == kind)
        for kind in ("ModelInfer", "ModelServer", "ModelRoute")
    )
    pod = infer["spec"]["template"]["roles"][0]["entryTemplate"]["spec"]
    engine, sidecar = (
        next(one for one in (*pod["containers"], *pod["initContainers"]) if one["name"] == name)
        for name in ("engine", "agent")
    )
    return RenderedModel(engine, sidecar, server, route)


def _named(thing: dict[str, Any]) -> dict[str, Any]:
    return {**thing, "metadata": {"name": thing["metadata"]["name"]}}

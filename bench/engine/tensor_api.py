# SPDX-License-Identifier: Apache-2.0
"""The protocols V1 and V2 over REST, with a tiny model: V1 answers the sum of each instance, V2 gives tensors back.

Tensors of V2 may be binary: behind the JSON, whose length the header ``Inference-Header-Content-Length`` has, come
their bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Callable

# Of a body with binary tensors, how long its JSON is.
JSON_LENGTH: Final = "Inference-Header-Content-Length"
_BINARY_SIZE: Final = "binary_data_size"


class Tensor(msgspec.Struct, omit_defaults=True):
    """One input or output. ``data``: absent if it is binary."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] = {}
    data: list[Any] | None = None


class _Inputs(msgspec.Struct):
    inputs: list[Tensor]
    id: str = ""


class _Outputs(msgspec.Struct, omit_defaults=True):
    model_name: str
    outputs: list[Tensor]
    model_version: str = ""
    id: str = ""


class _Instances(msgspec.Struct):
    instances: list[Any]


class TensorRoutes:
    """``serves``: whether a model has this name here. ``next_status``: the status with which the next request is to
    fail, None if it is not.
    """

    def __init__(self, serves: Callable[[str], bool], next_status: Callable[[], int | None]) -> None:
        self._serves = serves
        self._next_status = next_status

    @property
    def routes(self) -> list[web.RouteDef]:
        """What is served."""
        found = [web.get("/v1/models/{model}", self._ready), web.get("/v2/health/ready", self._health)]
        for version in ("", "/versions/{version}"):
            found += [
                web.post(f"/v1/models/{{model}}{version}:predict", self._predict),
                web.post(f"/v2/models/{{model}}{version}/infer", self._infer),
                web.get(f"/v2/models/{{model}}{version}/ready", self._ready),
                web.get(f"/v2/models/{{model}}{version}", self._metadata),
            ]
        return found

    async def _predict(self, http: web.Request) -> web.Response:
        refused = self._refuse(http)
        if refused is not None:
            return refused
        try:
            asked = msgspec.json.decode(await http.read(), type=_Instances)
            return web.json_response({"predictions": [_sum(one) for one in asked.instances]})
        except (msgspec.DecodeError, TypeError) as error:
            return _error(400, str(error))

    async def _infer(self, http: web.Request) -> web.Response:
        refused = self._refuse(http)
        if refused is not None:
            return refused
        body = await http.read()
        length = http.headers.get(JSON_LENGTH)
        try:
            size = len(body) if length is None else int(length)
            asked = msgspec.json.decode(body[:size], type=_Inputs)
            binary = sum(one.parameters.get(_BINARY_SIZE, 0) for one in asked.inputs)
        except (ValueError, TypeError) as error:
            return _error(400, str(error))
        if size + binary != len(body):
            return _error(400, f"the body has {len(body)} bytes, and its JSON and tensors {size + binary}")
        version = http.match_info.get("version", "")
        head = msgspec.json.encode(_Outputs(http.match_info["model"], asked.inputs, version, asked.id))
        if length is None:
            return web.Response(body=head, content_type="application/json")
        return web.Response(
            body=head + body[size:], content_type="application/octet-stream", headers={JSON_LENGTH: str(len(head))}
        )

    async def _ready(self, http: web.Request) -> web.Response:
        name = http.match_info["model"]
        if not self._serves(name):
            return _error(404, f"Model with name {name} does not exist.")
        return web.json_response({"name": name, "ready": True})

    async def _metadata(self, http: web.Request) -> web.Response:
        refused = self._refuse(http)
        if refused is not None:
            return refused
        return web.json_response(
            {"name": http.match_info["model"], "platform": "simulated", "versions": [], "inputs": [], "outputs": []}
        )

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"ready": True})

    def _refuse(self, http: web.Request) -> web.Response | None:
        status = self._next_status()
        if status is not None:
            return _error(status, "The engine is asked to fail.")
        name = http.match_info["model"]
        return None if self._serves(name) else _error(404, f"Model with name {name} does not exist.")


def _sum(instance: object) -> float:
    """Of all numbers in it."""
    if isinstance(instance, list):
        return float(sum(map(_sum, instance)))
    if not isinstance(instance, int | float):
        raise TypeError("instances are numbers, or lists of them")
    return float(instance)


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)

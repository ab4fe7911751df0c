# SPDX-License-Identifier: Apache-2.0
"""The models of a soak, their files, and how they change: all pure, so that a change is a value.

Each model is a file with a ModelRoute and one or two ModelServers. Its engines have addresses of their own (every
address of 127/8 is loopback), behind which a few processes listen: an answer's address identifies the model of its
request.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import msgspec

from extproc.api.spec import API_VERSION

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence

# Every so many models one splits its requests between two ModelServers.
_SPLIT_EVERY: Final = 10
_MOST_ADAPTERS: Final = 4
_MOST_PORTS: Final = 3
BROKEN_EVERY: Final = 60


class SoakModel(msgspec.Struct, frozen=True):
    """One model. ``alias`` and ``served``: revisions of the name in clients' requests and of the engines' name.
    ``engines``: the processes that serve it. ``weight``: of the second ModelServer, in percent. ``limit``: requests a
    second, far above what is sent. ``adapters``: how many there were ever; all but the last few have left.
    """

    number: int
    engines: tuple[int, ...]
    alias: int = 0
    served: int = 0
    weight: int = 50
    limit: int = 100_000
    adapters: int = 0

    @property
    def name(self) -> str:
        """The ModelRoute's name; its file is called so, too."""
        return f"model-{self.number:04}"

    @property
    def file(self) -> str:
        """In the configuration directory."""
        return f"{self.name}.yaml"

    @property
    def public_name(self) -> str:
        """The model name in requests."""
        return f"m{self.number}.{self.alias}"

    @property
    def server_suffixes(self) -> tuple[str, ...]:
        """Its ModelServers."""
        return ("a", "b") if self.number % _SPLIT_EVERY == 0 else ("a",)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """LoRA adapters that requests may name."""
        first = max(0, self.adapters - _MOST_ADAPTERS)
        return tuple(f"m{self.number}-lora{one}" for one in range(first, self.adapters))

    @property
    def engine_model_names(self) -> frozenset[str]:
        """The names under which engines get its requests, which they repeat in their answers."""
        return frozenset(f"{self.name}-{side}.{self.served}" for side in self.server_suffixes)

    @property
    def hosts(self) -> frozenset[str]:
        """Where its engines are."""
        return frozenset(engine_host(self.number, side) for side in self.server_suffixes)


def engine_host(number: int, side: str) -> str:
    """The address of a ModelServer's engines."""
    return f"127.{1 + (side == 'b')}.{number >> 8}.{number & 255}"


def engine_hosts(numbers: int) -> list[str]:
    """Those of so many models."""
    return [engine_host(number, side) for number in range(numbers) for side in SoakModel(number, ()).server_suffixes]


def document(kind: str, name: str, spec: Mapping[str, object]) -> dict[str, object]:
    """An object of the configuration."""
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": dict(spec)}


def documents_text(documents: Sequence[Mapping[str, object]]) -> str:
    """A file's content: JSON is YAML."""
    return "".join(f"---\n{json.dumps(one)}\n" for one in documents)


def model_file_content(model: SoakModel, ports: Sequence[int]) -> str:
    """The model's file. ``ports``: of the engine processes."""
    targets: list[dict[str, object]] = []
    servers = []
    for side in model.server_suffixes:
        name = f"{model.name}-{side}"
        endpoints = [{"address": f"{engine_host(model.number, side)}:{ports[one]}"} for one in model.engines]
        spec = {"model": f"{name}.{model.served}", "endpoints": endpoints, "scrapeInterval": "10s"}
        servers.append(document("ModelServer", name, spec))
        targets.append({"modelServerName": name, "weight": model.weight if side == "b" else 100 - model.weight})
    route: dict[str, Any] = {
        "modelName": model.public_name,
        "loraAdapters": list(model.adapter_names),
        # by the name in an answer, clients see which engine it is of
        "responseModel": "Served",
        "rules": [{"targetModels": targets}],
        "rateLimits": [{"per": "Route", "unit": "second", "requests": model.limit}],
    }
    return documents_text([*servers, document("ModelRoute", model.name, route)])


class ModelChange(msgspec.Struct, frozen=True):
    """``before`` and ``after``: None for a model that is added or deleted."""

    name: str
    before: SoakModel | None
    after: SoakModel | None


def _reweighted(model: SoakModel, rng: random.Random, _: int) -> SoakModel:
    return msgspec.structs.replace(model, weight=rng.randint(1, 99))


def _limited(model: SoakModel, rng: random.Random, _: int) -> SoakModel:
    return msgspec.structs.replace(model, limit=rng.randint(10_000, 1_000_000))


def _renamed(model: SoakModel, _: random.Random, __: int) -> SoakModel:
    return msgspec.structs.replace(model, alias=model.alias + 1)


def _served_anew(model: SoakModel, _: random.Random, __: int) -> SoakModel:
    return msgspec.structs.replace(model, served=model.served + 1)


def _grown(model: SoakModel, rng: random.Random, engines: int) -> SoakModel:
    left = sorted(set(range(engines)) - set(model.engines))
    if not left or len(model.engines) >= _MOST_PORTS:
        return _shrunk(model, rng, engines)
    return msgspec.structs.replace(model, engines=(*model.engines, rng.choice(left)))


def _shrunk(model: SoakModel, rng: random.Random, engines: int) -> SoakModel:
    if len(model.engines) == 1:
        return _grown(model, rng, engines)
    gone = rng.choice(model.engines)
    return msgspec.structs.replace(model, engines=tuple(one for one in model.engines if one != gone))


def _adapted(model: SoakModel, _: random.Random, __: int) -> SoakModel:
    return msgspec.structs.replace(model, adapters=model.adapters + 1)


_EDITS: Final[Mapping[str, Callable[[SoakModel, random.Random, int], SoakModel]]] = {
    "weight": _reweighted,
    "limit": _limited,
    "route renamed": _renamed,
    "served name": _served_anew,
    "endpoint added": _grown,
    "endpoint removed": _shrunk,
    "adapter added": _adapted,
}
CHANGES: Final = (*_EDITS, "model added", "model deleted")

# What must be refused, each in the place of a good file.
BROKEN: Final[Mapping[str, str]] = {
    "no YAML": "kind: [",
    "half a file": f'{{"apiVersion": "{API_VERSION}", "kind": "ModelRo',
    "an unknown field": documents_text([document("ModelRoute", "broken", {"modelName": "x", "rule": []})]),
    "no ModelServer": documents_text(
        [
            document(
                "ModelRoute", "broken", {"modelName": "x", "rules": [{"targetModels": [{"modelServerName": "none"}]}]}
            )
        ]
    ),
    "a negative weight": documents_text(
        [
            document(
                "ModelRoute",
                "broken",
                {"modelName": "x", "rules": [{"targetModels": [{"modelServerName": "none", "weight": -1}]}]},
            )
        ]
    ),
    "binary": "\x00\x01\x02",
}


def initial_models(models: int, engines: int) -> dict[int, SoakModel]:
    """As many models as that, by number. Changes add and remove engines and adapters; the first fleet has as many of
    them as there will be after many changes, as the fleet must not grow while memory is judged.
    """
    return {number: _model(number, number % engines, number // engines, engines) for number in range(models)}


def _model(number: int, first: int, more: int, engines: int) -> SoakModel:
    on = tuple((first + one) % engines for one in range(1 + more % min(engines, _MOST_PORTS)))
    return SoakModel(number, on, adapters=_MOST_ADAPTERS)


def next_change(fleet: Mapping[int, SoakModel], rng: random.Random, *, size: int, engines: int) -> ModelChange:
    """A valid change. ``size``: how many models there should be, more or less; the numbers after it are spare."""
    name = rng.choice(CHANGES)
    if name in _EDITS:
        before = rng.choice(list(fleet.values()))
        return ModelChange(name, before, _EDITS[name](before, rng, engines))
    if len(fleet) < size or (name == "model added" and len(fleet) < size + spare_model_count(size) // 2):
        free = sorted(set(range(size + spare_model_count(size))) - fleet.keys())
        number = rng.choice(free)
        # a name that was never used before
        return ModelChange(
            "model added", None, SoakModel(number, (rng.randrange(engines),), alias=rng.randrange(1, 10**9))
        )
    return ModelChange("model deleted", rng.choice(list(fleet.values())), None)


def spare_model_count(size: int) -> int:
    """Numbers of models that come and go."""
    return max(4, size // 20)


def apply_change(fleet: Mapping[int, SoakModel], change: ModelChange) -> dict[int, SoakModel]:
    """The fleet after a change."""
    left = {number: model for number, model in fleet.items() if change.before is None or number != change.before.number}
    return left if change.after is None else {**left, change.after.number: change.after}

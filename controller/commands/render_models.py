# SPDX-License-Identifier: Apache-2.0
"""What Models become, as text: the objects that are made, and each engine's merged configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from controller.api.crds.schema import to_plain
from controller.kube.resources import key_of
from controller.models.model.children import children
from controller.models.model.observed import Observed, Settings
from controller.models.model.resolved import Unresolved, resolve
from controller.models.runtimes.settings import settings_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from controller.models.model.resolved import Resolved

Object = dict[str, Any]

_SETTINGS = Settings()


class RenderedModel(msgspec.Struct, frozen=True):
    """``key``: of the Model. ``children``: what is made of it. ``engines``: runtime, settings and config by backend and
    role. ``problem``: why nothing is made, empty if something is.
    """

    key: str
    children: Sequence[Object] = ()
    engines: Mapping[str, Any] = {}
    problem: str = ""


def render_models(objects: Iterable[Mapping[str, Any]], settings: Settings = _SETTINGS) -> list[RenderedModel]:
    """Every Model among ``objects``, with the runtimes and templates among them."""
    by_kind: dict[str, list[Object]] = {}
    for one in objects:
        by_kind.setdefault(one["kind"], []).append(dict(one))
    return [_rendered(model, by_kind, settings) for model in sorted(by_kind.get("Model", ()), key=key_of)]


def _rendered(thing: Object, by_kind: Mapping[str, Sequence[Object]], settings: Settings) -> RenderedModel:
    namespace = thing["metadata"]["namespace"]
    templates = by_kind.get("ModelTemplate", ())
    observed = Observed(
        thing=thing,
        runtimes=[one for one in by_kind.get("ServingRuntime", ()) if one["metadata"]["namespace"] == namespace],
        cluster_runtimes=by_kind.get("ClusterServingRuntime", ()),
        templates=[one for one in templates if one["metadata"]["namespace"] == namespace],
        # which namespace is the manager's is not known here
        shared_templates=[one for one in templates if one["metadata"]["namespace"] != namespace],
        settings=settings,
    )
    model = resolve(observed)
    if isinstance(model, Unresolved):
        return RenderedModel(key_of(thing), problem=f"{model.reason}: {model.message}")
    made = [one.thing for one in children(model, settings, {})]
    return RenderedModel(key_of(thing), children=made, engines=_engines(model))


def _engines(model: Resolved) -> dict[str, Any]:
    return {
        f"{made.backend.name}/{role.name}": {
            "runtime": str(made.preset),
            "settings": dict(settings_of(role.engine, "entry")),
            "config": to_plain(role.engine.config),
        }
        for made in model.backends
        for role in made.roles
    }


def as_text(model: RenderedModel, *, has_owner: bool = True) -> str:
    """A stream of YAML documents; the merged configuration is a comment in front, so that the rest can be applied.

    ``has_owner``: whether the objects belong to the Model. One without a uid, as in files, is refused by the API
    server.
    """
    if model.problem:
        return f"# Model {model.key}: {model.problem}\n"
    engines = yaml.safe_dump(dict(model.engines), sort_keys=False, allow_unicode=True, width=118)
    comment = "".join(f"# {line}\n" for line in engines.splitlines())
    made = model.children if has_owner else [_without_owner(one) for one in model.children]
    documents = "".join(f"---\n{_as_yaml(one)}" for one in made)
    return f"# Model {model.key}, its engines with all layers merged:\n{comment}{documents}"


def _without_owner(thing: Mapping[str, Any]) -> Object:
    metadata = {name: value for name, value in thing["metadata"].items() if name != "ownerReferences"}
    return {**thing, "metadata": metadata}


def _as_yaml(thing: Object) -> str:
    text: str = yaml.dump(thing, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=118)
    return text


class _Dumper(yaml.SafeDumper):
    """Without anchors, which hide what is said twice."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ANN401, ARG002 - as the base class has it
        return True

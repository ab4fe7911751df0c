# SPDX-License-Identifier: Apache-2.0
"""``attache render``: print what a cluster's objects, or files of them, compile to."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import yaml

from controller.api.crds.schema import to_plain
from controller.commands.gateway import add_endpoint_networks_option, endpoint_networks
from controller.gateway.compile.compiler import Compiler
from controller.gateway.compile.gateway_api.gateways import GatewayApiSettings
from controller.gateway.compile.gateway_api.object_cache import KINDS as GATEWAY_API_KINDS
from controller.gateway.compile.model_servers import LABEL
from controller.gateway.compile.referenced_secrets import ReferencedObjectKey
from controller.gateway.compile.source_objects import SOURCE_KINDS
from controller.kube.api_resources import Object, key_of
from controller.kube.conditions import WantedCondition, WantedStatus
from controller.models.model.children import child_objects
from controller.models.model.model_state import ModelSettings, ModelState, Unresolved, resolve_model
from controller.models.runtimes.engine_settings import engine_settings
from controller.models.runtimes.prefill_connectors import why_sidecar_needed
from extproc.api.config_errors import ConfigInvalid, Mistake
from extproc.api.config_loader import SUFFIXES
from extproc.api.spec import object_key
from extproc.api.yaml_documents import parse_document, split_documents
from extproc.cli.common import print_mistakes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from controller.gateway.compile.compiler import CompileResult
    from controller.kube.client import Client
    from controller.kube.cluster_access import ClusterAccess
    from controller.models.model.model_state import ResolvedBackend, ResolvedModel
    from extproc.api.addresses import Network
    from extproc.api.picker_config import PickerConfigChecker

_KINDS: Final = frozenset({*SOURCE_KINDS, *GATEWAY_API_KINDS, "ConfigMap", "Pod"})
# Rendered by themselves; gateways do not read them.
_OF_MODELS: Final = frozenset({"Model", "ModelTemplate", "ServingRuntime", "ClusterServingRuntime"})
# Placeholder for the address in statuses of Gateways, which the objects lack.
_SOMEWHERE: Final = "gateway"
_CLUSTER_SCOPED: Final = frozenset({"GatewayClass", "Namespace", "CustomResourceDefinition", "ClusterServingRuntime"})
# Read only if something points to them.
_POINTED_AT: Final = frozenset({"ConfigMap", "Secret"})
# Conditions that are False where an object's spec is not served as written.
_JUDGED: Final = frozenset({"Accepted", "ResolvedRefs", "Programmed"})
_SETTINGS = ModelSettings()
_SUFFIXES: Final = (".yaml", ".yml", ".json")
# An API server that does not answer is not waited for any longer.
_PATIENCE_S: Final = 20.0


class RenderResult(msgspec.Struct, frozen=True):
    """``files``: the directory's, by name. ``statuses``: of all objects that are served. ``refused``: why nothing of
    this would be served, empty if it would be. ``unused``: GatewayConfigs of other gateways. ``foreign``: kinds of
    objects that a gateway does not read. ``missing``: referenced Secrets and ConfigMaps that were not given.
    """

    files: Mapping[str, bytes]
    statuses: Sequence[WantedStatus]
    refused: str
    unused: Sequence[str]
    foreign: Sequence[str]
    missing: Sequence[ReferencedObjectKey]

    @property
    def is_good(self) -> bool:
        """Whether all objects are used as they are written."""
        conditions = [one for status in self.statuses for one in status.conditions]
        items = [one for status in self.statuses for list_ in status.lists for one in list_.entries]
        conditions += [one for item in items for one in item.conditions]
        return not self.refused and not any(one.status == "False" and one.type in _JUDGED for one in conditions)


def render(
    objects: Iterable[Object],
    gateway: str | None,
    check_picker: PickerConfigChecker,
    *,
    networks: tuple[Network, ...] | None = None,
) -> RenderResult:
    """``objects``: as an API server has them. ``gateway``: the GatewayConfig to serve, as ``namespace/name``.
    ``networks``: whose addresses may be listed as endpoints; None: all.
    """
    settings = GatewayApiSettings(advertise=_SOMEWHERE)
    compiler = Compiler(gateway, settings, check_picker=check_picker, networks=networks)
    configs, foreign = set(), set()
    given: dict[tuple[str, str], Object] = {}
    for thing in objects:
        kind, metadata = thing["kind"], thing.get("metadata") or {}
        if kind not in _KINDS:
            foreign.add(kind)
            continue
        name = metadata["name"]
        key = name if kind in _CLUSTER_SCOPED else object_key(metadata["namespace"], name)
        if kind == "GatewayConfig":
            configs.add(key)
        if kind in _POINTED_AT:
            given[kind, key] = thing
        if kind not in _POINTED_AT or (kind == "ConfigMap" and LABEL in (metadata.get("labels") or {})):
            compiler.update_object(kind, key, thing)
    outcome, followed = _with_pointed(compiler, given)
    return RenderResult(
        files=outcome.files,
        statuses=sorted(outcome.statuses.values(), key=lambda one: (one.kind, one.key)),
        refused=outcome.refused,
        unused=sorted(configs - {gateway}),
        foreign=sorted(foreign),
        missing=sorted(one for one in followed if (one.kind, one.key) not in given),
    )


def _with_pointed(
    compiler: Compiler, given: Mapping[tuple[str, str], Object]
) -> tuple[CompileResult, set[ReferencedObjectKey]]:
    """Compile with those Secrets and ConfigMaps that something points to, which may point on; all that were."""
    followed: set[ReferencedObjectKey] = set()
    while True:
        outcome = compiler.compile()
        fresh = set(outcome.pointers) - followed
        if not fresh:
            return outcome, followed
        followed |= fresh
        for one in fresh:
            compiler.update_object(one.compiler_kind, one.key, given.get((one.kind, one.key)))


def objects_in(file: str, text: str, namespace: str) -> Iterator[Object]:
    """The objects of one file, those in Lists too; ``namespace``: of those that name none. Raises ConfigInvalid."""
    for document in split_documents(file, text):
        value, findings = parse_document(document)
        if findings:
            raise ConfigInvalid(document.locate_mistakes(findings))
        items = value.get("items") if isinstance(value, dict) and str(value.get("kind")).endswith("List") else [value]
        for item in items if isinstance(items, list) else []:
            if item is None:
                continue
            if problem := _problem(item):
                raise ConfigInvalid(document.locate_mistakes([((), problem)]))
            scope = {} if item["kind"] in _CLUSTER_SCOPED else {"namespace": namespace}
            yield {**item, "metadata": {**scope, **(item.get("metadata") or {})}}


def _problem(item: object) -> str:
    """Why ``item`` is no object of Kubernetes; empty if it is one."""
    if not isinstance(item, dict) or not all(isinstance(item.get(field), str) for field in ("apiVersion", "kind")):
        return "is no object; write apiVersion, kind and metadata"
    if item["kind"] not in _KINDS | _OF_MODELS:
        return ""
    metadata = item.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        return "has no metadata.name; write one"
    return "" if isinstance(metadata.get("namespace", ""), str) else "write metadata.namespace as text"


def as_yaml(name: str, content: bytes) -> str:
    """One file of JSON or YAML as a document of a YAML stream, with its name in a comment; of others, the size
    alone.
    """
    if not name.endswith(SUFFIXES):
        return f"---\n# {name}: {len(content)} bytes, which may be secret\n"
    try:
        text = yaml.safe_dump(msgspec.json.decode(content), sort_keys=False, allow_unicode=True, width=120)
    except msgspec.DecodeError:
        text = content.decode()
    return f"---\n# {name}\n{text.rstrip()}\n"


def status_as_yaml(status: WantedStatus) -> str:
    """An object's status, without times."""
    lists = {
        one.name: [{**item.identity, **item.fields, "conditions": _plain(item.conditions)} for item in one.entries]
        for one in status.lists
        if one.entries
    }
    content = {
        "kind": status.kind,
        "object": status.key,
        "status": {**status.fields, "conditions": _plain(status.conditions), **lists},
    }
    return f"---\n# status\n{yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120).rstrip()}\n"


def _plain(conditions: Iterable[WantedCondition]) -> list[Any]:
    return [msgspec.to_builtins(one) for one in conditions]


class RenderedModel(msgspec.Struct, frozen=True):
    """``key``: of the Model. ``children``: what is made of it. ``engines``: runtime, settings and config by backend and
    role. ``problem``: why nothing is made, empty if something is.
    """

    key: str
    children: Sequence[Object] = ()
    engines: Mapping[str, Any] = {}
    problem: str = ""


def render_models(objects: Iterable[Mapping[str, Any]], settings: ModelSettings = _SETTINGS) -> list[RenderedModel]:
    """Every Model among ``objects``, with the runtimes and templates among them."""
    by_kind: dict[str, list[Object]] = {}
    for one in objects:
        by_kind.setdefault(one["kind"], []).append(dict(one))
    return [_rendered_model(model, by_kind, settings) for model in sorted(by_kind.get("Model", ()), key=key_of)]


def _rendered_model(thing: Object, by_kind: Mapping[str, Sequence[Object]], settings: ModelSettings) -> RenderedModel:
    namespace = thing["metadata"]["namespace"]
    templates = by_kind.get("ModelTemplate", ())
    observed = ModelState(
        thing=thing,
        runtimes=[one for one in by_kind.get("ServingRuntime", ()) if one["metadata"]["namespace"] == namespace],
        cluster_runtimes=by_kind.get("ClusterServingRuntime", ()),
        templates=[one for one in templates if one["metadata"]["namespace"] == namespace],
        # the manager's namespace is unknown here
        shared_templates=[one for one in templates if one["metadata"]["namespace"] != namespace],
        settings=settings,
    )
    model = resolve_model(observed)
    if isinstance(model, Unresolved):
        return RenderedModel(key_of(thing), problem=f"{model.reason}: {model.message}")
    made = [one.thing for one in child_objects(model, settings, {})]
    return RenderedModel(key_of(thing), children=made, engines=_engines(model))


def _engines(model: ResolvedModel) -> dict[str, Any]:
    return {
        f"{made.backend.name}/{role.name}": {
            "runtime": str(made.preset),
            "settings": dict(engine_settings(role.engine, "entry")),
            "config": to_plain(role.engine.config),
            **_sidecar(made),
        }
        for made in model.backends
        for role in made.roles
    }


def _sidecar(made: ResolvedBackend) -> dict[str, str]:
    """What the user has to add to the pods."""
    wanted = made.backend.disaggregation
    why = why_sidecar_needed(made.preset.spec.engine, wanted) if wanted is not None else ""
    return {"sidecar": f"{why}; run one that does"} if why else {}


def model_as_yaml(model: RenderedModel, *, has_owner: bool = True) -> str:
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
    """Without anchors: repeated values are written out."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ANN401, ARG002 - as the base class has it
        return True


def parser(prog: str = "attache render") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=(
            "Print what objects compile to: the files of the configuration directory, and the statuses that the objects"
            " would get; of a Model, the objects that are made of it and its engines' merged configuration. Nothing is"
            " changed."
        ),
        epilog=(
            "Exit status: 0, 1 if an object is not used as it is written, or 2 for a mistake in the options or in a"
            " file."
        ),
    )
    add = made.add_argument
    add(
        "paths",
        nargs="*",
        type=Path,
        metavar="PATH",
        help="a YAML or JSON file of objects, or a directory of such files",
    )
    add(
        "--cluster",
        action="store_true",
        help="the objects of the cluster, by the service account or the kubeconfig; Secrets are not read",
    )
    add(
        "--namespace",
        metavar="NAME",
        help="of objects in files without a namespace (default: default); with --cluster: only of this namespace",
    )
    add("--gateway-config", metavar="NAMESPACE/NAME", help="the GatewayConfig to serve; default: one without settings")
    add_endpoint_networks_option(made)
    add("--bundle", action="store_true", help="print Envoy's files, too")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="write the files into DIR/config and DIR/bundle instead of printing them",
    )
    return made


def main(words: list[str], prog: str, check_picker: PickerConfigChecker) -> int:
    """Exit status: 0, 1 if an object is not used as it is written, 2 for a mistake in the options or in a file."""
    made = parser(prog)
    options = made.parse_args(words)
    if bool(options.paths) == options.cluster:
        made.error("write PATH or --cluster, one of the two")
    if options.gateway_config is not None and options.gateway_config.count("/") != 1:
        made.error("--gateway-config: write NAMESPACE/NAME")
    # decoders of all kinds take a quarter of a second to make: not for --help

    models_are_good = True
    try:
        if options.cluster:
            rendered = _of_cluster(options, check_picker)
        else:
            objects = list(_of_files(options))
            others = [one for one in objects if one["kind"] not in _OF_MODELS]
            if len(others) < len(objects):
                models_are_good = _show_models(objects)
                if not others:
                    return 0 if models_are_good else 1
            rendered = render(others, options.gateway_config, check_picker, networks=_networks(options))
        bundle = _bundle(rendered) if options.bundle and not rendered.refused else {}
    except ConfigInvalid as error:
        return print_mistakes(error)
    except _NoCluster as error:
        print(error, file=sys.stderr)
        return 2
    try:
        _show(rendered, bundle, options.out)
    except OSError as error:
        print(f"cannot write into {options.out}: {error}", file=sys.stderr)
        return 2
    return 0 if rendered.is_good and models_are_good else 1


def _networks(options: argparse.Namespace) -> tuple[Network, ...] | None:
    """As a gateway with the same options has them."""
    return endpoint_networks(options.endpoint_networks, options.namespace)


def _show_models(objects: Sequence[Object]) -> bool:
    """What Models become; whether all of them become something."""

    found = render_models(objects)
    for one in found:
        print(model_as_yaml(one, has_owner=False), end="")
    return not any(one.problem for one in found)


class _NoCluster(Exception):
    """There is no cluster, or it does not answer."""


def _of_files(options: argparse.Namespace) -> Iterator[Object]:
    """Raises ConfigInvalid."""

    for path in options.paths:
        files = sorted(one for one in path.rglob("*") if one.suffix in _SUFFIXES) if path.is_dir() else [path]
        for file in files:
            try:
                text = file.read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigInvalid([Mistake(str(file), 0, "", f"cannot be read: {error}")]) from None
            yield from objects_in(str(file), text, options.namespace or "default")


def _of_cluster(options: argparse.Namespace, check_picker: PickerConfigChecker) -> RenderResult:
    """Of what the gateway role would follow; raises _NoCluster."""
    from controller.kube.cluster_access import find_access  # noqa: PLC0415
    from controller.kube.errors import ClusterAccessInvalid, ClusterError  # noqa: PLC0415

    try:
        return asyncio.run(_rendered(options, find_access(), check_picker))
    except (ClusterAccessInvalid, ClusterError) as error:
        raise _NoCluster(str(error)) from None
    except TimeoutError:
        raise _NoCluster(f"the API server does not list our kinds within {_PATIENCE_S:g} s") from None


async def _rendered(
    options: argparse.Namespace, access: ClusterAccess, check_picker: PickerConfigChecker
) -> RenderResult:
    from controller.kube.api_resources import CONFIG_MAPS, CRDS, SECRETS, split_key  # noqa: PLC0415
    from controller.kube.client import connect  # noqa: PLC0415

    resources = {one.kind: one for one in (CONFIG_MAPS, CRDS, SECRETS)}
    async with connect(access, manager="attache-render") as client:
        objects = await _listed(client, options.namespace)
        asked: set[ReferencedObjectKey] = set()
        while True:
            rendered = render(objects, options.gateway_config, check_picker, networks=_networks(options))
            fresh = set(rendered.missing) - asked
            if not fresh:
                return rendered
            asked |= fresh
            for one in sorted(fresh):
                namespace, name = split_key(one.key)
                found = await client.get_or_none(resources[one.kind], name, namespace or None)
                objects += [] if found is None else [found]


async def _listed(client: Client, namespace: str | None) -> list[Object]:
    from controller.gateway.informers import gateway_informers  # noqa: PLC0415
    from controller.kube.shared_informers import InformerSet, SharedInformers  # noqa: PLC0415

    cache = InformerSet(SharedInformers(client), namespace)
    informers = gateway_informers(cache)
    async with asyncio.timeout(_PATIENCE_S):
        await cache.list_once()
    return [one for _, informer in sorted(informers.items()) for _, one in sorted(informer.objects.items())]


def _bundle(rendered: RenderResult) -> Mapping[str, str]:
    """Envoy's files, with API keys as digests; raises ConfigInvalid."""
    from controller.bundle.envoy.bundle import build_bundle  # noqa: PLC0415 - Envoy's schema takes half a second to import
    from controller.bundle.secret_readers import AuthKeyReader  # noqa: PLC0415
    from extproc.api.config_loader import load_snapshot  # noqa: PLC0415

    documents = {name: content for name, content in rendered.files.items() if name.endswith(_SUFFIXES)}
    snapshot, missing = AuthKeyReader(os.environ).fill_available_keys(load_snapshot(documents), datetime.now(UTC))
    for mistake in missing:
        print(f"note: not here, so it is as if nobody had it: {mistake}", file=sys.stderr)
    return build_bundle(snapshot, "/bundle")


def _show(rendered: RenderResult, bundle: Mapping[str, str], out: Path | None) -> None:
    """Raises OSError."""
    from controller.bundle.atomic_files import replace_file  # noqa: PLC0415
    from controller.gateway.directory_writer import DirectoryWriter  # noqa: PLC0415

    for key in rendered.unused:
        print(f"note: GatewayConfig {key} is not served; name the one to serve with --gateway-config", file=sys.stderr)
    # definitions are read for their release alone
    for one in (each for each in rendered.missing if each.kind != "CustomResourceDefinition"):
        print(f"note: {one.kind} {one.key} is not there, and something points to it", file=sys.stderr)
    if rendered.foreign:
        print(f"note: left out, as a gateway does not look at them: {', '.join(rendered.foreign)}", file=sys.stderr)
    if rendered.refused:
        print(f"nothing would be changed: {rendered.refused}", file=sys.stderr)
    if out is None:
        for name, content in rendered.files.items():
            print(as_yaml(name, content), end="")
        for name, text in bundle.items():
            print(as_yaml(f"bundle/{name}", text.encode()), end="")
    else:
        DirectoryWriter(out / "config").write(rendered.files)
        for name, text in bundle.items():
            replace_file(out / "bundle" / name, text.encode(), 0o600)
    for status in rendered.statuses:
        print(status_as_yaml(status), end="")

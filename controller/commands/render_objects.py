# SPDX-License-Identifier: Apache-2.0
"""What a cluster's objects compile to, as text: the directory's files, and what objects would say of themselves"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import yaml

from controller.gateway.compile.compiler import Compiler
from controller.gateway.compile.gateway_api.gateways import GatewayApiSettings
from controller.gateway.compile.gateway_api.observed import KINDS as GATEWAY_API_KINDS
from controller.gateway.compile.secrets import Pointer
from controller.gateway.compile.servers import LABEL
from controller.gateway.compile.sources import DOCUMENT_KINDS
from controller.kube.conditions import Wanted, WantedStatus
from extproc.api.documents import read, split
from extproc.api.errors import ConfigInvalid
from extproc.api.load import SUFFIXES
from extproc.api.spec import object_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from controller.gateway.compile.compiler import Outcome
    from extproc.api.picker_config import PickerCheck

Object = Mapping[str, Any]

_KINDS: Final = frozenset({*DOCUMENT_KINDS, *GATEWAY_API_KINDS, "ConfigMap", "Pod"})
# Rendered by themselves; gateways do not look at them.
_OF_MODELS: Final = frozenset({"Model", "ModelTemplate", "ServingRuntime", "ClusterServingRuntime"})
# What Gateways say of their address, which no object tells.
_SOMEWHERE: Final = "gateway"
_CLUSTER_SCOPED: Final = frozenset({"GatewayClass", "Namespace", "CustomResourceDefinition", "ClusterServingRuntime"})
# Read only if something points to them.
_POINTED_AT: Final = frozenset({"ConfigMap", "Secret"})
# Conditions whose False means that an object is not used as it is written.
_JUDGED: Final = frozenset({"Accepted", "ResolvedRefs", "Programmed"})


class Rendered(msgspec.Struct, frozen=True):
    """``files``: the directory's, by name. ``statuses``: of all objects that are served. ``refused``: why nothing of
    this would be served, empty if it would be. ``unused``: GatewayConfigs of other gateways. ``foreign``: kinds of
    objects that a gateway does not look at. ``missing``: Secrets and ConfigMaps that something points to and that were
    not given.
    """

    files: Mapping[str, bytes]
    statuses: Sequence[WantedStatus]
    refused: str
    unused: Sequence[str]
    foreign: Sequence[str]
    missing: Sequence[Pointer]

    @property
    def is_good(self) -> bool:
        """Whether all objects are used as they are written."""
        conditions = [one for status in self.statuses for one in status.conditions]
        items = [one for status in self.statuses for list_ in status.lists for one in list_.entries]
        conditions += [one for item in items for one in item.conditions]
        return not self.refused and not any(one.status == "False" and one.type in _JUDGED for one in conditions)


def render(objects: Iterable[Object], gateway: str | None, check_picker: PickerCheck) -> Rendered:
    """``objects``: as an API server has them. ``gateway``: the GatewayConfig to serve, as ``namespace/name``."""
    compiler = Compiler(gateway, GatewayApiSettings(advertise=_SOMEWHERE), check_picker=check_picker)
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
            compiler.put(kind, key, thing)
    outcome, followed = _with_pointed(compiler, given)
    return Rendered(
        files=outcome.files,
        statuses=sorted(outcome.statuses.values(), key=lambda one: (one.kind, one.key)),
        refused=outcome.refused,
        unused=sorted(configs - {gateway}),
        foreign=sorted(foreign),
        missing=sorted(one for one in followed if (one.kind, one.key) not in given),
    )


def _with_pointed(compiler: Compiler, given: Mapping[tuple[str, str], Object]) -> tuple[Outcome, set[Pointer]]:
    """Compile with those Secrets and ConfigMaps that something points to, which may point on; all that were."""
    followed: set[Pointer] = set()
    while True:
        outcome = compiler.compile()
        fresh = set(outcome.pointers) - followed
        if not fresh:
            return outcome, followed
        followed |= fresh
        for one in fresh:
            compiler.put(one.compiled_as, one.key, given.get((one.kind, one.key)))


def objects_in(file: str, text: str, namespace: str) -> Iterator[Object]:
    """The objects of one file, those in Lists too; ``namespace``: of those that name none. Raises ConfigInvalid."""
    for document in split(file, text):
        value, findings = read(document)
        if findings:
            raise ConfigInvalid(document.mistakes(findings))
        items = value.get("items") if isinstance(value, dict) and str(value.get("kind")).endswith("List") else [value]
        for item in items if isinstance(items, list) else []:
            if item is None:
                continue
            if problem := _problem(item):
                raise ConfigInvalid(document.mistakes([((), problem)]))
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
    """What an object says of itself, without times."""
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


def _plain(conditions: Iterable[Wanted]) -> list[Any]:
    return [msgspec.to_builtins(one) for one in conditions]

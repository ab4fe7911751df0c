# SPDX-License-Identifier: Apache-2.0
"""What a cluster's objects compile to, as text: the directory's files, and what objects would say of themselves"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import yaml

from controller.gateway.compile.compiler import Compiler
from controller.gateway.compile.conditions import Wanted, WantedStatus
from controller.gateway.compile.gateway_api.observed import KINDS as GATEWAY_API_KINDS
from controller.gateway.compile.gateway_api.settings import GatewayApiSettings
from controller.gateway.compile.pickers import LABEL
from controller.gateway.compile.sources import DOCUMENT_KINDS
from extproc.config.directory import SUFFIXES
from extproc.config.documents import read, split
from extproc.config.errors import ConfigInvalid
from extproc.config.spec import object_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from extproc.config.picker_config import PickerCheck

Object = Mapping[str, Any]

_KINDS: Final = frozenset({*DOCUMENT_KINDS, *GATEWAY_API_KINDS, "ConfigMap", "Pod"})
# What Gateways say of their address, which no object tells.
_SOMEWHERE: Final = "gateway"
_CLUSTER_KINDS: Final = frozenset({"GatewayClass", "Namespace", "CustomResourceDefinition"})
# Conditions whose False means that an object is not used as it is written.
_JUDGED: Final = frozenset({"Accepted", "ResolvedRefs", "Programmed"})


class Rendered(msgspec.Struct, frozen=True):
    """``files``: the directory's, by name. ``statuses``: of all objects that are served. ``refused``: why nothing of this
    would be served, empty if it would be. ``unused``: GatewayConfigs of other gateways. ``foreign``: kinds of objects that
    a gateway does not look at.
    """

    files: Mapping[str, bytes]
    statuses: Sequence[WantedStatus]
    refused: str
    unused: Sequence[str]
    foreign: Sequence[str]

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
    for thing in objects:
        kind, metadata = thing["kind"], thing.get("metadata") or {}
        if kind not in _KINDS or (kind == "ConfigMap" and LABEL not in (metadata.get("labels") or {})):
            foreign.add(kind)
            continue
        key = metadata["name"] if kind in _CLUSTER_KINDS else object_key(metadata["namespace"], metadata["name"])
        if kind == "GatewayConfig":
            configs.add(key)
        compiler.put(kind, key, thing)
    outcome = compiler.compile()
    statuses = sorted(outcome.statuses.values(), key=lambda one: (one.kind, one.key))
    return Rendered(outcome.files, statuses, outcome.refused, sorted(configs - {gateway}), sorted(foreign))


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
            own = {} if item["kind"] in _CLUSTER_KINDS else {"namespace": namespace}
            yield {**item, "metadata": {**own, **(item.get("metadata") or {})}}


def _problem(item: object) -> str:
    """Why ``item`` is no object of Kubernetes; empty if it is one."""
    if not isinstance(item, dict) or not all(isinstance(item.get(field), str) for field in ("apiVersion", "kind")):
        return "is no object; write apiVersion, kind and metadata"
    if item["kind"] not in _KINDS:
        return ""
    metadata = item.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        return "has no metadata.name; write one"
    return "" if isinstance(metadata.get("namespace", ""), str) else "write metadata.namespace as text"


def as_yaml(name: str, content: bytes) -> str:
    """One file of JSON or YAML as a document of a YAML stream, with its name in a comment; of others, the size alone."""
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

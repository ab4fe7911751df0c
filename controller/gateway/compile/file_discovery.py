# SPDX-License-Identifier: Apache-2.0
"""llm-d's file-discovery: the files of a pool without Kubernetes, as the directory of an extproc.

An EndpointPickerConfig names a file of endpoints in ``dataLayer.discovery``. As in llm-d, an entry that cannot be used
is left out and reported; a file that cannot be read changes nothing.
Source: llm-d-router ``docs/discovery.md``.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.compiler import file_name
from controller.gateway.compile.inference_pool_compiler import PICKER_FIELDS, InferencePoolResult, PoolProblem
from controller.gateway.compile.model_servers import compile_picker
from controller.gateway.compile.pods import POD_LABEL
from controller.gateway.compile.source_objects import decode_source
from extproc.api.addresses import parse_endpoint
from extproc.api.config_errors import ConfigInvalid, Mistake
from extproc.api.spec import API_VERSION, namespace_of, object_key
from extproc.api.yaml_documents import Document, parse_document

if TYPE_CHECKING:
    from collections.abc import Iterator

    from controller.gateway.compile.model_servers import CompiledPickerConfig
    from extproc.api.picker_config import EndpointPickerConfig, PickerConfigChecker

TYPES: Final = ("file-discovery", "multicluster-file-discovery")
MAX_ENDPOINTS_BYTES: Final = 1024 * 1024
# As if a ConfigMap held it.
_PICKER: Final = "from-a-file"
# Of entries of a file in one message.
_MOST_SHOWN: Final = 5
_NOT_IN_NAMES: Final = re.compile(r"[^-a-z0-9.]+")


class FileDiscoverySettings(msgspec.Struct, frozen=True):
    """``path``: the file with the endpoints, relative to the working directory. ``watches``: its changes are used."""

    path: str
    watches: bool


class DiscoveryInvalid(Exception):
    """The file asks for a way to find endpoints that there is not; the message says which there are."""


def parse_file_discovery(config: EndpointPickerConfig) -> FileDiscoverySettings | None:
    """How the endpoints are found without a cluster; None: the file does not say so. Raises DiscoveryInvalid."""
    sections = [one for one in (config.data_layer, config.data) if isinstance(one, dict)]
    found = next((one["discovery"] for one in sections if one.get("discovery") is not None), None)
    if found is None:
        return None
    named = str(found.get("pluginRef") or "") if isinstance(found, dict) else ""
    plugin = next((one for one in config.plugins if one.effective_name == named), None)
    if plugin is None or plugin.type not in TYPES:
        is_type = "" if plugin is None else f" of type {plugin.type}"
        raise DiscoveryInvalid(
            f"dataLayer.discovery.pluginRef: '{named}'{is_type}; name a plugin of type {' or '.join(TYPES)}"
        )
    given = plugin.parameters or {}
    if not isinstance(given.get("path"), str) or not given["path"]:
        raise DiscoveryInvalid(
            f"{plugin.effective_name}: the parameter 'path' is missing; write the file with the endpoints"
        )
    return FileDiscoverySettings(given["path"], given.get("watchFile") is True)


def pool_name(text: str) -> str:
    """``text`` as the name of an object; without Kubernetes, llm-d takes any text."""
    return _NOT_IN_NAMES.sub("-", text.lower()).strip("-.")[:200] or "epp"


class _ListedEndpoint(msgspec.Struct, frozen=True):
    """One of ``endpoints``; other fields are ignored, as in llm-d. ``port``: text there, a number will do."""

    name: str
    address: str
    port: str | int
    namespace: str = "default"
    labels: dict[str, str] | None = None


class ListedEndpoints(msgspec.Struct, frozen=True):
    """``endpoints``: as a ModelServer has them. ``problems``: of the entries that were left out."""

    endpoints: tuple[Mapping[str, Any], ...]
    problems: tuple[str, ...]


def read_endpoints(file: str, text: str) -> ListedEndpoints:
    """A file of endpoints, YAML or JSON; raises ConfigInvalid if it is none.

    Of two entries with one name and namespace the later one counts, and so it does of two with one address.
    """
    if len(text.encode()) > MAX_ENDPOINTS_BYTES:
        raise ConfigInvalid([Mistake(file, 0, "", f"is larger than {MAX_ENDPOINTS_BYTES} bytes; list fewer endpoints")])
    document = Document(file, text)
    content, repeated = parse_document(document)
    if repeated:
        raise ConfigInvalid(document.locate_mistakes(repeated))
    listed = content.get("endpoints") if isinstance(content, dict) else None
    if not isinstance(content, dict) or not isinstance(listed, list | None):
        raise ConfigInvalid([Mistake(file, 0, "", "has no list 'endpoints'; write endpoints: [{name, address, port}]")])
    found: dict[str, Mapping[str, Any]] = {}
    by_name: dict[str, str] = {}
    problems = []
    for index, one in enumerate(listed or ()):
        try:
            entry = msgspec.convert(one, _ListedEndpoint)
            address = _address(entry)
        except (msgspec.ValidationError, ValueError) as error:
            problems.append(f"endpoints[{index}]: {error}")
            continue
        known = by_name.pop(object_key(entry.namespace, entry.name), None)
        if known is not None:
            found.pop(known, None)
        by_name[object_key(entry.namespace, entry.name)] = address
        found[address] = {"address": address, "labels": {**(entry.labels or {}), POD_LABEL: entry.name}}
    return ListedEndpoints(tuple(found[address] for address in sorted(found)), tuple(problems))


def _address(entry: _ListedEndpoint) -> str:
    """Raises ValueError."""
    try:
        is_ip6 = ipaddress.ip_address(entry.address).version == 6
    except ValueError:
        is_ip6 = False
    host = f"[{entry.address}]" if is_ip6 else entry.address
    parse_endpoint(f"{host}:{entry.port}")
    return f"{host}:{entry.port}"


class FilePoolCompiler:
    """``put_...`` take what the files hold, None if they cannot be read; ``compile`` gives the outcome.

    ``pool``: ``namespace/name`` of its ModelServer. ``fields``: of the ModelServer's spec.
    """

    def __init__(self, pool: str, fields: Mapping[str, Any], *, check_picker: PickerConfigChecker) -> None:
        self._pool = pool
        self._fields = {**PICKER_FIELDS, **fields}
        self._check_picker = check_picker
        self._problems: dict[str, PoolProblem] = {}
        # the last ones that could be used
        self._picker: CompiledPickerConfig | None = None
        self._endpoints: tuple[Mapping[str, Any], ...] | None = None

    def put_config(self, text: str | None) -> None:
        """The EndpointPickerConfig."""
        self._problems.pop("config", None)
        if text is None:
            self._report("config", "PickerConfigNotFound", "the EndpointPickerConfig cannot be read")
            return
        key = object_key(namespace_of(self._pool), _PICKER)
        picker = compile_picker(key, {"data": {"config": text}}, self._check_picker)
        if picker.problem:
            self._report("config", "PickerConfigInvalid", f"the EndpointPickerConfig: {picker.problem}")
        else:
            self._picker = picker

    def put_endpoints(self, file: str, text: str | None) -> None:
        """The endpoints, which ``file`` lists."""
        for about in ("endpoints", "entries"):
            self._problems.pop(about, None)
        if text is None:
            self._report("endpoints", "EndpointsNotFound", f"{file} cannot be read as text")
            return
        try:
            listed = read_endpoints(file, text)
        except ConfigInvalid as error:
            message = "; ".join(one.message for one in error.mistakes)
            self._report("endpoints", "EndpointsInvalid", f"{file} {message}")
            return
        self._endpoints = listed.endpoints
        if listed.problems:
            shown, more = listed.problems[:_MOST_SHOWN], len(listed.problems) - _MOST_SHOWN
            message = "; ".join([*shown, *([f"and {more} more"] if more > 0 else [])])
            self._problems["entries"] = PoolProblem("EndpointsLeftOut", f"{file}: {message}; they are left out")

    def set_discovery_problem(self, message: str) -> None:
        """``message``: why the EndpointPickerConfig does not say where the endpoints are; empty: it does."""
        self._problems.pop("discovery", None)
        if message:
            self._report("discovery", "DiscoveryInvalid", message)

    @property
    def has_endpoints(self) -> bool:
        """Whether the endpoints could ever be read."""
        return self._endpoints is not None

    def compile(self) -> InferencePoolResult:
        """What the files come to."""
        if self._picker is None or self._endpoints is None:
            return InferencePoolResult(None, tuple(self._problems.values()))
        spec = {**self._fields, "pickerConfig": self._picker.file, "endpoints": list(self._endpoints)}
        namespace, name = self._pool.split("/")
        spec.setdefault("model", name)
        metadata = {"name": name, "namespace": namespace}
        source = decode_source({"apiVersion": API_VERSION, "kind": "ModelServer", "metadata": metadata, "spec": spec})
        if source.mistakes:
            problem = PoolProblem("PoolInvalid", source.mistakes_text())
            return InferencePoolResult(None, (*self._problems.values(), problem))
        files = {self._picker.file: self._picker.content, file_name("ModelServer", self._pool): source.document()}
        count = len(self._endpoints)
        return InferencePoolResult(files, tuple(self._all_problems()), count, count, notes=tuple(self._picker.notes))

    def _all_problems(self) -> Iterator[PoolProblem]:
        yield from self._problems.values()
        if not self._endpoints:
            yield PoolProblem("NoEndpoints", "no endpoint is listed; requests are answered 503")

    def _report(self, about: str, reason: str, message: str) -> None:
        kept = self._picker if about == "config" else self._endpoints
        stays = "" if kept is None else "; what was used before stays"
        self._problems[about] = PoolProblem(reason, f"{message}{stays}")

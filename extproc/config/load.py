# SPDX-License-Identifier: Apache-2.0
"""Files to one Snapshot, or to every mistake; only what changed is decoded again."""

from __future__ import annotations

import logging
import traceback
from typing import TYPE_CHECKING, TypeVar

import msgspec
import xxhash

from extproc.config.access_policy import ModelAccessPolicy
from extproc.config.access_validation import Targets, check_targets
from extproc.config.admission import InferenceObjective
from extproc.config.backend import Backend
from extproc.config.decode import Object, decode
from extproc.config.documents import Document, split
from extproc.config.errors import ConfigInvalid, Mistake
from extproc.config.failure_mode import who_may
from extproc.config.gateway_config import GatewayConfig, GatewayConfigSpec
from extproc.config.http_route import HTTPRoute
from extproc.config.model_route import ModelRoute
from extproc.config.model_server import ModelServer
from extproc.config.picker_config import PickerFile
from extproc.config.schema import suggest
from extproc.config.snapshot import Snapshot
from extproc.config.spec import namespace_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from extproc.config.errors import Finding

log = logging.getLogger(__name__)

T = TypeVar("T", ModelRoute, ModelServer, GatewayConfig, HTTPRoute, Backend, ModelAccessPolicy, InferenceObjective)


class _Reading(msgspec.Struct, frozen=True):
    """A document with what it decoded to."""

    document: Document
    object: Object | None
    mistakes: list[Mistake]


class Loader:
    """Files to snapshots. A document whose text has not changed since the last call gives the same object again.

    It may move within its file, or to another: the text alone counts.
    """

    def __init__(self) -> None:
        self._files: dict[str, tuple[bytes, Sequence[_Reading]]] = {}
        # good documents of the last call
        self._objects: dict[tuple[str, bool], Object] = {}

    @property
    def is_empty(self) -> bool:
        """Whether the files of the last call hold none of our documents."""
        return not any(one.object is not None for _, found in self._files.values() for one in found)

    def load(self, files: Mapping[str, bytes]) -> Snapshot:
        """The snapshot of ``files`` (name to content); raises ConfigInvalid with all mistakes."""
        self._files = {name: (content, self._read_file(name, content)) for name, content in files.items()}
        readings = [reading for _, found in self._files.values() for reading in found]
        self._objects = {
            (one.document.text, one.document.is_json): one.object
            for one in readings
            if one.object is not None and not one.mistakes
        }
        return _assemble(readings, version=_digest(files))

    def _read_file(self, name: str, content: bytes) -> Sequence[_Reading]:
        known = self._files.get(name)
        if known is not None and known[0] == content:
            return known[1]
        try:
            return [self._read(document) for document in _documents(name, content)]
        except ConfigInvalid as error:
            return [_Reading(Document(name, ""), None, error.mistakes)]
        except Exception as error:  # noqa: BLE001 - whatever a file does to its reader, it must not end the process
            return [_Reading(Document(name, ""), None, [unforeseen(name, error)])]

    def _read(self, document: Document) -> _Reading:
        known = self._objects.get((document.text, document.is_json))
        if isinstance(known, PickerFile) and known.document != document:
            known = msgspec.structs.replace(known, document=document)
        return _Reading(document, *decode(document)) if known is None else _Reading(document, known, [])


def unforeseen(name: str, error: Exception) -> Mistake:
    """The mistake for an exception that nobody expected, whose traceback is logged.

    The exception's text is left out of both: it may repeat a secret of the file.
    """
    where = "".join(traceback.format_tb(error.__traceback__))
    log.error("reading %s failed with %s:\n%s", ascii(name), type(error).__name__, where)
    return Mistake(name, 0, "", f"makes the reader fail with {type(error).__name__}; please report it with the log")


def load(files: Mapping[str, bytes]) -> Snapshot:
    """The snapshot of ``files``, read once; raises ConfigInvalid with all mistakes."""
    return Loader().load(files)


def _documents(name: str, content: bytes) -> list[Document]:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ConfigInvalid(
            [Mistake(name, 0, "", f"not UTF-8 at byte {error.start}; save the file as UTF-8")]
        ) from None
    if not text.strip():
        # what another program's open-and-write looks like from here, in the middle of it
        raise ConfigInvalid([Mistake(name, 0, "", "is empty; write a document, or remove the file")])
    return split(name, text)


def _digest(files: Mapping[str, bytes]) -> str:
    digest = xxhash.xxh3_64()
    for name, content in sorted(files.items()):
        digest.update(f"{len(name)} {name} {len(content)} ".encode(errors="surrogateescape"))
        digest.update(content)
    return digest.hexdigest()


def _assemble(readings: Sequence[_Reading], *, version: str) -> Snapshot:
    """Raises ConfigInvalid."""
    routes, servers = _of(readings, ModelRoute), _of(readings, ModelServer)
    gateways, objectives = _of(readings, GatewayConfig), _of(readings, InferenceObjective)
    http_routes, backends = _of(readings, HTTPRoute), _of(readings, Backend)
    policies = _of(readings, ModelAccessPolicy)
    pickers: dict[str, PickerFile] = {}
    mistakes = [mistake for reading in readings for mistake in reading.mistakes]
    for one in readings:
        if isinstance(one.object, PickerFile):
            if one.document.file in pickers:
                second = "a second EndpointPickerConfig in this file; give each its own"
                mistakes.extend(one.document.mistakes([((), second)]))
            pickers[one.document.file] = one.object
    for document, _ in gateways[1:]:
        second = "a second GatewayConfig; a directory takes one, merge the two"
        mistakes.extend(document.mistakes([(("kind",), second)]))
    mistakes.extend(_check_references(routes, servers, pickers))
    mistakes.extend(_check_policies(policies, _targets(routes, servers, http_routes, gateways)))
    mistakes.extend(_check_secrets(gateways))
    mistakes.extend(_check_failure_mode(gateways, [policy for _, policy in policies]))
    mistakes.extend(_check_names(routes, "ModelRoute"))
    mistakes.extend(_check_names(servers, "ModelServer"))
    mistakes.extend(_check_names(http_routes, "HTTPRoute"))
    mistakes.extend(_check_names(backends, "Backend"))
    mistakes.extend(_check_names(policies, "ModelAccessPolicy"))
    mistakes.extend(_check_names(objectives, "InferenceObjective"))
    mistakes.extend(_unique(routes, _asked_names, ("spec",), "model or adapter"))
    if mistakes:
        raise ConfigInvalid(mistakes)
    return Snapshot(
        version=version,
        routes=tuple(route for _, route in routes),
        servers=tuple(server for _, server in servers),
        gateway=gateways[0][1].spec if gateways else GatewayConfigSpec(),
        objectives=tuple(objective for _, objective in objectives),
        http_routes=tuple(route for _, route in http_routes),
        backends=tuple(backend for _, backend in backends),
        access_policies=tuple(policy for _, policy in policies),
        picker_files=pickers,
    )


def _of(readings: Sequence[_Reading], cls: type[T]) -> list[tuple[Document, T]]:
    found = [(one.document, one.object) for one in readings if isinstance(one.object, cls)]
    return sorted(found, key=lambda pair: pair[1].metadata.key)


def _check_references(
    routes: Sequence[tuple[Document, ModelRoute]],
    servers: Sequence[tuple[Document, ModelServer]],
    pickers: Collection[str],
) -> Iterator[Mistake]:
    """Every ModelServer and file that is referred to exists."""
    for document, server in servers:
        if server.spec.workload_selector is not None:
            message = "selects pods, which a directory has none of; write endpoints, or apply it to a cluster"
            yield from document.mistakes([(("spec", "workloadSelector"), message)])
        file = server.spec.picker_config
        if file is not None and file not in pickers:
            message = f"no file '{file}' holds an EndpointPickerConfig; {suggest(file, pickers)}"
            yield from document.mistakes([(("spec", "pickerConfig"), message)])
    keys = {server.metadata.key for _, server in servers}
    for document, route in routes:
        yield from document.mistakes(_missing_servers(route, keys))


def _targets(
    routes: Sequence[tuple[Document, ModelRoute]],
    servers: Sequence[tuple[Document, ModelServer]],
    http_routes: Sequence[tuple[Document, HTTPRoute]],
    gateways: Sequence[tuple[Document, GatewayConfig]],
) -> Targets:
    return Targets(
        model_routes={route.metadata.key for _, route in routes},
        model_servers={server.metadata.key for _, server in servers},
        http_routes={route.metadata.key for _, route in http_routes},
        listeners={listener.name for _, gateway in gateways for listener in gateway.spec.listeners},
    )


def _check_policies(policies: Sequence[tuple[Document, ModelAccessPolicy]], known: Targets) -> Iterator[Mistake]:
    for document, policy in policies:
        yield from document.mistakes(check_targets(policy, known))


def _check_secrets(gateways: Sequence[tuple[Document, GatewayConfig]]) -> Iterator[Mistake]:
    """The gateway role puts what Secrets hold in their place."""
    advice = "is in a Secret, which a directory has none of"
    for document, gateway in gateways:
        given = gateway.spec.authentication
        if given is None:
            continue
        path = ("spec", "authentication")
        if given.api_key_secrets:
            said = f"{advice}; write apiKeys, or apply it to a cluster"
            yield from document.mistakes([((*path, "apiKeySecrets"), said)])
        for index, issuer in enumerate(given.jwt):
            if issuer.jwks_secret is not None:
                said = f"{advice}; write jwksFile, or apply it to a cluster"
                yield from document.mistakes([((*path, "jwt", index, "jwksSecret"), said)])


def _check_failure_mode(
    gateways: Sequence[tuple[Document, GatewayConfig]], policies: Sequence[ModelAccessPolicy]
) -> Iterator[Mistake]:
    for document, gateway in gateways[:1]:
        undone = who_may(gateway.spec, policies) if gateway.spec.failure_mode == "Open" else []
        if undone:
            said = f"without extproc, requests would get round {', '.join(undone[:3])}; write Close, or leave it out"
            yield from document.mistakes([(("spec", "failureMode"), said)])


def _missing_servers(route: ModelRoute, keys: Collection[str]) -> Iterator[Finding]:
    for number, rule in enumerate(route.spec.rules):
        for index, target in enumerate(rule.target_models):
            if route.server_key(target) not in keys:
                path = ("spec", "rules", number, "targetModels", index, "modelServerName")
                yield path, _no_server(route, target.model_server_name, keys)


def _no_server(route: ModelRoute, name: str, keys: Collection[str]) -> str:
    namespace = route.metadata.namespace
    near = [key.removeprefix(f"{namespace}/") for key in keys if namespace_of(key) == namespace]
    where = "" if namespace == "default" else f" in the namespace '{namespace}'"
    return f"no ModelServer is called '{name}'{where}; {suggest(name, near)}"


def _asked_names(route: ModelRoute) -> list[str]:
    own = [route.spec.model_name] if route.spec.model_name is not None else []
    return [*own, *route.spec.lora_adapters]


def _check_names(found: list[tuple[Document, T]], what: str) -> Iterator[Mistake]:
    return _unique(found, lambda one: [one.metadata.key], ("metadata", "name"), what)


def _unique(
    found: list[tuple[Document, T]], names: Callable[[T], list[str]], path: tuple[str, ...], what: str
) -> Iterator[Mistake]:
    seen: dict[str, str] = {}
    for document, one in found:
        taken = []
        for name in names(one):
            if name in seen:
                taken.append((path, f"the {what} '{name}' is already in {seen[name]}; use another name"))
            seen.setdefault(name, document.file)
        yield from document.mistakes(taken)

"""A directory of YAML files to one Snapshot, or to every mistake in it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import xxhash

from extproc.config.admission import InferenceObjective
from extproc.config.documents import Document, read_documents
from extproc.config.errors import ConfigInvalid, Mistake
from extproc.config.schema import find_mistakes, suggest
from extproc.config.types import API_VERSION, GatewayConfig, GatewayConfigSpec, ModelRoute, ModelServer, Snapshot
from extproc.config.validation import check_gateway, check_route, check_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from extproc.config.schema import Finding

Kind = ModelRoute | ModelServer | GatewayConfig | InferenceObjective
T = TypeVar("T", ModelRoute, ModelServer, GatewayConfig, InferenceObjective)

_TRIES: Final = 10

_KINDS: Mapping[str, type[Kind]] = {
    "ModelRoute": ModelRoute,
    "ModelServer": ModelServer,
    "GatewayConfig": GatewayConfig,
    "InferenceObjective": InferenceObjective,
}
# Kinds of others, under their own groups.
_FOREIGN: Mapping[str, tuple[str, ...]] = {
    "InferenceObjective": ("inference.networking.x-k8s.io/v1alpha2", "llm-d.ai/v1alpha2"),
}


def read_directory(directory: Path) -> dict[str, bytes]:
    """The YAML files of ``directory`` by name. Hidden files and folders are left out (Kubernetes keeps its own there)."""
    if not directory.is_dir():
        raise ConfigInvalid([Mistake(str(directory), 0, "", "is not a directory; name one that holds YAML files")])
    files = (file for file in sorted(directory.iterdir()) if file.suffix in {".yaml", ".yml"})
    return {file.name: file.read_bytes() for file in files if not file.name.startswith(".") and file.is_file()}


def signature(directory: Path) -> object:
    """Something that is equal as long as no file of ``directory`` has come, gone, or been written or replaced."""
    try:
        with os.scandir(directory) as entries:
            return sorted(found for entry in entries if (found := _identity(entry)) is not None)
    except OSError as error:
        return str(error)


def _identity(entry: os.DirEntry[str]) -> tuple[str, int, int, int] | None:
    if not entry.name.endswith((".yaml", ".yml")):
        return None
    try:
        stat = entry.stat()
    except FileNotFoundError:  # replaced between listing and asking
        return None
    return entry.name, stat.st_ino, stat.st_mtime_ns, stat.st_size


def load_directory(directory: Path) -> Snapshot:
    """The snapshot of ``directory``; raises ConfigInvalid with all mistakes.

    What changed while it was read is read again: a directory that is just being replaced can look empty.
    """
    before, found = signature(directory), _try_load(directory)
    for _ in range(_TRIES):
        after = signature(directory)
        if after == before:
            break
        before, found = after, _try_load(directory)
    if isinstance(found, Exception):
        raise found
    return found


def _try_load(directory: Path) -> Snapshot | ConfigInvalid | OSError:
    try:
        return load(read_directory(directory))
    except (ConfigInvalid, OSError) as error:
        return error


def load(files: Mapping[str, bytes]) -> Snapshot:
    """The snapshot of ``files`` (name to content); raises ConfigInvalid with all mistakes."""
    mistakes: list[Mistake] = []
    decoded: list[tuple[Document, Kind]] = []
    pickers: dict[str, Document] = {}
    for document in _read(files, mistakes):
        if _is_picker_config(document):
            if document.file in pickers:
                mistakes.append(document.mistake((), "a second EndpointPickerConfig in this file; give each its own"))
            pickers[document.file] = document
            continue
        kind = _decode(document, mistakes)
        if kind is not None:
            decoded.append((document, kind))
    mistakes.extend(_check_all(decoded, pickers))
    if mistakes:
        raise ConfigInvalid(mistakes)
    gateways = _of(decoded, GatewayConfig)
    return Snapshot(
        version=_digest(files),
        routes=tuple(route for _, route in _of(decoded, ModelRoute)),
        servers=tuple(server for _, server in _of(decoded, ModelServer)),
        gateway=gateways[0][1].spec if gateways else GatewayConfigSpec(),
        objectives=tuple(objective for _, objective in _of(decoded, InferenceObjective)),
        picker_files=pickers,
    )


def _is_picker_config(document: Document) -> bool:
    """Of llm-d's or the inference extension's kind; what it may say is not known here."""
    return isinstance(document.value, dict) and document.value.get("kind") == "EndpointPickerConfig"


def _digest(files: Mapping[str, bytes]) -> str:
    digest = xxhash.xxh3_64()
    for name, content in sorted(files.items()):
        digest.update(f"{len(name)} {name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()


def _read(files: Mapping[str, bytes], mistakes: list[Mistake]) -> Iterator[Document]:
    for name, content in files.items():
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            mistakes.append(Mistake(name, 0, "", f"not UTF-8 at byte {error.start}; save the file as UTF-8"))
            continue
        if not text.strip():
            # what another program's open-and-write looks like from here, in the middle of it
            mistakes.append(Mistake(name, 0, "", "is empty; write a document, or remove the file"))
        for found in read_documents(name, text):
            if isinstance(found, Mistake):
                mistakes.append(found)
            else:
                yield found


def _decode(document: Document, mistakes: list[Mistake]) -> Kind | None:
    """The typed document; None, with mistakes noted, where it is not one of ours."""
    value = document.value
    if not isinstance(value, dict):
        mistakes.append(document.mistake((), "is not a mapping; write apiVersion, kind, metadata and spec"))
        return None
    found: list[Finding] = []
    kind = value.get("kind")
    versions = _FOREIGN.get(str(kind), (API_VERSION,))
    if value.get("apiVersion") not in versions:
        found.append((("apiVersion",), f"write apiVersion: {' or '.join(versions)}"))
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        found.append((("kind",), f"'{kind}' is not a kind; {suggest(str(kind), _KINDS)}"))
        mistakes.extend(document.mistake(path, message) for path, message in found)
        return None
    found.extend(find_mistakes(value, cls))
    mistakes.extend(document.mistake(path, message) for path, message in found)
    return None if found else msgspec.convert(value, cls)


def _of(decoded: list[tuple[Document, Kind]], cls: type[T]) -> list[tuple[Document, T]]:
    found = [(document, kind) for document, kind in decoded if isinstance(kind, cls)]
    return sorted(found, key=lambda pair: pair[1].metadata.name)


def _check_all(decoded: list[tuple[Document, Kind]], pickers: Mapping[str, Document]) -> Iterator[Mistake]:
    routes, servers, gateways = _of(decoded, ModelRoute), _of(decoded, ModelServer), _of(decoded, GatewayConfig)
    names = {server.metadata.name for _, server in servers}
    for document, server in servers:
        yield from _place(document, check_server(server.spec, pickers))
    for document, route in routes:
        yield from _place(document, check_route(route.spec, names))
    for document, gateway in gateways:
        yield from _place(document, check_gateway(gateway.spec))
    for document, _ in gateways[1:]:
        yield document.mistake(("kind",), "a second GatewayConfig; a directory takes one, merge the two")
    yield from _unique(routes, lambda route: [route.metadata.name], ("metadata", "name"), "ModelRoute")
    yield from _unique(servers, lambda server: [server.metadata.name], ("metadata", "name"), "ModelServer")
    objectives = _of(decoded, InferenceObjective)
    yield from _unique(objectives, lambda one: [one.metadata.name], ("metadata", "name"), "InferenceObjective")
    yield from _unique(routes, _asked_names, ("spec",), "model or adapter")


def _asked_names(route: ModelRoute) -> list[str]:
    own = [route.spec.model_name] if route.spec.model_name is not None else []
    return [*own, *route.spec.lora_adapters]


def _place(document: Document, findings: Iterable[Finding]) -> Iterator[Mistake]:
    return (document.mistake(path, message) for path, message in findings)


def _unique(
    found: list[tuple[Document, T]], names: Callable[[T], list[str]], path: tuple[str, ...], what: str
) -> Iterator[Mistake]:
    seen: dict[str, str] = {}
    for document, kind in found:
        for name in names(kind):
            if name in seen:
                yield document.mistake(path, f"the {what} '{name}' is already in {seen[name]}; use another name")
            seen.setdefault(name, document.file)

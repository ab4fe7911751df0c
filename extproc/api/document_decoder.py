# SPDX-License-Identifier: Apache-2.0
"""One document to the object that it holds, or to every mistake in it."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec

from extproc.api.config_errors import ConfigInvalid, Mistake
from extproc.api.document_kinds import DOCUMENT_KINDS, DocumentKind
from extproc.api.gateway_config import check_has_listeners
from extproc.api.key_store import KEYS_FILE, KeyStore, KeyStoreSpec
from extproc.api.picker_config import PICKER_KIND, EndpointPickerConfig, PickerFile
from extproc.api.picker_flow_control import to_flow_control, with_usage_limits
from extproc.api.quantities import decode_quantity, decode_quantity_leniently
from extproc.api.schema_validation import advise_field, check_shape, suggest_similar
from extproc.api.spec import DirectoryObject
from extproc.api.yaml_documents import Document, parse_document, repeats_keys, split_documents

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from extproc.api.config_errors import Finding, Path


Object = DirectoryObject | PickerFile
_Decoded = DirectoryObject | EndpointPickerConfig

_CLUSTER_KINDS: Final = frozenset(
    {
        *("Model", "ModelTemplate", "ModelInfer", "ModelInferRole", "ServingRuntime", "ClusterServingRuntime"),
        *("AutoscalingPolicy", "AutoscalingPolicyBinding"),
    }
)
_KINDS: Final[Mapping[str, DocumentKind]] = MappingProxyType({kind.name: kind for kind in DOCUMENT_KINDS})
# Of every object of Kubernetes. Users write the first; a cluster's objects may lie in a directory with all of them.
_WRITTEN_METADATA: Final = ("name", "namespace", "labels", "annotations")
_METADATA: Final = frozenset(
    {
        *_WRITTEN_METADATA,
        *("creationTimestamp", "deletionGracePeriodSeconds", "deletionTimestamp", "finalizers", "generateName"),
        *("generation", "managedFields", "ownerReferences", "resourceVersion", "selfLink", "uid"),
    }
)
_FIELDS: Final = frozenset({"apiVersion", "kind", "metadata", "spec", "status"})
_DECODERS: Final[Mapping[str, msgspec.json.Decoder[Any]]] = MappingProxyType(
    {kind.name: msgspec.json.Decoder(kind.document, dec_hook=decode_quantity) for kind in DOCUMENT_KINDS}
)


class _Head(msgspec.Struct, frozen=True, rename="camel"):
    """The fields that determine the document's type."""

    api_version: str
    kind: str


def _known_fields(name: str, fields: Mapping[str, type]) -> type:
    """A type of these fields alone, whatever is in them."""
    made = [(field, cls | msgspec.UnsetType, msgspec.UNSET) for field, cls in sorted(fields.items())]
    return msgspec.defstruct(name, made, frozen=True, forbid_unknown_fields=True)


_HEAD: Final = msgspec.json.Decoder(_Head)
_KNOWN_FIELDS: Final[msgspec.json.Decoder[Any]] = msgspec.json.Decoder(
    _known_fields(
        "_KnownFields",
        {
            **dict.fromkeys(_FIELDS, msgspec.Raw),
            "metadata": _known_fields("_KnownMetadata", dict.fromkeys(_METADATA, msgspec.Raw)),
        },
    )
)


def decode(document: Document, *, listeners_may_come: bool = False) -> tuple[Object | None, list[Mistake]]:
    """The object and the mistakes in it; no object, and mistakes unless the document is empty, if it has another shape.

    An object with mistakes is not for use: it is returned so that references to it are not reported too.

    A well-formed document is decoded straight into its type; only others are compared with it field by field.

    ``listeners_may_come``: this is a GatewayConfig as it was applied to a cluster, where Gateways bring the listeners.
    """
    decoded = _decode_json(document) if document.is_json else None
    findings: list[Finding] = []
    if decoded is None:
        try:
            value, findings = parse_document(document)
        except ConfigInvalid as error:
            return None, error.mistakes
        if value is None or (document.is_json and _is_foreign(value)):
            return None, []
        repeats = bool(findings)
        decoded, more = _convert(value)
        findings.extend(more)
        if decoded is not None and repeats:
            # either of the two values may be meant, so neither is checked
            return None, document.locate_mistakes(findings)
    if decoded is None:
        return None, document.locate_mistakes(findings)
    findings.extend(_check(decoded, listeners_may_come=listeners_may_come))
    mistakes = document.locate_mistakes(findings)
    if not isinstance(decoded, EndpointPickerConfig):
        return decoded, mistakes
    flow_control = None if mistakes else with_usage_limits(to_flow_control(decoded), decoded)
    return PickerFile(document, decoded, flow_control), mistakes


def read_picker_file(file: str, text: str) -> PickerFile:
    """The one EndpointPickerConfig in ``text``; raises ConfigInvalid with every mistake."""
    documents = split_documents(file, text)
    if len(documents) != 1:
        raise ConfigInvalid([Mistake(file, 0, "", f"has {len(documents)} documents; write one {PICKER_KIND}")])
    (document,) = documents
    found, mistakes = decode(document)
    if not mistakes and not isinstance(found, PickerFile):
        mistakes = document.locate_mistakes([(("kind",), f"is not {PICKER_KIND}; write kind: {PICKER_KIND}")])
    if mistakes or not isinstance(found, PickerFile):
        raise ConfigInvalid(mistakes)
    return found


def read_key_store(content: bytes) -> KeyStoreSpec:
    """The one KeyStore that a file in JSON is; raises ConfigInvalid."""
    try:
        found, mistakes = decode(Document(KEYS_FILE, content.decode(), is_json=True))
    except UnicodeDecodeError:
        found, mistakes = None, []
    if not isinstance(found, KeyStore) or mistakes:
        raise ConfigInvalid(mistakes or [Mistake(KEYS_FILE, 0, "", "is no KeyStore")])
    return found.spec


def _decode_json(document: Document) -> _Decoded | None:
    """None if there is any mistake in it."""
    try:
        head = _HEAD.decode(document.text)
        kind = _KINDS.get(head.kind)
        if kind is None or head.api_version not in (kind.api_versions or (head.api_version,)):
            return None
        if head.kind != PICKER_KIND:
            _KNOWN_FIELDS.decode(document.text)
        decoded: _Decoded = _DECODERS[head.kind].decode(document.text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return None if repeats_keys(document.text) else decoded


def _is_foreign(value: object) -> bool:
    """Other programs' JSON may lie in the directory: key sets of token issuers, bodies of requests."""
    return isinstance(value, dict) and "apiVersion" not in value and "kind" not in value


def _convert(value: object) -> tuple[_Decoded | None, list[Finding]]:
    if not isinstance(value, dict):
        return None, [((), "is not a mapping; write apiVersion, kind, metadata and spec")]
    findings: list[Finding] = []
    kind = _KINDS.get(str(value.get("kind")))
    if kind is None:
        return None, [_no_kind(value)]
    cls, versions = kind.document, kind.api_versions
    if versions and value.get("apiVersion") not in versions:
        findings.append((("apiVersion",), f"write apiVersion: {' or '.join(versions)}"))
    if cls is EndpointPickerConfig:
        value = dict(_without_nulls(value))
    try:
        decoded: _Decoded | None = msgspec.convert(value, cls, dec_hook=decode_quantity)
    except msgspec.ValidationError:
        findings.extend(check_shape(value, cls))
        decoded = _convert_leniently(value, cls) or _plugins_alone(value, cls, findings)
    if cls is not EndpointPickerConfig:
        findings.extend(_unknown_fields(value, cls, known={path for path, _ in findings}))
    return decoded, findings


def _unknown_fields(value: Mapping[object, object], cls: type, known: Collection[Path]) -> Iterator[Finding]:
    """Fields that no object has: they would be ignored, and with them a guard or a limit that is not indented."""
    for key in map(str, value):
        if key not in _FIELDS and (key,) not in known:
            yield (key,), f"there is no such field; {advise_field(key, cls, value)}"
    metadata = value.get("metadata")
    for key in map(str, metadata if isinstance(metadata, dict) else ()):
        if key not in _METADATA and ("metadata", key) not in known:
            yield ("metadata", key), f"there is no such field; {suggest_similar(key, _WRITTEN_METADATA)}"


def _no_kind(value: Mapping[Any, object]) -> Finding:
    if "kind" in value:
        kind = str(value["kind"])
        if kind in _CLUSTER_KINDS:
            instead = "here write a ModelServer with endpoints, and a ModelRoute"
            return ("kind",), f"{kind} is read in a cluster only; {instead}"
        return ("kind",), f"'{kind}' is not a kind; {suggest_similar(kind, _KINDS)}"
    other = next((str(key) for key in value if str(key).lower() == "kind"), None)
    if other is not None:
        return (other,), "there is no such field; did you mean 'kind'?"
    return ("kind",), f"the field 'kind' is missing; {suggest_similar('', _KINDS)}"


def _without_nulls(value: Any) -> Any:  # noqa: ANN401 - plain data of any shape
    """For Go, a field that is null is absent."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


def _convert_leniently(value: object, cls: type) -> _Decoded | None:
    """With placeholders for invalid durations and sizes, so that mistakes elsewhere in the document are found too."""
    try:
        found: _Decoded = msgspec.convert(value, cls, dec_hook=decode_quantity_leniently)
    except msgspec.ValidationError:
        return None
    return found


def _plugins_alone(
    value: Any,  # noqa: ANN401 - plain data of any shape
    cls: type,
    findings: list[Finding],
) -> _Decoded | None:
    """An EndpointPickerConfig without its faulty sections, so that mistakes of plugins are found too.

    None if the plugins or profiles themselves cannot be read: what refers to them would look wrong.
    """
    faulty = {str(path[0]) for path, _ in findings if path}
    if cls is not EndpointPickerConfig or not faulty.isdisjoint({"plugins", "schedulingProfiles"}):
        return None
    return _convert_leniently({key: one for key, one in value.items() if str(key) not in faulty}, cls)


def _check(decoded: _Decoded, *, listeners_may_come: bool) -> Iterator[Finding]:
    checked = decoded.spec if isinstance(decoded, DirectoryObject) else decoded
    for check in _KINDS[type(decoded).__name__].checks:
        if not (listeners_may_come and check is check_has_listeners):
            yield from check(checked)

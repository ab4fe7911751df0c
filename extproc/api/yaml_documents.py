# SPDX-License-Identifier: Apache-2.0
"""Files to documents, documents to plain data, and the line of each field.

YAML is read within bounds, so that no text can exhaust memory, time or the stack. libyaml's composer recurses in C, and
deep nesting ends the process; aliases of aliases stand for more than any memory holds; tags call constructors that
raise whatever they like. The stream of events needs no recursion: all of it is checked before anything is composed,
which costs an eighth of reading the document.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import msgspec
import yaml

from extproc.api.config_errors import ConfigInvalid, Mistake, format_path
from extproc.api.error_hints import explain_forbidden_character, explain_syntax_error, template_hint

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from extproc.api.config_errors import Finding, Path

T = TypeVar("T")
# Of one document. Ours are nested 10 deep; ten thousand endpoints with six labels each have 170,000 nodes.
MAX_DEPTH: Final = 64
MAX_NODES: Final = 250_000
# Python refuses to print, and takes long to read, numbers of many thousands of digits.
_MAX_NUMBER_CHARACTERS: Final = 1000
_NUMBER_LIKE: Final = re.compile(r"[-+.0-9]")
_BOOLEAN: Final = "tag:yaml.org,2002:bool"
_TEXT: Final = "tag:yaml.org,2002:str"
# Of one file.
MAX_DOCUMENTS: Final = 10_000
# Most mistakes that are reported of one document: the first few suffice.
_MAX_FINDINGS: Final = 100
# Directives, ends of documents and rare line breaks: with them, only YAML's own parser finds the beginnings of
# documents.
_NEED_PARSER: Final = ("\n%", "\n...", "\x85", "\u2028", "\u2029")
_LONE_RETURN: Final = re.compile("\r(?!\n)")
_BYTE: Final = re.compile(r"\(byte (\d+)\)")
# In YAML and JSON, in flow style too.
_NAME: Final = re.compile(r"""\bname["']?[ \t]*:[ \t]*["']?([^\s"',}]+)""")


if TYPE_CHECKING:
    _SafeLoader = yaml.SafeLoader
else:
    # libyaml is several times faster; the pure loader reads the same
    _SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class YamlLoader(_SafeLoader):
    """Reads ``on`` as text where it is the name of a field. As a value it is true, as it is for Kubernetes."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As the library does, but for names."""
        for name, _ in node.value:
            if name.tag == _BOOLEAN and name.value == "on":
                name.tag = _TEXT
        return super().construct_mapping(node, deep)


class UnsupportedYaml(yaml.YAMLError):
    """Well-formed YAML that is not read. ``problem``: what it is, and what to write instead. ``line``: from 0."""

    def __init__(self, problem: str, event: yaml.Event) -> None:
        super().__init__(problem)
        self.problem = problem
        self.line = 0 if event.start_mark is None else event.start_mark.line


class _Open(msgspec.Struct):
    """A collection whose end has not come yet. ``children``: nodes so far; in a mapping, every other one is a key."""

    is_mapping: bool
    anchor: str | None
    size_before: int
    children: int = 0


def bounded_events(text: str) -> Iterator[yaml.Event]:
    """The events of ``text``; raises yaml.YAMLError, or Refused at the first that is out of bounds."""
    bounds = _Bounds()
    for event in yaml.parse(text, YamlLoader):
        bounds.take(event)
        yield event


def compose(text: str) -> yaml.Node | None:
    """The one document in ``text``, None if there is none; raises yaml.YAMLError, or Refused."""
    bounds = _Bounds()
    for event in yaml.parse(text, YamlLoader):
        bounds.take(event)
    loader = YamlLoader(text)
    try:
        node: yaml.Node | None = loader.get_single_node()
    finally:
        loader.dispose()
    return node


class _Bounds:
    """Counts the nodes of a document from its events; an alias counts as all nodes that it stands for."""

    def __init__(self) -> None:
        self._open: list[_Open] = []
        # values so far, and in each anchored node
        self._size = 0
        self._anchored: dict[str, int] = {}

    def take(self, event: yaml.Event) -> None:
        """Raises Refused."""
        if isinstance(event, yaml.ScalarEvent):
            self._add(event, 1)
            if event.anchor is not None:
                self._anchored[event.anchor] = 1
            if len(event.value) > _MAX_NUMBER_CHARACTERS and event.implicit[0] and _NUMBER_LIKE.match(event.value):
                raise UnsupportedYaml("a number that is too long; put it in quotes if it is text", event)
        elif isinstance(event, yaml.CollectionStartEvent):
            self._add(event, 1)
            self._open.append(_Open(isinstance(event, yaml.MappingStartEvent), event.anchor, self._size - 1))
            if len(self._open) > MAX_DEPTH:
                raise UnsupportedYaml(f"nested more than {MAX_DEPTH} deep; write it flatter", event)
        elif isinstance(event, yaml.CollectionEndEvent):
            done = self._open.pop()
            if done.anchor is not None:
                self._anchored[done.anchor] = self._size - done.size_before
        elif isinstance(event, yaml.AliasEvent):
            self._take_alias(event)
        elif isinstance(event, yaml.DocumentStartEvent):
            self._size = 0
            self._anchored.clear()

    def _take_alias(self, event: yaml.AliasEvent) -> None:
        if any(one.anchor == event.anchor for one in self._open):
            raise UnsupportedYaml("an alias that refers to itself; write the value itself", event)
        if event.anchor not in self._anchored:
            raise UnsupportedYaml("an alias without its anchor; put a value that begins with * in quotes", event)
        self._add(event, self._anchored[event.anchor])

    def _add(self, event: yaml.ScalarEvent | yaml.CollectionStartEvent | yaml.AliasEvent, size: int) -> None:
        self._size += size
        if self._size > MAX_NODES:
            advice = f"more than {MAX_NODES} values with all aliases written out; split the document"
            raise UnsupportedYaml(advice, event)
        if not isinstance(event, yaml.AliasEvent) and event.tag is not None:
            advice = "a tag, such as !!int; leave it out, and put the value in quotes if it is text"
            raise UnsupportedYaml(advice, event)
        if self._open:
            parent = self._open[-1]
            parent.children += 1
            if parent.is_mapping and parent.children % 2 and not isinstance(event, yaml.ScalarEvent):
                raise UnsupportedYaml("a key that is not text; write text", event)


class Document(msgspec.Struct, frozen=True):
    """One document as text. ``line``: where it begins in its file, from 1."""

    file: str
    text: str
    line: int = 1
    is_json: bool = False

    def locate_mistakes(self, findings: Iterable[Finding]) -> list[Mistake]:
        """The first of ``findings``, each on the line of the nearest enclosing field that the document has."""
        found = list(islice(findings, _MAX_FINDINGS))
        lines = _lines(self) if found else {}
        return [Mistake(self.file, _nearest(lines, path, self.line), format_path(path), said) for path, said in found]


def split_documents(file: str, text: str) -> list[Document]:
    """The documents of one file: of YAML those between ``---``, of JSON the object or the items of an array.

    Raises ConfigInvalid if JSON is malformed; a mistake in YAML concerns its own document alone.
    """
    if file.endswith(".json"):
        return _split_json(file, text)
    starts = [0, *islice(_parsed_starts(text) if _needs_parser(text) else _marked_starts(text), MAX_DOCUMENTS)]
    if len(starts) > MAX_DOCUMENTS:
        raise ConfigInvalid([_too_many_documents(file)])
    found = []
    line = 1
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        part = text[start:end]
        if part and not part.isspace():
            found.append(Document(file, part, line))
        line += part.count("\n")
    return found


def parse_document(document: Document) -> tuple[Any, list[Finding]]:
    """The document as plain data, None if it is empty, and the keys that it repeats; raises ConfigInvalid."""
    return _read_json(document) if document.is_json else _read_yaml(document)


def _needs_parser(text: str) -> bool:
    # plain searches: an expression for all of them takes longer than reading the rest of a large file
    if any(mark in text for mark in _NEED_PARSER) or text.startswith(("%", "...")):
        return True
    return "\r" in text and _LONE_RETURN.search(text) is not None


def _marked_starts(text: str) -> Iterator[int]:
    start = text.find("\n---")
    while start >= 0:
        if text[start + 4 : start + 5] in {"", " ", "\t", "\r", "\n"}:
            yield start + 1
        start = text.find("\n---", start + 4)


def _parsed_starts(text: str) -> list[int]:
    try:
        begun = [one.start_mark for one in bounded_events(text) if isinstance(one, yaml.DocumentStartEvent)]
    except yaml.YAMLError:
        return []  # the document's reader reports the mistake
    return [mark.index for mark in begun[1:] if mark is not None]


def _split_json(file: str, text: str) -> list[Document]:
    if not text.lstrip().startswith("["):
        return [Document(file, text, is_json=True)] if text.strip() else []
    try:
        items = msgspec.json.decode(text, type=list[msgspec.Raw])
    except msgspec.DecodeError as error:
        raise ConfigInvalid([_not_json(Document(file, text), error)]) from None
    except RecursionError:
        raise ConfigInvalid([_too_deep(Document(file, text))]) from None
    if len(items) > MAX_DOCUMENTS:
        raise ConfigInvalid([_too_many_documents(file)])
    found = []
    line, end = 1, 0
    for item in items:
        part = bytes(item).decode()
        start = text.index(part, end)
        line += text.count("\n", end, start)
        found.append(Document(file, part, line, is_json=True))
        line += part.count("\n")
        end = start + len(part)
    return found


def _read_json(document: Document) -> tuple[Any, list[Finding]]:
    try:
        value = msgspec.json.decode(document.text)
    except msgspec.DecodeError as error:
        raise ConfigInvalid([_not_json(document, error)]) from None
    except RecursionError:
        raise ConfigInvalid([_too_deep(document)]) from None
    if not repeats_keys(document.text):
        return value, []
    node = _compose(document.text)
    repeated = [] if node is None else list(_repeated_keys(node))
    return value, repeated or [((), "has a key twice; remove one")]


def repeats_keys(text: str) -> bool:
    """Whether an object in this JSON has a key twice, of which decoders silently keep the last."""
    repeated = False

    def note(pairs: list[tuple[str, object]]) -> dict[str, object]:
        nonlocal repeated
        members = dict(pairs)
        repeated = repeated or len(members) < len(pairs)
        return members

    json.loads(text, object_pairs_hook=note)
    return repeated


def _not_json(document: Document, error: msgspec.DecodeError) -> Mistake:
    byte = _BYTE.search(str(error))
    before = document.text.encode()[: int(byte[1])] if byte else b""
    advice = f"not JSON: {error}; mend the syntax, nothing of this document was read"
    return Mistake(document.file, document.line + before.count(b"\n"), "", advice)


def _too_deep(document: Document) -> Mistake:
    return Mistake(document.file, document.line, "", "nested too deeply; write it flatter")


def _too_many_documents(file: str) -> Mistake:
    return Mistake(file, 0, "", f"has more than {MAX_DOCUMENTS} documents; split the file")


def _read_yaml(document: Document) -> tuple[Any, list[Finding]]:
    try:
        node = compose(document.text)
        if node is None:
            return None, []
        repeated = list(islice(_repeated_keys(node), _MAX_FINDINGS))
        value = _construct(node)
        return value, repeated + list(islice(_not_finite(value), _MAX_FINDINGS))
    except UnsupportedYaml as error:
        said = template_hint(document.text, error.line) or error.problem
        raise ConfigInvalid([Mistake(document.file, document.line + error.line, "", said)]) from None
    except yaml.MarkedYAMLError as error:
        found, said = explain_syntax_error(document.text, error)
        line = document.line + found
    except yaml.reader.ReaderError as error:
        found, said = explain_forbidden_character(document.text, error)
        line = document.line + found
    except yaml.YAMLError as error:
        line, said = document.line, str(error)
    except (ValueError, OverflowError):
        # its text would repeat the value, which may be a secret
        line, said = _first_unread(document), "it looks like a date or a number and is none; put it in quotes"
    advice = f"not YAML: {said}; nothing of this document was read"
    raise ConfigInvalid([Mistake(document.file, line, "", advice)])


def _construct(node: yaml.Node) -> Any:  # noqa: ANN401 - plain data of any kind
    loader = YamlLoader("")
    try:
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _first_unread(document: Document) -> int:
    """The line of the first single value that cannot be made."""
    for event in yaml.parse(document.text, YamlLoader):
        if isinstance(event, yaml.ScalarEvent) and event.implicit[0]:
            try:
                yaml.safe_load(event.value)
            except (ValueError, OverflowError):
                return document.line + (event.start_mark.line if event.start_mark else 0)
            except yaml.YAMLError:
                continue
    return document.line


def _not_finite(value: object, path: Path = ()) -> Iterator[Finding]:
    """Bounds such as "at least 0" hold back neither .nan nor .inf, and arithmetic breaks on both."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _not_finite(item, (*path, str(key)))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _not_finite(item, (*path, index))
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, "is not a finite number; write a number, or put it in quotes if it is text"


def _repeated_keys(node: yaml.Node, path: Path = ()) -> Iterator[Finding]:
    """YAML's own readers silently keep the last of two equal keys; a forgotten ``---`` would lose a document."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            if not isinstance(item, yaml.ScalarNode):
                yield from _repeated_keys(item, (*path, index))
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in node.value:
        name = str(key.value)
        if name in seen and not path and {"apiVersion", "kind"} <= seen and name in {"apiVersion", "kind"}:
            # the rest belongs to the second document
            yield (name,), "a second document begins here; put a line with '---' before it"
            return
        if name in seen:
            yield (*path, name), "is written twice; remove one, or put '---' between two documents"
        seen.add(name)
        if not isinstance(value, yaml.ScalarNode):
            yield from _repeated_keys(value, (*path, name))


def _compose(text: str) -> yaml.Node | None:
    """JSON is YAML but for rare escapes; None where libyaml does not take it, or it is out of bounds."""
    try:
        return compose(text)
    except yaml.YAMLError:
        return None


def _lines(document: Document) -> dict[Path, int]:
    """The line in the file of every path in the document."""
    node = _compose(document.text)
    return {} if node is None else {path: document.line + line for path, line in _lines_below(node, ())}


def _lines_below(node: yaml.Node, path: Path) -> Iterator[tuple[Path, int]]:
    yield path, node.start_mark.line
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _lines_below(value, (*path, str(key.value)))
            yield (*path, str(key.value)), key.start_mark.line
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _lines_below(item, (*path, index))


def _nearest(lines: dict[Path, int], path: Path, otherwise: int) -> int:
    return next((lines[path[:end]] for end in range(len(path), -1, -1) if path[:end] in lines), otherwise)


class UnreadDocuments(msgspec.Struct, frozen=True):
    """``files``: those that contain such documents. ``names``: every value of a key ``name`` in their texts.
    ``is_any_nameless``: in one of the documents no name was found.
    """

    files: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    is_any_nameless: bool = False

    @classmethod
    def of(cls, documents: Iterable[Document]) -> Self:
        """Of ``documents``."""
        files, names, is_any_nameless = set(), set(), False
        for document in documents:
            found = _NAME.findall(document.text)
            files.add(document.file)
            names.update(found)
            is_any_nameless = is_any_nameless or not found
        return cls(frozenset(files), frozenset(names), is_any_nameless)

    def may_hold(self, name: str) -> bool:
        """Whether one of the documents may be the object ``name``."""
        return self.is_any_nameless or name in self.names


class DirectoryObjects(msgspec.Struct, frozen=True, kw_only=True):
    """The objects of a directory, for checks of what refers to them.

    ``objects``: of each type with their documents, sorted by key. ``keys``: ``namespace/name`` of all objects, by kind.
    ``listeners``: names; none if there is only ``listen``, to which every route is attached. ``pickers``: files of
    EndpointPickerConfigs. ``unread``: the documents that are not among them because they could not be read.
    """

    objects: Mapping[type, Sequence[tuple[Document, Any]]]
    keys: Mapping[str, Collection[str]]
    listeners: Sequence[str]
    pickers: Collection[str]
    unread: UnreadDocuments

    def of_type(self, cls: type[T]) -> Sequence[tuple[Document, T]]:
        """The objects of one type, with their documents."""
        return self.objects[cls]

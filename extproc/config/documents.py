"""YAML text to documents that know on which line each of their fields stands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from extproc.config.errors import Mistake, Path, to_text

if TYPE_CHECKING:
    from collections.abc import Iterator

# libyaml is several times faster; the pure loader reads the same.
_Loader: type[yaml.SafeLoader | yaml.CSafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Document(msgspec.Struct, frozen=True):
    """One YAML document: plain data, and the line of every path in it."""

    file: str
    value: Any
    lines: dict[Path, int]

    def mistake(self, path: Path, message: str) -> Mistake:
        """A mistake at ``path``, on the line of the nearest enclosing field that the document has."""
        known = next((path[:end] for end in range(len(path), -1, -1) if path[:end] in self.lines), ())
        return Mistake(self.file, self.lines.get(known, 0), to_text(path), message)


def read_documents(file: str, text: str) -> Iterator[Document | Mistake]:
    """The non-empty documents of one file; a syntax error ends it with a mistake."""
    loader = _Loader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            if node is None:
                break
            yield from _repeated_keys(file, node)
            value = loader.construct_document(node)
            if value is not None:
                yield Document(file, value, dict(_lines(node)))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = f"not YAML: {error.problem or error.context}; mend the syntax, nothing of this file was read"
        yield Mistake(file, mark.line + 1 if mark else 0, "", message)
    except (yaml.YAMLError, ValueError) as error:
        yield Mistake(file, 0, "", f"not YAML: {error}; mend the syntax, nothing of this file was read")
    finally:
        loader.dispose()


def _repeated_keys(file: str, node: yaml.Node, path: Path = ()) -> Iterator[Mistake]:
    """YAML's own readers keep the last of two equal keys without a word; a forgotten ``---`` would lose a document."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _repeated_keys(file, item, (*path, index))
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, value in node.value:
        name = str(key.value)
        if name in seen:
            advice = "is written twice; remove one, or put '---' between two documents"
            yield Mistake(file, key.start_mark.line + 1, to_text((*path, name)), advice)
        seen.add(name)
        yield from _repeated_keys(file, value, (*path, name))


def _lines(node: yaml.Node, path: Path = ()) -> Iterator[tuple[Path, int]]:
    yield path, node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _lines(value, (*path, str(key.value)))
            yield (*path, str(key.value)), key.start_mark.line + 1
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _lines(item, (*path, index))

# SPDX-License-Identifier: Apache-2.0
"""YAML to nodes within bounds, so that no text can exhaust memory, time or the stack.

libyaml's composer recurses in C, and deep nesting ends the process; aliases of aliases stand for more than any memory
holds; tags call constructors that raise whatever they like. The stream of events needs no recursion: all of it is
checked before anything is composed, which costs an eighth of reading the document.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import msgspec
import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

# Of one document. Ours are nested 10 deep; ten thousand endpoints with six labels each have 170,000 nodes.
MAX_DEPTH: Final = 64
MAX_NODES: Final = 250_000
# Python refuses to print, and takes long to read, numbers of many thousands of digits.
_MAX_NUMBER_CHARACTERS: Final = 1000
_NUMBER_LIKE: Final = re.compile(r"[-+.0-9]")

# libyaml is several times faster; the pure loader reads the same.
Loader: type[yaml.SafeLoader | yaml.CSafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Refused(yaml.YAMLError):
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
    for event in yaml.parse(text, Loader):
        bounds.take(event)
        yield event


def compose(text: str) -> yaml.Node | None:
    """The one document in ``text``, None if there is none; raises yaml.YAMLError, or Refused."""
    bounds = _Bounds()
    for event in yaml.parse(text, Loader):
        bounds.take(event)
    loader = Loader(text)
    try:
        node: yaml.Node | None = loader.get_single_node()
    finally:
        loader.dispose()
    return node


class _Bounds:
    """Follows the events of a document and counts; an alias counts as all that it stands for."""

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
                raise Refused("a number that is too long; put it in quotes if it is text", event)
        elif isinstance(event, yaml.CollectionStartEvent):
            self._add(event, 1)
            self._open.append(_Open(isinstance(event, yaml.MappingStartEvent), event.anchor, self._size - 1))
            if len(self._open) > MAX_DEPTH:
                raise Refused(f"nested more than {MAX_DEPTH} deep; write it flatter", event)
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
            raise Refused("an alias that refers to itself; write the value itself", event)
        if event.anchor not in self._anchored:
            raise Refused("an alias without its anchor; put a value that begins with * in quotes", event)
        self._add(event, self._anchored[event.anchor])

    def _add(self, event: yaml.ScalarEvent | yaml.CollectionStartEvent | yaml.AliasEvent, size: int) -> None:
        self._size += size
        if self._size > MAX_NODES:
            advice = f"more than {MAX_NODES} values with all aliases written out; split the document"
            raise Refused(advice, event)
        if not isinstance(event, yaml.AliasEvent) and event.tag is not None:
            advice = "a tag, such as !!int; leave it out, and put the value in quotes if it is text"
            raise Refused(advice, event)
        if self._open:
            parent = self._open[-1]
            parent.children += 1
            if parent.is_mapping and parent.children % 2 and not isinstance(event, yaml.ScalarEvent):
                raise Refused("a key that is not text; write text", event)

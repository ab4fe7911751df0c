# SPDX-License-Identifier: Apache-2.0
"""Documents that could not be read: the objects in them are not reported as missing.

A ModelServer with a tab in it is reported once, and not again at every route that names it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Self

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.api.documents import Document

# In YAML and JSON, in flow style too.
_NAME: Final = re.compile(r"""\bname["']?[ \t]*:[ \t]*["']?([^\s"',}]+)""")


class Unread(msgspec.Struct, frozen=True):
    """``files``: where such documents are. ``names``: all that their texts call by name. ``is_any_nameless``: one of
    the documents has no name in it that could be seen.
    """

    files: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    is_any_nameless: bool = False

    @classmethod
    def of(cls, documents: Iterable[Document]) -> Self:
        """What is known of ``documents``."""
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

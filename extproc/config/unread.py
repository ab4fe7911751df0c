# SPDX-License-Identifier: Apache-2.0
"""Documents that could not be read: what they may hold is not reported as missing

One mistake gives one message. A ModelServer with a tab in it is told of once, and not again at every route that names it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

# In YAML and JSON, in flow style too.
_NAME: Final = re.compile(r"""\bname["']?[ \t]*:[ \t]*["']?([^\s"',}]+)""")


class Unread(msgspec.Struct, frozen=True):
    """``texts``: the documents. ``files``: the names of their files."""

    texts: Sequence[str] = ()
    files: frozenset[str] = frozenset()

    def may_hold(self, name: str) -> bool:
        """Whether one of them may be the object ``name``: it has the name in it, or has no name that can be seen."""
        return any(not (found := set(_NAME.findall(text))) or name in found for text in self.texts)

# SPDX-License-Identifier: Apache-2.0
"""Words that names do without, imports and constants out of their place are found."""

from __future__ import annotations

import ast

from tools.style import find_misplaced, find_words


def test_a_word_is_found_in_modules_classes_functions_and_metrics_and_nowhere_else() -> None:
    text = "class Looker:\n    def tell_all(self): ...\n\nasync def outlook(): ...\n\ntold = 'he said'\n"
    text += "x = 'attache_looks'\n"
    assert [line.split(": ", 1)[0] for line in find_words("telling", "a.py", ast.parse(text))] == [
        "a.py:1",
        "a.py:1",
        "a.py:2",
        "a.py:7",
    ]


def test_a_name_is_imported_once_and_a_constant_stands_at_the_head_unless_it_is_made_of_what_is_above() -> None:
    text = """
from typing import TYPE_CHECKING
from os import path
HEAD = 1
POOL = set()
if TYPE_CHECKING:
    from os import path
class Thing: ...
LOW = 2
MADE = Thing()
MADE_OF_THAT = (MADE, LOW)
POOL.add(1)
OF_POOL = POOL.classes()
FREE: int = HEAD
"""
    assert list(find_misplaced("a.py", ast.parse(text))) == [
        "a.py:7: os.path as None is imported twice",
        "a.py:9: LOW needs nothing from above; it stands at the head",
        "a.py:14: FREE needs nothing from above; it stands at the head",
    ]

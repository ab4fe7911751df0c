# SPDX-License-Identifier: Apache-2.0
"""Words that names do without are found in names of every kind."""

from __future__ import annotations

import ast

from tools.words import find_words


def test_a_word_is_found_in_modules_classes_and_functions_and_nowhere_else() -> None:
    text = "class Looker:\n    def tell_all(self): ...\n\nasync def outlook(): ...\n\ntold = 'he said'\n"
    assert [line.split(": ", 1)[0] for line in find_words("telling", "a.py", ast.parse(text))] == [
        "a.py:1",
        "a.py:1",
        "a.py:2",
    ]

# SPDX-License-Identifier: Apache-2.0
"""Shares of lines and branches by package, against numbers worked out by hand."""

from __future__ import annotations

from tools.coverage_by_package import below_minimum, covered_percent


def counts(lines: int, of_lines: int, branches: int, of_branches: int) -> dict[str, int]:
    return {
        "covered_lines": lines,
        "num_statements": of_lines,
        "covered_branches": branches,
        "num_branches": of_branches,
    }


def test_a_package_has_the_share_of_all_below_it() -> None:
    files = {
        "a/one.py": counts(8, 8, 1, 2),
        "a/b/two.py": counts(3, 6, 0, 4),
        "a/b/__init__.py": counts(0, 0, 0, 0),
        "c/__init__.py": counts(0, 0, 0, 0),
    }
    assert covered_percent(files) == {"a": 60.0, "a.b": 30.0}


def test_too_little_and_nothing_at_all_are_said() -> None:
    assert below_minimum({"a": 95.0, "b": 94.9}, {"a": 95, "b": 95, "gone": 95}) == [
        "b: 94.9%, 95% are asked for",
        "gone: 0.0%, 95% are asked for",
    ]

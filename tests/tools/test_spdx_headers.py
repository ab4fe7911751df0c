# SPDX-License-Identifier: Apache-2.0
"""Every Python file names its licence in its first lines."""

from __future__ import annotations

from tools.spdx_headers import LINE, files, with_header


def test_the_line_goes_on_top_once() -> None:
    assert with_header('"""A module."""\n') == LINE + '"""A module."""\n'
    assert with_header(LINE + "x = 1\n") == LINE + "x = 1\n"


def test_the_line_goes_below_the_interpreter() -> None:
    assert with_header("#!/usr/bin/env python3\nx = 1\n") == "#!/usr/bin/env python3\n" + LINE + "x = 1\n"


def test_every_file_has_the_line() -> None:
    assert [path for path in files() if LINE not in path.read_text().splitlines(keepends=True)[:2]] == []

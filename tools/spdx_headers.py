# SPDX-License-Identifier: Apache-2.0
"""Put the licence's SPDX line on top of every Python file that lacks it.

``python -m tools.spdx_headers`` writes, with ``--check`` it only lists the files and fails if there are any.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
FOLDERS: Final = ("attache", "bench", "controller", "extproc", "tests", "tools")
LINE: Final = "# SPDX-License-Identifier: Apache-2.0\n"


def files() -> list[Path]:
    """All Python files of ours; those without any text need no licence."""
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in found if path.stat().st_size)


def with_header(text: str) -> str:
    """The text with the line, below a ``#!`` line if there is one."""
    lines = text.splitlines(keepends=True)
    if LINE in lines[:2]:
        return text
    place = 1 if lines and lines[0].startswith("#!") else 0
    return "".join([*lines[:place], LINE, *lines[place:]])


def main(words: list[str]) -> int:
    """Exit status: 0, or 1 if ``--check`` finds a file without the line."""
    parser = argparse.ArgumentParser(prog="tools.spdx_headers", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing")
    is_check = parser.parse_args(words).check
    lacking = [path for path in files() if with_header(path.read_text()) != path.read_text()]
    for path in lacking:
        if is_check:
            sys.stdout.write(f"{path.relative_to(ROOT)}: lacks {LINE}")
        else:
            path.write_text(with_header(path.read_text()))
    return 1 if is_check and lacking else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

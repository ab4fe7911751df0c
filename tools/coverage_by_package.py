# SPDX-License-Identifier: Apache-2.0
"""Lines and branches that the tests take, by package; fails where pyproject.toml asks for more.

Reads the data that ``make coverage`` has combined. A package's share counts each line and each branch once.
"""

from __future__ import annotations

import json
import sys
import tempfile
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from coverage import Coverage

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ROOT: Final = Path(__file__).resolve().parent.parent


def covered_percent(files: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    """Percent by package, from what coverage.py says of each file; a package's subpackages count to it and for
    themselves.
    """
    covered: defaultdict[str, int] = defaultdict(int)
    whole: defaultdict[str, int] = defaultdict(int)
    for file, counts in files.items():
        for package in _packages(Path(file)):
            covered[package] += counts["covered_lines"] + counts["covered_branches"]
            whole[package] += counts["num_statements"] + counts["num_branches"]
    return {package: 100 * covered[package] / whole[package] for package in sorted(whole) if whole[package]}


def below_minimum(found: Mapping[str, float], asked: Mapping[str, float]) -> list[str]:
    """A line for each package with less than is asked of it, or that nothing is known of."""
    return [
        f"{package}: {found.get(package, 0.0):.1f}%, {least:g}% are asked for"
        for package, least in asked.items()
        if found.get(package, 0.0) < least
    ]


def _packages(file: Path) -> Iterable[str]:
    """``a/b/c.py``: ``a`` and ``a.b``."""
    parts = file.parent.parts
    return (".".join(parts[: length + 1]) for length in range(len(parts)))


def main() -> int:
    """Print all packages; exit status 1 if one has too little."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "coverage.json"
        measured = Coverage(config_file=str(ROOT / "pyproject.toml"))
        measured.load()
        measured.json_report(outfile=str(out))
        files = {name: one["summary"] for name, one in json.loads(out.read_text())["files"].items()}
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["attache"]["coverage"]
    found = covered_percent(files)
    for package, share in found.items():
        print(f"{package:<32} {share:5.1f}%{'' if package not in asked else f'   at least {asked[package]:g}%'}")
    failures = below_minimum(found, asked)
    for line in failures:
        print(f"TOO LITTLE IS TESTED: {line}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

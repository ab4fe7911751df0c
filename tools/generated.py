# SPDX-License-Identifier: Apache-2.0
"""Write the files that are made from the code (``make generate``), or compare them (``--check``, as ``make check``)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from controller.api.crds.files import files as crd_files
from tools import architecture_tree, dashboard, envoy_messages
from tools.reference import pages

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT: Final = Path(__file__).resolve().parent.parent
_CRDS: Final = ROOT / "manifests" / "crds"
_PAGES: Final = ROOT / "docs" / "reference"
# Folders that hold nothing else.
FOLDERS: Final = (_CRDS, _PAGES)


def generated_files() -> dict[Path, bytes]:
    """Every file, as the code makes it now."""
    texts = {
        **{_CRDS / name: text for name, text in crd_files().items()},
        **{_PAGES / name: text for name, text in pages.pages().items()},
        architecture_tree.PAGE: architecture_tree.with_tree(architecture_tree.PAGE.read_text()),
        dashboard.FILE: dashboard.dashboard(),
    }
    return {**envoy_messages.derived_files(), **{path: text.encode() for path, text in texts.items()}}


def stale(wanted: Mapping[Path, bytes]) -> Iterator[Path]:
    """Files that are missing or different, and files in ``FOLDERS`` that nothing makes."""
    yield from (path for path, content in wanted.items() if not path.is_file() or path.read_bytes() != content)
    yield from (path for folder in FOLDERS for path in folder.glob("*") if path not in wanted)


def main(words: list[str]) -> int:
    """Exit status 1 if ``--check`` finds a difference."""
    parser = argparse.ArgumentParser(prog="tools.generated", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    is_check = parser.parse_args(words).check
    wanted = generated_files()
    found = sorted(stale(wanted))
    for path in found:
        if is_check:
            print(f"{path.relative_to(ROOT)} is not what the code makes of it: run `make generate`")
        elif path in wanted:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(wanted[path])
        else:
            path.unlink()
    return int(is_check and bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

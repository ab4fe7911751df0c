# SPDX-License-Identifier: Apache-2.0
"""Write the files that are made from the code (``make generate``), or compare them (``--check``, as ``make check``)."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from controller.kube.crd_files import crd_yaml_files as crd_files
from controller.kube.custom_resources import GATEWAY_KINDS, KINDS
from tools import architecture_tree, dashboard, envoy_messages, helm_chart, terminal_pictures
from tools.reference import kinds, pages

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOT: Final = Path(__file__).resolve().parent.parent
_CRDS: Final = ROOT / "manifests" / "crds"
_PAGES: Final = ROOT / "docs" / "reference"
# Of writing: a file may be made of one that is made of the code.
_MOST_PASSES: Final = 3
# Folders that hold nothing else.
FOLDERS: Final = (_CRDS, _PAGES)
# The lists of kinds in files, by the comment above each.
_READ: Final = sorted(kind.resource.plural for kind in GATEWAY_KINDS)
_REVIEWED: Final = sorted(kind.resource.plural for kind in KINDS if kind.is_reviewed)
_LISTS: Final[Mapping[Path, Mapping[str, Sequence[str]]]] = {
    ROOT / "manifests" / "gateway" / "rbac.yaml": {
        "kinds of the directory": _READ,
        "their statuses": [f"{plural}/status" for plural in _READ],
    },
    ROOT / "manifests" / "manager" / "webhooks.yaml": {"kinds that users write": _REVIEWED},
    ROOT / "mkdocs.yml": {"kinds": [f"{cls.__name__}: reference/{name}.md" for name, cls in kinds.KINDS.items()]},
}


def generated_files() -> dict[Path, bytes]:
    """Every file, as the code makes it now."""
    texts = {
        **{_CRDS / name: text for name, text in crd_files().items()},
        **{_PAGES / name: text for name, text in pages.pages().items()},
        architecture_tree.PAGE: architecture_tree.with_parts(architecture_tree.PAGE.read_text()),
        dashboard.FILE: dashboard.dashboard(),
        **{path: with_lists(path.read_text(), lists) for path, lists in _LISTS.items()},
        **helm_chart.files(),
        **terminal_pictures.pages(),
    }
    return {**envoy_messages.derived_files(), **{path: text.encode() for path, text in texts.items()}}


def with_lists(text: str, lists: Mapping[str, Sequence[str]]) -> str:
    """A file in YAML with these lists, each below its comment ``# NAME, by make generate``; raises ValueError if one is
    not there.
    """
    for name, items in lists.items():
        mark = f"# {name}, by make generate\n"
        before, after = text.split(mark)
        indent = before.rpartition("\n")[2]
        rest = re.sub(rf"\A({indent}- .*\n)*", "", after)
        text = before + mark + "".join(f"{indent}- {one}\n" for one in items) + rest
    return text


def stale_files(wanted: Mapping[Path, bytes]) -> Iterator[Path]:
    """Files that are missing or different, and files in ``FOLDERS`` that nothing makes."""
    yield from (path for path, content in wanted.items() if not path.is_file() or path.read_bytes() != content)
    yield from (path for folder in FOLDERS for path in folder.glob("*") if path not in wanted)


def main(words: list[str]) -> int:
    """Exit status 1 if ``--check`` finds a difference, or if one remains."""
    parser = argparse.ArgumentParser(prog="tools.generated", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    if parser.parse_args(words).check:
        return _complain("is not what the code makes of it: run `make generate`")
    # the chart is made of manifests that are made themselves
    for _ in range(_MOST_PASSES):
        wanted = generated_files()
        found = list(stale_files(wanted))
        for path in found:
            if path in wanted:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(wanted[path])
            else:
                path.unlink()
        if not found:
            return 0
    return _complain("is made of itself, and never the same: mend what makes it")


def _complain(what: str) -> int:
    found = sorted(stale_files(generated_files()))
    for path in found:
        print(f"{path.relative_to(ROOT)} {what}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

# SPDX-License-Identifier: Apache-2.0
"""Write ``manifests/crds`` from the structs: ``python -m controller.api.crds``; ``--check`` only compares."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from controller.api.crds.kinds import GROUP, KINDS, definition_of

if TYPE_CHECKING:
    from collections.abc import Mapping


def files() -> Mapping[str, str]:
    """Every definition as YAML, by the name of its file, and the list of them for kustomize."""
    found = {f"{GROUP}_{kind.plural}.yaml": _to_yaml(definition_of(kind)) for kind in KINDS}
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": sorted(found),
    }
    return {**found, "kustomization.yaml": _to_yaml(kustomization)}


def main(words: list[str]) -> int:
    """Exit status 1 if ``--check`` finds a difference."""
    parser = argparse.ArgumentParser(prog="python -m controller.api.crds", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("manifests/crds"), help="default: %(default)s")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    options = parser.parse_args(words)
    wanted = files()
    if options.check:
        found = {path.name: path.read_text() for path in options.folder.glob("*.yaml")}
        stale = sorted(name for name in {**wanted, **found} if wanted.get(name) != found.get(name))
        if stale:
            sys.stderr.write(f"{options.folder}: {', '.join(stale)} differ from the types; run: make manifests\n")
        return 1 if stale else 0
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, text in wanted.items():
        (options.folder / name).write_text(text)
    return 0


class _Dumper(yaml.SafeDumper):
    """Without anchors, which other parsers of manifests may not support."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ANN401, ARG002 - as the base class has it
        return True


def _to_yaml(definition: Mapping[str, Any]) -> str:
    text: str = yaml.dump(definition, Dumper=_Dumper, sort_keys=False, width=118, allow_unicode=True)
    return f"# written by make manifests\n{text}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

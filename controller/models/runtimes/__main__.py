# SPDX-License-Identifier: Apache-2.0
"""Write ``manifests/runtimes`` from the built-in presets: ``python -m controller.models.runtimes``"""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path

import yaml


def main(folder: Path) -> int:
    """The files as they are, and the list of them for kustomize."""
    folder.mkdir(parents=True, exist_ok=True)
    source = resources.files("controller.models.runtimes") / "builtin"
    names = sorted(one.name for one in source.iterdir() if one.name.endswith(".yaml"))
    for name in names:
        (folder / name).write_text((source / name).read_text())
    kustomization = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": names}
    message = (
        "# The presets that are built in, to change or to disable them for a cluster: kubectl apply -k"
        " manifests/runtimes\n"
    )
    (folder / "kustomization.yaml").write_text(message + yaml.safe_dump(kustomization, sort_keys=False))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path("manifests/runtimes")))

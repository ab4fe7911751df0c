# SPDX-License-Identifier: Apache-2.0
"""Build Helm and Kustomize from their published Go modules, for the tests of the chart: ``make helm``."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tools.go_modules import build, go_mod_text, toolchain_missing

if TYPE_CHECKING:
    from collections.abc import Mapping

_VERSION: Final = "3.22.0"
_HELM: Final = "helm.sh/helm/v3"
_KUSTOMIZE: Final = "sigs.k8s.io/kustomize/kustomize/v5"
_MODULES: Final = {_HELM: _VERSION, _KUSTOMIZE: "5.8.1"}


def built_in(environment: Mapping[str, str] = os.environ) -> Path:
    """The directory of both programs: in the user's cache, so that they are built once for all clones."""
    cache = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "attache" / f"helm-{_VERSION}"


def main(out: Path | None = None) -> int:
    """Exit status: 0 if they are there, 2 if there is no toolchain for them."""
    out = out or built_in()
    if out.is_dir():
        return 0
    if missing := toolchain_missing():
        print(f"helm: {missing}", file=sys.stderr)
        return 2
    began_s = time.perf_counter()
    print(f"helm: building Helm {_VERSION} and Kustomize, some minutes once", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".helm-", dir=out.parent) as directory:
        work, made = Path(directory), Path(directory) / "made"
        made.mkdir()
        (work / "go.mod").write_text(go_mod_text("helm", _MODULES))
        build([f"{_HELM}/cmd/helm", _KUSTOMIZE], work, made, "-s -w")
        # it appears only once it is complete
        made.rename(out)
    print(f"helm: {out} after {time.perf_counter() - began_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

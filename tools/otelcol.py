# SPDX-License-Identifier: Apache-2.0
"""Build an OpenTelemetry Collector from its published Go modules: ``make otelcol``.

The project publishes binaries of distributions with hundreds of parts. Tests need two.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tools.go_modules import build, go_mod_text, toolchain_missing

_VERSION: Final = "0.165.0"
# Of the modules that are declared stable.
_STABLE: Final = "1.71.0"
_COLLECTOR: Final = "go.opentelemetry.io/collector"
_MODULES: Final = {
    **{
        f"{_COLLECTOR}/{name}": _STABLE
        for name in ("component", "confmap", "confmap/provider/fileprovider", "exporter", "receiver")
    },
    **{
        f"{_COLLECTOR}/{name}": _VERSION
        for name in ("exporter/otlphttpexporter", "otelcol", "receiver/otlpreceiver", "service")
    },
}
_ROOT: Final = Path(__file__).resolve().parents[1]
_MAIN: Final = _ROOT / "tools/otelcol.go"
BINARY: Final = _ROOT / f".tools/otelcol-{_VERSION}/otelcol"


def main(out: Path = BINARY) -> int:
    """Exit status: 0 if it is there, 2 if there is no toolchain for it."""
    if out.is_file():
        return 0
    if missing := toolchain_missing():
        print(f"otelcol: {missing}", file=sys.stderr)
        return 2
    began_s = time.perf_counter()
    print(f"otelcol: building the OpenTelemetry Collector {_VERSION}, a minute or two once")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".otelcol-", dir=out.parent) as directory:
        work = Path(directory)
        shutil.copyfile(_MAIN, work / "main.go")
        (work / "go.mod").write_text(go_mod_text("otelcol", _MODULES))
        build(["."], work, work / "made", "-s -w")
        # it appears only once it is complete
        (work / "made").rename(out)
    print(f"otelcol: {out} after {time.perf_counter() - began_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Build the conformance suites of the Gateway API and the Inference Extension: ``make conformance``.

Their published modules hold them as Go tests; nothing in them is changed. Beside them the suites' own server is built,
which answers with what it was asked.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.cluster.kubernetes_binaries import PinnedVersions, pinned_versions
from bench.conformance.suites import ECHO, GATEWAY_API, Suite, choose_suites, list_suites, suites_directory
from tools.go_modules import build, build_tests, go_mod_text, toolchain_missing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_GATEWAY_API: Final = "sigs.k8s.io/gateway-api"
_INFERENCE: Final = "sigs.k8s.io/gateway-api-inference-extension"


def build_all(wanted: PinnedVersions, wished: Sequence[Suite], out: Path) -> None:
    """Build these suites and their server into ``out``, as far as they are not there."""
    out.mkdir(parents=True, exist_ok=True)
    gateway_api = {_GATEWAY_API: wanted.gateway_api, f"{_GATEWAY_API}/conformance": wanted.gateway_api}
    if not (out / ECHO).is_file():
        _made(out / ECHO, gateway_api, f"{_GATEWAY_API}/conformance/echo-basic", is_test=False)
    for suite in wished:
        modules = gateway_api if suite.kind == GATEWAY_API else {_INFERENCE: suite.version}
        package = f"{_GATEWAY_API if suite.kind == GATEWAY_API else _INFERENCE}/conformance"
        if not (out / suite.program).is_file():
            _made(out / suite.program, modules, package, is_test=True)


def _made(target: Path, modules: Mapping[str, str], package: str, *, is_test: bool) -> None:
    """Build one program, which appears only once it is complete."""
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as directory:
        work = Path(directory)
        (work / "go.mod").write_text(go_mod_text("conformance", modules))
        made = work / target.name
        if is_test:
            build_tests(package, work, made)
        else:
            build([package], work, made, "-s -w")
        made.rename(target)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 if all is there, 2 if there is no toolchain for it."""
    wanted = pinned_versions()
    known = list_suites(wanted)
    made = argparse.ArgumentParser(prog="conformance_suites", description="Build conformance suites from Go modules.")
    made.add_argument(
        "names", nargs="*", metavar="SUITE", help=f"of {', '.join(one.name for one in known)} (default: all)"
    )
    try:
        wished = choose_suites(made.parse_args(arguments).names, known)
    except KeyError as unknown:
        made.error(f"there is no suite {unknown}")
    out = suites_directory(wanted)
    if all((out / name).is_file() for name in (ECHO, *(one.program for one in wished))):
        return 0
    if missing := toolchain_missing():
        print(f"conformance: {missing}", file=sys.stderr)
        return 2
    began_s = time.perf_counter()
    print(f"conformance: building {', '.join(one.name for one in wished)}, some minutes once")
    build_all(wanted, wished, out)
    print(f"conformance: {out} after {time.perf_counter() - began_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

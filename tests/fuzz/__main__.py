# SPDX-License-Identifier: Apache-2.0
"""The command line: python -m tests.fuzz COMMAND --minutes N --seed N"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Final, NamedTuple

from tests.fuzz import bodies, feeds, files, objects, readers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class _Fuzzer(NamedTuple):
    """``share``: of the minutes of ``all``."""

    main: Callable[[list[str]], int]
    share: float
    help: str


_FUZZERS: Final[Mapping[str, _Fuzzer]] = {
    "readers": _Fuzzer(readers.main, 0.2, "what engines, processes, Redis and files hold, through whoever reads it"),
    "objects": _Fuzzer(objects.main, 0.2, "a cluster's objects, through compilers, reconcilers and webhooks"),
    "files": _Fuzzer(files.main, 0.1, "configuration files, through the loader"),
    "bodies": _Fuzzer(bodies.main, 0.2, "request bodies, through Envoy, extproc and engines"),
    "feeds": _Fuzzer(feeds.main, 0.3, "engines' pages, KV events and Redis, to a whole extproc"),
}


def main(words: list[str] | None = None) -> int:
    """Exit status: 0, 1 if something is wrong, 2 for a mistake in the words."""
    given = sys.argv[1:] if words is None else words
    if given[:1] and given[0] in _FUZZERS:
        return _FUZZERS[given[0]].main(given[1:])
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    chosen = parser.add_subparsers(dest="command", required=True)
    for name, fuzzer in _FUZZERS.items():
        chosen.add_parser(name, help=fuzzer.help)
    everything = chosen.add_parser("all", help="one after the other")
    everything.add_argument("--minutes", type=float, default=10.0, help="of all together (%(default)s)")
    everything.add_argument("--seed", type=int, default=0, help="of the first input of each (%(default)s)")
    options = parser.parse_args(given)
    return _run_all(options.minutes, options.seed)


def _run_all(minutes: float, seed: int) -> int:
    results = []
    for name, fuzzer in _FUZZERS.items():
        print(f"== {name}: {fuzzer.help}", flush=True)
        results.append(fuzzer.main([f"--minutes={minutes * fuzzer.share}", f"--seed={seed}"]))
    return max(results)


if __name__ == "__main__":
    sys.exit(main())

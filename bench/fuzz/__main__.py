# SPDX-License-Identifier: Apache-2.0
"""The command line: python -m bench.fuzz bodies|files --minutes N"""

from __future__ import annotations

import argparse
import sys

from bench.fuzz import bodies, files


def main(words: list[str] | None = None) -> int:
    """Exit status: 0, 1 if something is wrong, 2 for a mistake in the words."""
    given = sys.argv[1:] if words is None else words
    commands = {"bodies": bodies.main, "files": files.main}
    if given[:1] and given[0] in commands:
        return commands[given[0]](given[1:])
    parser = argparse.ArgumentParser(prog="python -m bench.fuzz")
    chosen = parser.add_subparsers(dest="command", required=True)
    chosen.add_parser("bodies", help="request bodies, through Envoy, extproc and engines")
    chosen.add_parser("files", help="configuration files, through the loader")
    parser.parse_args(given)
    return 0


if __name__ == "__main__":
    sys.exit(main())

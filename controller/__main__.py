# SPDX-License-Identifier: Apache-2.0
"""The command line: ``python -m controller bundle`` writes, and keeps up to date, an Envoy bundle."""

from __future__ import annotations

import argparse
import sys

from controller.commands import bundle as bundle_command


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 2 for a mistake in configuration or arguments."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["bundle"]:
        return bundle_command.main(words[1:])
    parser = argparse.ArgumentParser(prog="controller")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("bundle", help="write the Envoy configuration of a directory")
    parser.parse_args(words)
    return 0


if __name__ == "__main__":
    sys.exit(main())

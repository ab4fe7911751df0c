# SPDX-License-Identifier: Apache-2.0
"""The command line: ``python -m extproc --config DIR`` serves; also check, explain, slo and top."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Final

_COMMANDS: Final = ("check", "explain", "reset", "slo", "top")


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0; 1 if explain finds a refusal; 2 for a mistake in configuration or arguments."""
    words = sys.argv[1:] if arguments is None else arguments
    # a command loads only what it needs: gRPC takes a third of a second
    if words[:1] and words[0] in _COMMANDS:
        status: int = import_module(f"extproc.cli.{words[0]}").main(words[1:])
    else:
        status = import_module("extproc.cli.serve").main(words)
    return status


if __name__ == "__main__":
    sys.exit(main())

"""The command line: ``python -m extproc --config DIR`` serves, ``check`` and ``explain`` say what it would do, ``top`` what it does."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from extproc.cli import explain, serve, top
from extproc.config.directory import load_directory
from extproc.config.errors import ConfigInvalid
from extproc.scheduling.pickers import picker_notes


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 2 for a mistake in configuration or arguments."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        match words[:1]:
            case ["check"]:
                return _check(words[1:])
            case ["explain"]:
                return explain.run(words[1:])
            case ["top"]:
                return top.run(words[1:])
        return serve.run(words)
    except ConfigInvalid as error:
        print(error, file=sys.stderr)
        print(f"{len(error.mistakes)} to mend", file=sys.stderr)
        return 2


def _check(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="extproc check", description="Say every mistake in a configuration directory."
    )
    parser.add_argument("directory", type=Path)
    snapshot = load_directory(parser.parse_args(words).directory)
    for note in picker_notes(snapshot):
        print(f"note: {note}")
    print(f"good: {len(snapshot.routes)} routes, {len(snapshot.servers)} servers")
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""``controller bundle``: write a configuration directory as an Envoy bundle, and keep it up to date."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from pathlib import Path
from typing import Final

from extproc.config.directory import ConfigDirectory
from extproc.config.errors import ConfigInvalid

DESCRIPTION: Final = (
    "Write a configuration directory as Envoy's configuration: a bootstrap.json to start Envoy with, and the files that "
    "Envoy then watches."
)


def parser(prog: str = "controller bundle") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=DESCRIPTION,
        epilog="Exit status: 0, or 2 for a mistake in the configuration or the options.",
    )
    add = made.add_argument
    add("--config", type=Path, metavar="DIR", help="the configuration directory")
    add("--out", type=Path, metavar="DIR", help="where the bundle is written")
    add("--path", metavar="DIR", help="where Envoy will find the bundle, if not at --out")
    add("--watch", action="store_true", help="keep running, and write again whenever the configuration changes")
    add("--golden", action="store_true", help="in a clone: write envoy/bundles from envoy/sources")
    return made


def main(words: list[str], prog: str = "controller bundle") -> int:
    """Exit status: 0, or 2 for a mistake in configuration or arguments."""
    made = parser(prog)
    options = made.parse_args(words)
    # Envoy's schema takes half a second to import: not for --help
    from controller.bundle import follow, write_golden, write_once  # noqa: PLC0415

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        if options.golden:
            write_golden(Path("envoy"))
            return 0
        if options.config is None or options.out is None:
            made.error("write --config DIR and --out DIR")
        path = options.path or str(options.out.resolve())
        directory = ConfigDirectory(options.config)
        if options.watch:
            # as a container's first process it would not see SIGTERM otherwise
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            follow(directory, options.out, path)
        else:
            write_once(directory.read(), options.out, path)
    except ConfigInvalid as error:
        print(error, file=sys.stderr)
        print(f"mistakes: {len(error.mistakes)}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"cannot write the bundle: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0

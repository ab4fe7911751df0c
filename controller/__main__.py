"""The command line: ``python -m controller bundle`` writes an Envoy bundle."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from extproc.config.directory import ConfigDirectory
from extproc.config.errors import ConfigInvalid


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 2 for a mistake in configuration or arguments."""
    parser = argparse.ArgumentParser(prog="controller")
    commands = parser.add_subparsers(dest="command", required=True)
    bundle = commands.add_parser("bundle", help="write the Envoy configuration of a directory")
    bundle.add_argument(
        "--config", type=Path, metavar="DIR", help="YAML and JSON files of ModelRoutes, ModelServers, GatewayConfig"
    )
    bundle.add_argument("--out", type=Path, metavar="DIR", help="where the bundle is written")
    bundle.add_argument("--path", metavar="DIR", help="where Envoy will find the bundle (default: --out)")
    bundle.add_argument("--watch", action="store_true", help="write again whenever the configuration changes")
    bundle.add_argument(
        "--golden", action="store_true", help="write the bundles under envoy/bundles from their sources"
    )
    options = parser.parse_args(arguments)

    # Envoy's schema takes half a second to import: not for --help
    from controller.bundle import follow, write_golden, write_once  # noqa: PLC0415

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        if options.golden:
            write_golden(Path("envoy"))
            return 0
        if options.config is None or options.out is None:
            bundle.error("write --config DIR and --out DIR")
        path = options.path or str(options.out.resolve())
        directory = ConfigDirectory(options.config)
        if options.watch:
            follow(directory, options.out, path)
        else:
            write_once(directory.read(), options.out, path)
    except ConfigInvalid as error:
        print(error, file=sys.stderr)
        print(f"{len(error.mistakes)} to mend", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"cannot write the bundle: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""``attache translate``: requests and answers between APIs, for Envoy on the same machine."""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

import uvloop

from extproc.api.addresses import parse_address
from extproc.api.quantities import Duration
from extproc.cli.common import raise_descriptor_limit, set_process_name
from extproc.listen_sockets import ListenFailed
from extproc.logs import add_log_options, start_logging
from extproc.runtime.api_translator import serve
from extproc.wire_names import TRANSLATED_SOCKET, TRANSLATOR_SOCKET


def parser(prog: str = "attache translate") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=(
            "Translate requests for ModelServers with translation: Lenient or Strict, and their answers. Envoy and this"
            f" process find each other by the sockets {TRANSLATOR_SOCKET} and {TRANSLATED_SOCKET} in the bundle's"
            " directory, and run as the same user."
        ),
        epilog="Exit status: 0 after SIGTERM or Ctrl-C; 2 if the socket cannot be made.",
        allow_abbrev=False,
    )
    made.add_argument("--bundle", type=Path, required=True, metavar="DIR", help="where Envoy's files are written")
    made.add_argument(
        "--drain",
        default="5m",
        metavar="DURATION",
        help="after SIGTERM, how long running requests may take to end (default: %(default)s)",
    )
    made.add_argument(
        "--metrics",
        default="off",
        metavar="ADDRESS",
        help="IP:PORT of /metrics, or 'off' (default: %(default)s)",
    )
    add_log_options(made)
    return made


def main(words: list[str], prog: str = "attache translate") -> int:
    """Exit status: 0 after a signal, 2 if the socket cannot be made."""
    made = parser(prog)
    options = made.parse_args(words)
    try:
        drain_s = Duration(options.drain)
        page = None if options.metrics == "off" else parse_address(options.metrics)
    except ValueError as error:
        made.error(str(error))
    start_logging(options)
    set_process_name("translate")
    raise_descriptor_limit()
    # a long body is many objects without cycles: the collector would look through all of them again and again
    gc.freeze()
    gc.set_threshold(50_000, 4, 100)
    try:
        # the bundle's writer may begin later
        options.bundle.mkdir(parents=True, exist_ok=True)
        uvloop.run(serve(options.bundle, end_s=drain_s, page=page))
    except (ListenFailed, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0

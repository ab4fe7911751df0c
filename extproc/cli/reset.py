# SPDX-License-Identifier: Apache-2.0
"""``extproc reset``: closes breakers of a running process, which tells the others."""

from __future__ import annotations

import argparse
import sys
import urllib.error
import urllib.parse
import urllib.request
from typing import Final

import msgspec

from extproc.api.addresses import parse_endpoint
from extproc.api.spec import qualified_key
from extproc.api.status_page_contents import RESET_PATH
from extproc.cli.common import fetch_page, to_printable

_TIMEOUT_S: Final = 5.0
_closed: Final = msgspec.json.Decoder(list[str])


def parser(prog: str = "extproc reset") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=(
            "Close the breakers of a ModelServer and of all its engines, or that of one engine. After a repair "
            "they need not wait for their pauses and probes. Processes that share events follow."
        ),
        epilog="Exit status: 0; 2 if the process does not answer, or has no such ModelServer or engine.",
    )
    made.add_argument("server", metavar="[NAMESPACE/]NAME", help="the ModelServer")
    made.add_argument("--engine", default="", metavar="IP:PORT", help="one of its engines, and nothing else")
    made.add_argument(
        "--metrics",
        default="127.0.0.1:9003",
        metavar="ADDRESS",
        help="metrics address of a process (default: %(default)s)",
    )
    return made


def main(words: list[str], prog: str = "extproc reset") -> int:
    """Exit status: 0; 2 if nothing could be asked or found."""
    made = parser(prog)
    options = made.parse_args(words)
    try:
        parse_endpoint(options.metrics)
    except ValueError as error:
        made.error(str(error))
    query = urllib.parse.urlencode({"server": qualified_key(options.server), "engine": options.engine})
    request = urllib.request.Request(f"http://{options.metrics}{RESET_PATH}?{query}", b"", method="POST")
    try:
        closed = _closed.decode(fetch_page(request, timeout_s=_TIMEOUT_S))
    except urllib.error.HTTPError as error:
        with error:
            text = error.read(1000).decode(errors="replace").strip()
        return _failed(text or f"{options.metrics} answers {error.code}; is extproc running there?")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return _failed(f"no answer of {options.metrics}: {reason}; is extproc running there?")
    names = [one or f"the ModelServer {options.server}" for one in closed]
    print(to_printable(f"closed: {', '.join(names)}" if names else "no breaker was open"))
    return 0


def _failed(text: str) -> int:
    print(to_printable(text), file=sys.stderr)
    return 2

# SPDX-License-Identifier: Apache-2.0
"""``extproc explain``: where a request would go and why, by a running process or by a configuration alone."""

from __future__ import annotations

import argparse
import http.client
import random
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.api.config_errors import ConfigInvalid
from extproc.api.spec import qualified_key
from extproc.cli.common import fetch_page, page_url, print_mistakes, to_printable
from extproc.refusals import Refusal
from extproc.wire_names import CHAT_PATH

if TYPE_CHECKING:
    from extproc.core.explanation import Explanation

_TIMEOUT_S: Final = 10.0
_MOST_ERROR_BYTES: Final = 2**20
_ADVICE: Final = (
    "start extproc with --debug, as attache serve --config DIR -- --debug does, and write the address of its metrics,"
    " as http://127.0.0.1:9003"
)


def parser(prog: str = "extproc explain") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=(
            "Explain where a request would go: the filters, the scores with their weights, and the pick. "
            "Nothing is sent to an engine."
        ),
        epilog="Exit status: 0; 1 if the request would be refused; 2 if the question could not be asked.",
    )
    source = made.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--config", type=Path, metavar="DIR", help="use this configuration, knowing nothing yet about its engines"
    )
    source.add_argument("--url", type=page_url, help="ask the process that runs with --debug, at its metrics address")
    made.add_argument("--path", default=CHAT_PATH, help="the request's path (default: %(default)s)")
    made.add_argument(
        "--header", action="append", default=[], metavar="'NAME: VALUE'", help="a request header; may be repeated"
    )
    made.add_argument("--listener", default="", metavar="NAME", help="the listener that is asked (default: all models)")
    made.add_argument(
        "--server", default="", metavar="[NAMESPACE/]NAME", help="the ModelServer that an HTTPRoute has chosen"
    )
    made.add_argument(
        "--pool",
        default="",
        metavar="[NAMESPACE/]NAME",
        help=(
            "ask as a gateway of the endpoint picker protocol does: the ModelServer for requests that match no"
            " ModelRoute (default with --url: that of the process)"
        ),
    )
    made.add_argument("--json", action="store_true", help="print everything as JSON")
    made.add_argument("body", metavar="FILE", help="the request's body; - reads standard input")
    return made


def main(words: list[str], prog: str = "extproc explain") -> int:
    """Exit status: 0, 1 if the request would be refused, 2 if the question could not be asked."""
    options = parser(prog).parse_args(words)
    pairs = (line.partition(":") for line in options.header)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    try:
        body = sys.stdin.buffer.read() if options.body == "-" else Path(options.body).read_bytes()
    except OSError as error:
        print(f"{options.body} cannot be read: {error.strerror}", file=sys.stderr)
        return 2
    try:
        explanation = _explain(options, headers, body)
    except ConfigInvalid as error:
        return print_mistakes(error)
    except Refusal as refusal:
        print(f"refused with {refusal.status}: {refusal.message}", file=sys.stderr)
        if refusal.status == http.HTTPStatus.NOT_FOUND and not options.server:
            print(_unrouted(options.config), file=sys.stderr)
        return 1
    except urllib.error.HTTPError as error:
        return _refused(options.url, error)
    except OSError as error:
        # urllib wraps what the connection says
        message = f"nobody answers at {options.url}: {getattr(error, 'reason', error)}; {_ADVICE}"
        print(to_printable(message), file=sys.stderr)
        return 2
    # loads numpy: not for --help
    from extproc.core.explanation import to_text  # noqa: PLC0415

    text = msgspec.json.format(msgspec.json.encode(explanation)).decode() if options.json else to_text(explanation)
    print(to_printable(text))
    return 0


def _unrouted(config: Path) -> str:
    """How to ask about a ModelServer that no route leads to."""
    from extproc.api.config_loader import load_directory  # noqa: PLC0415 - as below

    names = ", ".join(server.metadata.key for server in load_directory(config).servers)
    return f"to ask a ModelServer without a route, write --server NAME; there are: {names}"


def _refused(url: str, error: urllib.error.HTTPError) -> int:
    """Exit status: 1 for a refusal that a client would get too, 2 if another program answers, or a process without
    --debug.
    """
    try:
        message = msgspec.json.decode(error.read(_MOST_ERROR_BYTES), type=_ErrorBody).error.message
    except (ValueError, RecursionError, OSError, http.client.HTTPException):
        print(to_printable(f"nobody explains at {url} ({error.code} {error.reason}): {_ADVICE}"), file=sys.stderr)
        return 2
    print(to_printable(f"refused with {error.code}: {message}"), file=sys.stderr)
    return 1


class _Error(msgspec.Struct):
    message: str


class _ErrorBody(msgspec.Struct):
    """The error object that clients get for a refusal."""

    error: _Error


def _explain(options: argparse.Namespace, headers: dict[str, str], body: bytes) -> Explanation:
    """By the process at ``--url``, or as one that has just started with ``--config`` would decide.

    Raises ConfigInvalid, Refusal and OSError.
    """
    if options.url is not None:
        return _ask(options, headers, body)
    # these load numpy: not for --help
    from extproc.api.config_loader import load_directory  # noqa: PLC0415
    from extproc.core.core import Core  # noqa: PLC0415
    from extproc.core.request_record import BUNDLE, GatewayProperties, RequestHead  # noqa: PLC0415
    from extproc.llmd.picker_builder import PickerFactory  # noqa: PLC0415

    core = Core(
        load_directory(options.config), rng=random.Random(), ticket_prefix="explain", make_picker=PickerFactory()
    )
    head = RequestHead("POST", options.path, headers, has_body=True, is_trusted=True, listener=options.listener)
    pool, server = _key(options.pool) or None, _key(options.server)
    arrival = core.builder.arrival_builder(server=server, pool=pool)(head, body)
    return core.explain(arrival, 0.0, attachment=BUNDLE if pool is None or server else GatewayProperties(choices=1))


def _key(name: str) -> str:
    return qualified_key(name) if name else ""


def _ask(options: argparse.Namespace, headers: dict[str, str], body: bytes) -> Explanation:
    from extproc.core.explanation import Explanation  # noqa: PLC0415 - loads numpy: not for --help

    url = options.url
    if not url.startswith(("http://", "https://")):
        raise OSError(f"'{url}' is not an address; write http://HOST:PORT")
    asked = {"listener": options.listener, "server": _key(options.server), "pool": _key(options.pool)}
    query = urllib.parse.urlencode(asked)
    where = f"{url.rstrip('/')}/debug/explain{options.path}?{query}"
    request = urllib.request.Request(where, data=body, headers=headers)  # noqa: S310 - checked
    try:
        return msgspec.json.decode(fetch_page(request, timeout_s=_TIMEOUT_S), type=Explanation)
    except (ValueError, RecursionError) as error:  # the decoder's error is a ValueError
        raise OSError(f"the page there explains nothing ({error})") from None

"""``extproc explain``: what would be decided for a request, by a running process or by a configuration alone."""

from __future__ import annotations

import argparse
import random
import sys
import urllib.error
import urllib.request
from pathlib import Path

import msgspec

from extproc.config.directory import load_directory
from extproc.core.core import Core
from extproc.core.explanation import Explanation, to_text
from extproc.core.types import Head
from extproc.errors import Refusal
from extproc.protocol import CHAT_PATH


def run(words: list[str]) -> int:
    """Exit status: 0, 1 if the request would be refused, 2 if nobody could be asked. Raises ConfigInvalid."""
    parser = argparse.ArgumentParser(prog="extproc explain", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--config", type=Path, metavar="DIR", help="decide by this configuration, with nothing known yet"
    )
    source.add_argument("--url", help="ask the extproc that runs with --debug, such as http://127.0.0.1:9003")
    parser.add_argument("--path", default=CHAT_PATH, help="of the request (default: %(default)s)")
    parser.add_argument("--header", action="append", default=[], metavar="'NAME: VALUE'", help="of the request")
    parser.add_argument("--json", action="store_true", help="all of it, for programs")
    parser.add_argument("body", help="a file with the request's body, - for standard input")
    options = parser.parse_args(words)
    pairs = (line.partition(":") for line in options.header)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    try:
        body = sys.stdin.buffer.read() if options.body == "-" else Path(options.body).read_bytes()
    except OSError as error:
        print(f"{options.body} cannot be read: {error.strerror}", file=sys.stderr)
        return 2
    try:
        if options.url is not None:
            explanation = _ask(options.url, options.path, headers, body)
        else:
            explanation = _decide(
                options.config, Head("POST", options.path, headers, has_body=True, is_trusted=True), body
            )
    except Refusal as refusal:
        print(f"refused with {refusal.status}: {refusal.message}", file=sys.stderr)
        return 1
    except urllib.error.HTTPError as error:
        print(f"refused with {error.code}: {error.read().decode(errors='replace')}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"nobody answers at {options.url}: {error}; is extproc running with --debug?", file=sys.stderr)
        return 2
    print(msgspec.json.format(msgspec.json.encode(explanation)).decode() if options.json else to_text(explanation))
    return 0


def _decide(directory: Path, head: Head, body: bytes) -> Explanation:
    core = Core(load_directory(directory), rng=random.Random(), ticket_prefix="explain")
    return core.explain(core.intake.receive(core.intake.admit(head), head, body), 0.0)


def _ask(url: str, path: str, headers: dict[str, str], body: bytes) -> Explanation:
    if not url.startswith(("http://", "https://")):
        raise OSError(f"'{url}' is not an address; write http://HOST:PORT")
    request = urllib.request.Request(f"{url.rstrip('/')}/debug/explain{path}", data=body, headers=headers)  # noqa: S310 - checked
    with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - checked
        return msgspec.json.decode(answer.read(), type=Explanation)

# SPDX-License-Identifier: Apache-2.0
"""``attache explain-scaling``: why a binding's targets have so many replicas, as the leading manager says."""

from __future__ import annotations

import argparse
import http.client
import sys
from typing import Final
from urllib.parse import quote, urlsplit

import msgspec

from controller.roles.scaling.explaining import explained
from controller.roles.scaling.records import Record

_TIMEOUT_S: Final = 10.0
_MAX_BYTES: Final = 50_000_000


class _Page(msgspec.Struct):
    decisions: list[Record]


def parser(prog: str = "attache explain-scaling") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description="Print the last decisions about an AutoscalingPolicyBinding, the newest last: what each law asked for "
        "and why, what changed that, and what was done.",
        epilog="The leading manager is asked; reach it by: kubectl -n attache-system port-forward POD 9006. "
        "Exit status: 0, 1 if there is no such decision, or 2 for a mistake in the options or no manager.",
    )
    made.add_argument("binding", metavar="NAMESPACE/NAME", type=_key, help="the AutoscalingPolicyBinding")
    made.add_argument(
        "--manager", metavar="URL", default="http://127.0.0.1:9006", help="its pages; default: %(default)s"
    )
    made.add_argument("--last", metavar="N", type=_positive, default=1, help="how many; default: %(default)s")
    return made


def main(words: list[str], prog: str) -> int:
    """Exit status: see the epilog."""
    options = parser(prog).parse_args(words)
    try:
        status, body = _asked(options.manager, f"/decisions/{quote(options.binding)}?last={options.last}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        print(f"{options.manager} does not answer: {error}", file=sys.stderr)
        return 2
    if status != http.HTTPStatus.OK:
        print(body.decode(errors="replace").strip(), file=sys.stderr)
        return 1 if status == http.HTTPStatus.NOT_FOUND else 2
    try:
        page = msgspec.json.decode(body, type=_Page)
    except msgspec.DecodeError as error:
        print(f"{options.manager} answers something else than decisions: {error}", file=sys.stderr)
        return 2
    print("\n".join(explained(one) for one in reversed(page.decisions)), end="")
    return 0


def _asked(url: str, path: str) -> tuple[int, bytes]:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("write a URL such as http://127.0.0.1:9006")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", parts.path.rstrip("/") + path)
        answer = connection.getresponse()
        return answer.status, answer.read(_MAX_BYTES)
    finally:
        connection.close()


def _key(text: str) -> str:
    if text.count("/") != 1 or text.startswith("/") or text.endswith("/"):
        raise argparse.ArgumentTypeError(f"'{text}' is not NAMESPACE/NAME")
    return text


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number

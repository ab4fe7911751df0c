# SPDX-License-Identifier: Apache-2.0
"""``attache explain-scaling``: why a binding's targets have so many replicas, as reported by the leading manager."""

from __future__ import annotations

import argparse
import http.client
import ssl
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, urlsplit

import msgspec

from controller.autoscaler.reconciler.decision_records import DecisionRecord, explain_record
from extproc.cli.common import page_url

if TYPE_CHECKING:
    from collections.abc import Mapping

_TIMEOUT_S: Final = 10.0
_MAX_BYTES: Final = 50_000_000
_REACH: Final = (
    "The leading manager is asked. To reach it: kubectl -n attache-system port-forward POD 9006; the Lease "
    "attache-manager tells the POD, followed by a dash and something random."
)


class _DecisionsPage(msgspec.Struct):
    decisions: list[DecisionRecord]


def parser(prog: str = "attache explain-scaling") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=(
            "Print the last decisions about an AutoscalingPolicyBinding, the newest last: what each strategy asked for "
            "and why, what changed that, and what was done."
        ),
        epilog=(
            f"{_REACH} Exit status: 0, 1 if there is no such decision, or 2 for a mistake in the options or no manager."
        ),
    )
    made.add_argument("binding", metavar="NAMESPACE/NAME", type=_key, help="the AutoscalingPolicyBinding")
    made.add_argument(
        "--manager",
        metavar="URL",
        type=page_url,
        default="http://127.0.0.1:9006",
        help="its pages; default: %(default)s",
    )
    made.add_argument("--token-file", metavar="FILE", type=Path, help="the token for a manager with --metrics-auth")
    made.add_argument(
        "--ca",
        metavar="FILE",
        type=Path,
        help=(
            "the authorities of its certificate, ca.crt of the Secret attache-webhook-certificates; the name in the "
            "certificate is not checked, because it is reached by a forwarded port"
        ),
    )
    made.add_argument("--last", metavar="N", type=_positive, default=1, help="how many; default: %(default)s")
    return made


def main(words: list[str], prog: str) -> int:
    """Exit status: see the epilog."""
    options = parser(prog).parse_args(words)
    try:
        headers = {} if options.token_file is None else {"authorization": f"Bearer {_token(options.token_file)}"}
        tls = _trusting(options.ca)
    except ValueError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    try:
        path = f"/decisions/{quote(options.binding)}?last={options.last}"
        status, body = _asked(options.manager, path, headers, tls)
    except (OSError, http.client.HTTPException, ValueError) as error:
        print(f"{options.manager} does not answer: {error}\n{_REACH}", file=sys.stderr)
        return 2
    if status != http.HTTPStatus.OK:
        print(body.decode(errors="replace").strip(), file=sys.stderr)
        return 1 if status == http.HTTPStatus.NOT_FOUND else 2
    try:
        page = msgspec.json.decode(body, type=_DecisionsPage)
    except msgspec.DecodeError as error:
        print(f"{options.manager} answers something else than decisions: {error}", file=sys.stderr)
        return 2
    print("\n".join(explain_record(one) for one in reversed(page.decisions)), end="")
    return 0


def _token(file: Path) -> str:
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--token-file: {file} cannot be read: {error}") from None
    if not token.isprintable() or not token.isascii() or not token:
        raise ValueError(f"--token-file: {file} holds no token; write the token as its only line")
    return token


def _trusting(ca: Path | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:
        why = "no PEM in it" if isinstance(error, ssl.SSLError) else error.strerror
        raise ValueError(f"--ca: {ca} has no certificates that can be read ({why}); write a PEM file") from None
    context.check_hostname = ca is None
    return context


def _asked(url: str, path: str, headers: Mapping[str, str], tls: ssl.SSLContext) -> tuple[int, bytes]:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("write a URL such as http://127.0.0.1:9006")
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S, context=tls)
    elif headers:
        raise ValueError("a token is sent with https alone; write https:// in --manager")
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", parts.path.rstrip("/") + path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(_MAX_BYTES)
    finally:
        connection.close()


def _key(text: str) -> str:
    if text.count("/") != 1 or text.startswith("/") or text.endswith("/"):
        raise argparse.ArgumentTypeError(f"'{text}' is not NAMESPACE/NAME")
    return text


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of decisions; write 1 or more")
    return int(text)

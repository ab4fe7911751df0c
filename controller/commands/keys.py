# SPDX-License-Identifier: Apache-2.0
"""``attache keys``: virtual API keys of a configuration directory."""

from __future__ import annotations

import argparse
import asyncio
import getpass
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.keys.api_key_changes import KeyRefused, find_key, key_for_display, parse_key_request, parse_key_update
from controller.keys.api_key_server import KeysApi, parse_duration
from controller.keys.api_key_store import AUDIT_FILE, KeyAdmin, KeyStoreFile
from extproc.api.addresses import parse_address
from extproc.api.key_store import KEYS_FILE
from extproc.api.untrusted_files import read_token
from extproc.browser_security import add_browser_protection
from extproc.logs import add_log_options, start_logging
from extproc.page_server import PageServer
from extproc.sd_notify import READY, notify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.keys.api_key_store import GeneratedKey, KeyStorage

log = logging.getLogger(__name__)
_USAGE: Final = 2
_NONE: Final = "none"
_FORMS: Final = ("text", "json")
_COLUMNS: Final = ("id", "name", "tenant", "user", "status", "expiresAt", "models")
_WALL: Final = time.time  # noqa: TID251 - the clock of the shell
# Of --budget, what is not an amount.
_OF_BUDGET: Final = frozenset({"timeZone", "currency", "soft", "scope"})
_OF_LIMIT: Final = frozenset({"burst", "scope"})
_NUMBERS: Final = frozenset({"soft", "burst"})


def parser(prog: str = "attache keys") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=(
            f"Virtual API keys. They are in {KEYS_FILE} of the configuration directory, as digests: a key is printed"
            f" once, when it is made. Each change is a line of {AUDIT_FILE} there. The GatewayConfig must have"
            " authentication: {virtualKeys: {}}."
        ),
        epilog="Exit status: 0; 1 if there is no such key or a change is refused; 2 for a mistake in the options or"
        " files.",
        allow_abbrev=False,
    )
    modes = made.add_subparsers(
        dest="mode", required=True, metavar="create|list|show|update|rotate|revoke|delete|serve", help="what to do"
    )
    create = _mode(modes, "create", "make a key, and print it", has_key=True, forms=(*_FORMS, "key"))
    create.add_argument("--tenant", required=True, metavar="NAME", help="whose key it is")
    create.add_argument("--user", default="", metavar="NAME", help="of that tenant")
    _add_limits(create, "for all models of the tenant", "without an end", "its own")
    _mode(modes, "list", "print all keys")
    _mode(modes, "show", "print one key", has_key=True)
    update = _mode(modes, "update", "change models, limits, budgets, reports or the end of a key", has_key=True)
    _add_limits(update, "as they are", "as it is", "as it is", none=" 'none': no longer any.")
    rotate = _mode(modes, "rotate", "give its caller a new key, and print it", has_key=True, forms=(*_FORMS, "key"))
    rotate.add_argument(
        "--overlap", default="0s", metavar="DURATION", help="how long the last key is valid, too (default: %(default)s)"
    )
    _mode(modes, "revoke", "refuse a key from now on", has_key=True)
    _mode(modes, "delete", "refuse a key, and forget it but for its name", has_key=True)
    serve = _mode(modes, "serve", "serve the same as an HTTP API for administrators", forms=())
    serve.add_argument("--listen", required=True, metavar="ADDRESS", help="IP:PORT of the API")
    serve.add_argument(
        "--token-file",
        type=Path,
        required=True,
        metavar="FILE",
        help="what its clients must send as a Bearer token",
    )
    add_log_options(serve)
    return made


def _mode(
    modes: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    *,
    has_key: bool = False,
    forms: Sequence[str] = _FORMS,
) -> argparse.ArgumentParser:
    made = modes.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", allow_abbrev=False)
    if has_key:
        made.add_argument("key", metavar="NAME", help="of the key" if name == "create" else "of the key, or its id")
    place = made.add_mutually_exclusive_group(required=True)
    place.add_argument("--config", type=Path, metavar="DIR", help="the configuration directory")
    place.add_argument("--secret", metavar="NAMESPACE/NAME", help="in a cluster, the Secret with the keys")
    if forms:
        alone = "; key: only the key, for scripts" if "key" in forms else ""
        made.add_argument("--format", choices=forms, default="text", help=f"(default: %(default)s){alone}")
    return made


def _add_limits(made: argparse.ArgumentParser, models: str, end: str, reports: str, none: str = "") -> None:
    made.add_argument(
        "--model",
        action="append",
        metavar="NAME",
        help=f"that it is good for, '*' at one end for any text; may be repeated (default: {models}).{none}",
    )
    made.add_argument("--expires", metavar="WHEN", help=f"90d, or 2030-01-31T00:00:00Z (default: {end}).{none}")
    made.add_argument(
        "--reports",
        choices=("Tenant", *([_NONE] if none else [])),
        help=f"whose usage it may read: that of its whole tenant (default: {reports})",
    )
    made.add_argument(
        "--rate",
        action="append",
        metavar="LIMIT",
        help="minute:requests=60,totalTokens=100000 or second, hour, day, month; may be repeated." + none,
    )
    made.add_argument(
        "--budget",
        action="append",
        metavar="BUDGET",
        help="Month:money=25 or Hour, Day, Week; tokens, inputTokens, outputTokens, requests; currency=EUR,"
        f" timeZone=Europe/Berlin, soft=0.8; may be repeated.{none}",
    )


def main(words: list[str], prog: str = "attache keys") -> int:
    """Exit status: 0, 1 for a change that is refused, or 2 for a mistake in the options or files."""
    options = parser(prog).parse_args(words)
    try:
        admin = KeyAdmin(_place(options), _WALL)
        if options.mode == "serve":
            return _serve(options, admin)
        _run(options, admin)
        if options.mode not in {"list", "show"} and (warning := admin.place.why_unused()):
            print(f"{prog} {options.mode}: {warning}", file=sys.stderr)
    except KeyRefused as error:
        print(f"{prog} {options.mode}: {error}", file=sys.stderr)
        return _USAGE if error.status >= 500 else 1
    except (OSError, ValueError) as error:
        print(f"{prog} {options.mode}: {error}", file=sys.stderr)
        return _USAGE
    return 0


def _place(options: argparse.Namespace) -> KeyStorage:
    if options.config is not None:
        return KeyStoreFile(options.config)
    if options.secret.count("/") != 1:
        raise KeyRefused(f"'{options.secret}': write --secret NAMESPACE/NAME", 500)
    # only in a cluster: they take half a second to load
    from controller.keys.kubernetes_secret_store import KeyStoreSecret  # noqa: PLC0415
    from controller.kube.cluster_access import find_access  # noqa: PLC0415
    from controller.kube.errors import ClusterAccessInvalid  # noqa: PLC0415

    # each change is a line of the log
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        return KeyStoreSecret(find_access(), options.secret)
    except ClusterAccessInvalid as error:
        raise KeyRefused(str(error), 500) from None


def _run(options: argparse.Namespace, admin: KeyAdmin) -> None:
    actor = f"user {_user()}"
    match options.mode:
        case "create":
            plain = {"name": options.key, "tenant": options.tenant, "user": options.user, **_limits(options)}
            _print_made(admin.create(parse_key_request(plain), actor), admin, options.format)
        case "rotate":
            made = admin.rotate(options.key, actor, overlap_s=parse_duration(options.overlap))
            _print_made(made, admin, options.format)
        case "list":
            _print([key_for_display(one, admin.now) for one in admin.place.read().keys], options.format)
        case "show":
            _print([key_for_display(find_key(admin.place.read(), options.key), admin.now)], options.format, is_one=True)
        case "update":
            record = admin.update(options.key, parse_key_update(_limits(options)), actor)
            _print([key_for_display(record, admin.now)], options.format, is_one=True)
        case mode:
            change = {"revoke": admin.revoke, "delete": admin.delete}[mode]
            _print([key_for_display(change(options.key, actor), admin.now)], options.format, is_one=True)


def _limits(options: argparse.Namespace) -> dict[str, Any]:
    """As the admin API takes them; what is not given is absent. Raises KeyRefused."""
    found: dict[str, Any] = {}
    if options.model is not None:
        found["models"] = None if options.model == [_NONE] else options.model
    if options.expires == _NONE:
        found["expiresAt"] = None
    elif options.expires is not None:
        # a date begins with four digits and a dash
        found["expiresAt" if "-" in options.expires else "expiresIn"] = options.expires
    if options.reports is not None:
        found["reports"] = None if options.reports == _NONE else options.reports
    if options.rate is not None:
        found["rateLimits"] = [] if options.rate == [_NONE] else [_rate(one) for one in options.rate]
    if options.budget is not None:
        found["budgets"] = [] if options.budget == [_NONE] else [_budget(one) for one in options.budget]
    return found


def _rate(text: str) -> dict[str, Any]:
    unit, fields = _fields(text, "minute:requests=60", _OF_LIMIT)
    return {"unit": unit, **fields}


def _budget(text: str) -> dict[str, Any]:
    window, fields = _fields(text, "Month:money=25", _OF_BUDGET | {"money"})
    most = {name: value for name, value in fields.items() if name not in _OF_BUDGET}
    return {"window": window, "max": most, **{name: fields[name] for name in fields.keys() & _OF_BUDGET}}


def _fields(text: str, example: str, as_text: frozenset[str]) -> tuple[str, dict[str, Any]]:
    """``begin:name=value,name=value``; whole numbers but for ``as_text``."""
    begin, _, rest = text.partition(":")
    fields: dict[str, Any] = {}
    for one in rest.split(","):
        name, sign, value = one.partition("=")
        if not sign:
            raise KeyRefused(f"'{text}': write it as {example}")
        try:
            fields[name] = float(value) if name in _NUMBERS else value if name in as_text else int(value)
        except ValueError:
            raise KeyRefused(f"'{text}': '{value}' is no number; write it as {example}") from None
    return begin, fields


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _print_made(made: GeneratedKey, admin: KeyAdmin, form: str) -> None:
    record = key_for_display(made.record, admin.now)
    if form == "json":
        print(msgspec.json.encode({**record, "key": made.key}).decode())
        return
    if form == "key":
        print(made.key)
        return
    _print([record], form, is_one=True)
    print(f"{'key':<12} {made.key}")
    print("This key is shown once. Give it to its owner, and keep no copy.", file=sys.stderr)


def _print(records: Sequence[dict[str, Any]], form: str, *, is_one: bool = False) -> None:
    if form == "json":
        print(msgspec.json.encode(records[0] if is_one else {"keys": records}).decode())
    elif is_one:
        print("\n".join(f"{name:<12} {_text(value)}" for name, value in records[0].items()))
    else:
        rows = [_COLUMNS, *(tuple(_text(one.get(name, "-")) for name in _COLUMNS) for one in records)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
        for row in rows:
            print("  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip())


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return ",".join(value)
    return msgspec.json.encode(value).decode()


def _serve(options: argparse.Namespace, admin: KeyAdmin) -> int:
    start_logging(options)
    address = parse_address(options.listen)
    read_token(options.token_file)
    admin.place.read()
    asyncio.run(_serve_until_signal(address, KeysApi(admin, options.token_file)))
    return 0


async def _serve_until_signal(address: tuple[str, int], api: KeysApi) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    app = api.app()
    add_browser_protection(app, address[0])
    runner = PageServer(app, end_s=2.0)
    await runner.setup()
    try:
        await runner.listen(address)
        log.info("keys are administered at http://%s:%d/v1/keys", *address)
        notify(READY, os.environ)
        await stop.wait()
    finally:
        await runner.cleanup()

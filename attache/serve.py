# SPDX-License-Identifier: Apache-2.0
"""``attache serve``: extproc, the bundle's writer and Envoy as one foreground process with one log."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import signal
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from attache.envoy import find_envoy
from controller.bundle.envoy_admin_client import begin_drain, running_requests, why_not_ready
from extproc.api.addresses import worker_addresses
from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import load_directory
from extproc.api.quantities import Duration
from extproc.cli.common import print_mistakes
from extproc.cli.supervisor import Program, SupervisedProgram
from extproc.listen_sockets import ListenFailed, try_to_bind
from extproc.logs import add_log_options, log_arguments, start_logging
from extproc.sd_notify import READY, notify

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from extproc.api.gateway_config import GatewayConfigSpec

log = logging.getLogger(__name__)
_USAGE: Final = 2
_POLL_S: Final = 0.2
# How long load balancers have to notice that Envoy drains, if requests come all the time.
_CLOSE_S: Final = 5
_FLUSH_MS: Final = 1000
# Of the admin API of virtual keys, in the configuration directory.
TOKEN_FILE: Final = ".keys.token"  # noqa: S105 - a name
# Envoy's lines in the log have the form of ours: %_ and %j are the message with its ends of lines escaped.
_ENVOY_LINES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "text": "%Y-%m-%d %H:%M:%S,%e %l envoy.%n: %_",
        "json": '{"time": "%Y-%m-%dT%H:%M:%S.%e%z", "level": "%l", "logger": "envoy.%n", "message": "%j"}',
    }
)


def parser(prog: str = "attache serve") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} --config DIR [OPTIONS] [-- OPTIONS OF EXTPROC ...]",
        description=(
            "Run extproc, the bundle's writer, Envoy and the translator on this machine until a signal. One that ends"
            " is started again. Addresses and the number of extproc's processes are those of the GatewayConfig."
        ),
        epilog=(
            "SIGTERM and Ctrl-C: Envoy closes its listeners, requests end, then everything ends; a second signal ends"
            " it at once. SIGUSR1 restarts extproc's workers one by one. Exit status: 0 after a signal, 2 for a"
            " mistake in the configuration or the options, or a port that is in use."
        ),
        allow_abbrev=False,
    )
    add = made.add_argument
    add("--config", type=Path, required=True, metavar="DIR", help="the configuration directory; changes are followed")
    add("--bundle", type=Path, metavar="DIR", help="where Envoy's files are written (default: a temporary directory)")
    add(
        "--metrics",
        default="127.0.0.1:9003",
        metavar="ADDRESS",
        help="IP:PORT of extproc's /metrics and /readyz, or 'off' (default: %(default)s)",
    )
    add(
        "--bundle-metrics",
        default="off",
        metavar="ADDRESS",
        help="IP:PORT of /metrics and /readyz of the bundle's writer, or 'off' (default: %(default)s)",
    )
    add(
        "--translate-metrics",
        default="off",
        metavar="ADDRESS",
        help="IP:PORT of /metrics of the translator, or 'off' (default: %(default)s)",
    )
    add(
        "--usage-store",
        metavar="URL",
        help="where attache usage keeps rows, if the GatewayConfig has usageLog (default: usage.db beside that log)",
    )
    add(
        "--usage-metrics",
        default="127.0.0.1:9007",
        metavar="ADDRESS",
        help="IP:PORT of /metrics and /readyz of attache usage, or 'off' (default: %(default)s)",
    )
    add(
        "--usage-admin",
        default="127.0.0.1:9008",
        metavar="ADDRESS",
        help="IP:PORT of reports about all callers, or 'off' (default: %(default)s)",
    )
    add("--usage-admin-keys", default="", metavar="NAMES", help="API keys, by name, that see the usage of all (a,b)")
    add(
        "--usage-admin-tenants",
        default="",
        metavar="NAMES",
        help="tenants of tokens that see the usage of all (a,b)",
    )
    add(
        "--keys-admin",
        default="127.0.0.1:9011",
        metavar="ADDRESS",
        help="IP:PORT of the API of virtual keys, if the GatewayConfig has them, or 'off' (default: %(default)s)",
    )
    add(
        "--keys-token-file",
        type=Path,
        metavar="FILE",
        help=f"what clients of that API must send (default: {TOKEN_FILE} of the directory, made at random)",
    )
    add(
        "--drain",
        default="5m",
        metavar="DURATION",
        help="after SIGTERM, how long running requests may take to end (default: %(default)s)",
    )
    add(
        "--envoy-log-level",
        default="warning",
        metavar="LEVEL",
        help="of Envoy's lines in the log (default: %(default)s)",
    )
    add_log_options(made)
    add("extproc_options", nargs="*", metavar="OPTIONS", help="after --: further options of attache extproc")
    return made


class ServePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is run. ``admin``: Envoy's. ``listens``: where clients connect. ``taken``: all addresses that must be free,
    with where each is written. ``translator``: runs always, as a change of the configuration may need it. ``usage``:
    None without a usage log. ``keys``: None without virtual keys.
    """

    extproc: Program
    bundle: Program
    envoy: Program
    translator: Program
    usage: Program | None
    keys: Program | None
    admin: str
    listens: tuple[str, ...]
    taken: tuple[tuple[str, str], ...]


def plan_programs(options: argparse.Namespace, gateway: GatewayConfigSpec, envoy: Path, bundle: Path) -> ServePlan:
    """The programs that serve a directory with this GatewayConfig. ``bundle``: where Envoy's files are written."""
    listens = tuple(dict.fromkeys(one.address for one in gateway.listeners)) or (gateway.listen,)
    python, config = (sys.executable, "-m", "attache"), ("--config", str(options.config))
    is_lines = (options.usage_store or "").startswith("jsonl:")
    has_reports = gateway.usage_log is not None and options.usage_admin != "off" and not is_lines
    # a restart forgets what is used of budgets
    rows = ("--usage-api", f"http://{options.usage_admin}") if has_reports else ()
    metrics = ("--metrics", options.bundle_metrics)
    return ServePlan(
        extproc=Program(
            "extproc",
            (
                *(*python, "extproc", *config, "--listen", gateway.extproc, "--metrics", options.metrics),
                *log_arguments(options),
                *("--drain", options.drain, "--workers", str(gateway.extproc_workers), *rows),
                *options.extproc_options,
            ),
        ),
        bundle=Program(
            "bundle",
            (
                *(*python, "bundle", *config, "--out", str(bundle), "--watch", *metrics),
                *log_arguments(options),
            ),
        ),
        envoy=Program(
            "envoy",
            (
                *(str(envoy), "-c", str(bundle.resolve() / "bootstrap.json"), "--use-dynamic-base-id"),
                *("--log-level", options.envoy_log_level, "--log-format", _ENVOY_LINES[options.log_format]),
                # of misc there are only lines that name extensions as work in progress
                *("--component-log-level", "misc:error"),
                # of the usage log; by default lines may stay in Envoy for 10 s
                *("--file-flush-interval-msec", str(_FLUSH_MS)),
                # connections are closed after the answer that they carry, from the first moment of the drain
                *("--drain-time-s", str(_CLOSE_S), "--drain-strategy", "immediate"),
            ),
        ),
        translator=Program(
            "translate",
            (
                *(*python, "translate", "--bundle", str(bundle), "--drain", options.drain),
                *("--metrics", options.translate_metrics),
                *log_arguments(options),
            ),
        ),
        usage=_usage_program(options, gateway, python),
        keys=_keys_program(options, gateway, python),
        admin=gateway.admin,
        listens=listens,
        taken=tuple(_taken(gateway, options, listens)),
    )


def _usage_program(options: argparse.Namespace, gateway: GatewayConfigSpec, python: tuple[str, ...]) -> Program | None:
    log_of = gateway.usage_log
    if log_of is None:
        return None
    store = () if options.usage_store is None else ("--store", options.usage_store)
    return Program(
        "usage",
        (
            *(*python, "usage", "serve", "--log", log_of.path, *store, "--envoy-admin", gateway.admin),
            *("--listen", log_of.api or "off", "--metrics", options.usage_metrics, "--admin", options.usage_admin),
            *("--admin-keys", options.usage_admin_keys, "--admin-tenants", options.usage_admin_tenants),
            *log_arguments(options),
        ),
    )


def _has_keys(options: argparse.Namespace, gateway: GatewayConfigSpec) -> bool:
    """Whether virtual keys of the directory are in use, and administered here."""
    authentication = gateway.authentication
    return (
        options.keys_admin != "off"
        and authentication is not None
        and authentication.virtual_keys is not None
        and authentication.virtual_keys.secret is None
    )


def _token_file(options: argparse.Namespace) -> Path:
    given: Path | None = options.keys_token_file
    return Path(options.config) / TOKEN_FILE if given is None else given


def _keys_program(options: argparse.Namespace, gateway: GatewayConfigSpec, python: tuple[str, ...]) -> Program | None:
    if not _has_keys(options, gateway):
        return None
    words = ("--listen", options.keys_admin, "--token-file", str(_token_file(options)))
    return Program("keys", (*python, "keys", "serve", "--config", str(options.config), *words, *log_arguments(options)))


def make_token(file: Path) -> bool:
    """Write a random token into ``file``, for its owner alone; False if it is there. Raises OSError."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w") as opened:
        opened.write(f"{secrets.token_hex(32)}\n")
    return True


def _taken(
    gateway: GatewayConfigSpec, options: argparse.Namespace, listens: Sequence[str]
) -> Iterator[tuple[str, str]]:
    yield from ((one, "'listen' or 'listeners' of the GatewayConfig") for one in listens)
    if gateway.steps is not None:
        yield gateway.steps, "'steps' of the GatewayConfig"
    yield gateway.admin, "'admin' of the GatewayConfig"
    if options.bundle_metrics != "off":
        yield options.bundle_metrics, "--bundle-metrics"
    if options.translate_metrics != "off":
        yield options.translate_metrics, "--translate-metrics"
    if gateway.usage_log is not None:
        of_usage = ((options.usage_metrics, "--usage-metrics"), (options.usage_admin, "--usage-admin"))
        yield from (one for one in of_usage if one[0] != "off")
        if gateway.usage_log.api is not None:
            yield gateway.usage_log.api, "'api' of 'usageLog' of the GatewayConfig"
    if _has_keys(options, gateway):
        yield options.keys_admin, "--keys-admin"
    for address, where in ((gateway.extproc, "'extproc' of the GatewayConfig"), (options.metrics, "--metrics")):
        if address != "off" and not address.startswith("unix:"):
            yield from ((one, where) for one in worker_addresses(address, gateway.extproc_workers))


def main(words: list[str], prog: str = "attache serve") -> int:
    """Exit status: 0 after a signal, 2 for a mistake in the configuration or the options, or a port in use."""
    made = parser(prog)
    options = made.parse_args(words)
    try:
        drain_s = Duration(options.drain)
    except ValueError as error:
        made.error(str(error))
    try:
        gateway = load_directory(options.config).gateway
    except ConfigInvalid as error:
        return print_mistakes(error)
    envoy = find_envoy()
    if envoy is None:
        return _refuse("there is no Envoy; run: attache envoy --fetch, or set ENVOY to the path of the binary")
    if gateway.usage_log is not None and find_spec("sqlalchemy") is None:
        return _refuse(
            "'usageLog' of the GatewayConfig needs the Python package 'sqlalchemy'; run: pip install 'attache[usage]'"
        )
    start_logging(options)
    with tempfile.TemporaryDirectory(prefix="attache-serve-") as folder:
        planned = plan_programs(options, gateway, envoy, options.bundle or Path(folder) / "bundle")
        try:
            _check_free(planned.taken)
            if gateway.usage_log is not None:
                # Envoy makes files, but no directories
                Path(gateway.usage_log.path).parent.mkdir(parents=True, exist_ok=True)
        except (ListenFailed, ValueError) as error:
            return _refuse(str(error))
        except OSError as error:
            return _refuse(f"'usageLog' of the GatewayConfig: {error}; write a path where Envoy may write")
        if planned.keys is not None and options.keys_token_file is None:
            planned = _with_token(planned, _token_file(options))
        return asyncio.run(_serve(planned, drain_s, Path(folder)))


def _with_token(planned: ServePlan, file: Path) -> ServePlan:
    """Without the API of keys if its token cannot be kept: requests need no API."""
    try:
        if make_token(file):
            log.info("the token of the API of virtual keys is in %s", file)
    except OSError as error:
        log.warning("virtual keys have no API: %s; write a token into a file, and give --keys-token-file FILE", error)
        return msgspec.structs.replace(planned, keys=None)
    return planned


def _refuse(message: str) -> int:
    print(message, file=sys.stderr)
    return _USAGE


def _check_free(taken: Sequence[tuple[str, str]]) -> None:
    """Raises ListenFailed or ValueError for an address that cannot be listened on. Two Envoys on one port would share
    its connections.
    """
    for address, where in taken:
        try_to_bind(address, where)


async def _serve(planned: ServePlan, drain_s: float, folder: Path) -> int:
    """Until a signal, or until a program cannot be started at all; returns the exit status."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    extproc, bundle, envoy = (
        SupervisedProgram(one, folder) for one in (planned.extproc, planned.bundle, planned.envoy)
    )
    loop.add_signal_handler(signal.SIGUSR1, extproc.send_signal, signal.SIGUSR1)
    others = (extproc, bundle)
    runs = [asyncio.create_task(one.run()) for one in others]
    # nothing waits for them, and nothing ends with them: few requests need them, or none
    some = (planned.translator, planned.usage, planned.keys)
    beside = [SupervisedProgram(one, folder, is_needed=False) for one in some if one is not None]
    beside_runs = [asyncio.create_task(one.run()) for one in beside]
    stopped, written = asyncio.create_task(stop.wait()), asyncio.create_task(bundle.ready.wait())
    await asyncio.wait({stopped, written, *runs}, return_when=asyncio.FIRST_COMPLETED)
    envoy_run: asyncio.Task[int] | None = None
    if written.done() and not stop.is_set():
        envoy_run = asyncio.create_task(envoy.run())
        reports = [
            asyncio.create_task(_report_envoy(envoy, planned.admin)),
            asyncio.create_task(_report_all((*others, envoy), planned)),
        ]
        await asyncio.wait({stopped, envoy_run, *runs}, return_when=asyncio.FIRST_COMPLETED)
        for report in reports:
            report.cancel()
        if stop.is_set() and envoy.ready.is_set():
            await _drain(planned.admin, drain_s, hurry)
        envoy.stop()
        await envoy_run
    written.cancel()
    hurried = asyncio.create_task(_hurry(hurry, (*others, *beside)))
    for child in (*others, *beside):
        child.stop()
    statuses = await asyncio.gather(*runs)
    await asyncio.gather(*beside_runs)
    for waiting in (stopped, hurried):
        waiting.cancel()
    log.info("everything has ended")
    return 0 if stop.is_set() else max(1, *statuses)


async def _report_envoy(envoy: SupervisedProgram, admin: str) -> None:
    """Report for Envoy, which reports nothing by itself, until cancelled."""
    while True:
        if not envoy.ready.is_set() and not await asyncio.to_thread(why_not_ready, admin):
            envoy.mark_ready()
        await asyncio.sleep(_POLL_S)


async def _report_all(children: Sequence[SupervisedProgram], planned: ServePlan) -> None:
    for child in children:
        await child.ready.wait()
    log.info("ready: clients connect to %s; Envoy's admin interface is %s", ", ".join(planned.listens), planned.admin)
    notify(READY, os.environ)


async def _drain(admin: str, drain_s: float, hurry: asyncio.Event) -> None:
    """Have Envoy close connections after their answers, and its listeners soon; wait until no request runs."""
    if not await asyncio.to_thread(begin_drain, admin):
        return
    log.info(
        "draining: Envoy closes its listeners within %s s, running requests may take up to %g s", _CLOSE_S, drain_s
    )
    clock = asyncio.get_running_loop().time
    ends_at_s = clock() + drain_s
    # Envoy has to be asked: it reports no event
    while clock() < ends_at_s and not hurry.is_set() and await asyncio.to_thread(running_requests, admin) > 0:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)


async def _hurry(hurry: asyncio.Event, children: Sequence[SupervisedProgram]) -> None:
    await hurry.wait()
    for child in children:
        child.stop()

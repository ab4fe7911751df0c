# SPDX-License-Identifier: Apache-2.0
"""``attache init``: a first configuration directory, with comments, for the engines that answer.

Engines are asked for their models and metrics. What they answer may be any text, of any length: answers are bounded,
and a name is written as a quoted string where YAML could read it otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from secrets import token_urlsafe
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.api.addresses import parse_endpoint
from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import load_directory
from extproc.api.engine_connection import EngineConnection, EngineTls
from extproc.cli.common import print_mistakes
from extproc.engines.dialects import ENGINE_TYPES, engine_with_metric
from extproc.engines.engine_responses import UnreadableResponse, parse_model_list
from extproc.feeds.engine_http import ConnectionSettings, EngineCredentials
from extproc.feeds.http_get import BadResponse, ResponseParser, encode_get_request
from extproc.listen_sockets import ListenFailed, try_to_bind
from extproc.scheduling.model_check import quoted_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_USAGE: Final = 2
_FILE: Final = "attache.yaml"
# For all of one answer.
_PATIENCE_S: Final = 5.0
_PIECE: Final = 65_536
_AT_A_TIME: Final = 16
_MODELS_PATH: Final = "/v1/models"
# The types that the names of their metrics show, by the label of an endpoint.
_TYPES: Final = MappingProxyType({label: dialect for label, dialect in ENGINE_TYPES.items() if dialect.prefixes})
_DEFAULT_TYPE: Final = "vllm"
_TYPE_LABEL: Final = "llm-d.ai/engine-type"
# Of one engine; more are named in a message.
_MOST_MODELS: Final = 32
_LONGEST_MODEL: Final = 512
_LONGEST_NAME: Final = 50
# YAML reads such a text as itself, but for words such as "null", "yes" and "1e3".
_PLAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9._/-]{5,}")
_LIMIT: Final = re.compile(r"([1-9][0-9]{0,8})/(second|minute|hour|day|month)")
_PREFIX: Final = "sk-"
_RANDOM_BYTES: Final = 32


class Ports(msgspec.Struct, frozen=True):
    """``listen``: for clients. ``admin``: Envoy's. ``extproc``: for Envoy's calls. ``metrics``: extproc's page."""

    listen: int = 8080
    admin: int = 9901
    extproc: int = 9002
    metrics: int = 9003


class Engine(msgspec.Struct, frozen=True):
    """What was found at an address. ``type``: see ``_TYPES``; empty if its metrics are those of no known engine.
    ``problem``: why it cannot be written.
    """

    address: str
    models: tuple[str, ...] = ()
    type: str = ""
    problem: str = ""


class Key(msgspec.Struct, frozen=True):
    """A caller's key; the configuration has only its digest."""

    name: str
    tenant: str
    key: str


class GatewayPlan(msgspec.Struct, frozen=True):
    """What a directory is to have. ``limit``: requests and unit of time, of each tenant. ``tls``: files of a
    certificate and its key. ``connection``: to all engines.
    """

    engines: tuple[Engine, ...]
    ports: Ports = Ports()
    keys: tuple[Key, ...] = ()
    limit: tuple[int, str] | None = None
    tls: tuple[str, str] | None = None
    connection: EngineConnection = EngineConnection()


def parser(prog: str = "attache init") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=(
            "Write a new configuration directory with comments. Engines are asked for their models; engines with the"
            " same model share a ModelServer."
        ),
        epilog="Exit status: 0 if the directory is written, 2 if not. No file is overwritten.",
        allow_abbrev=False,
    )
    add = made.add_argument
    add("directory", type=Path, metavar="DIR", help="the directory, which is new or empty")
    add(
        "--engine", action="append", default=[], metavar="ADDRESS", help="IP:PORT or NAME:PORT of an engine; repeatable"
    )
    add(
        "--engine-ca", type=Path, metavar="FILE", help="engines serve TLS: the authorities of their certificates in PEM"
    )
    add("--engine-server-name", metavar="NAME", help="the name in these certificates, where addresses are IP:PORT")
    add("--engine-key-file", type=Path, metavar="FILE", help="a file with the API key that engines require")
    add("--key", action="append", default=[], metavar="NAME", help="make an API key, and print it once; repeatable")
    add(
        "--tenant",
        action="append",
        default=[],
        metavar="NAME",
        help="the tenant of the first --key, the second, ... (default: the key's name); repeatable",
    )
    add("--limit", metavar="N/UNIT", help="requests of each tenant, such as 60/minute; without --key of all clients")
    add("--tls", nargs=2, type=Path, metavar=("CERT", "KEY"), help="serve TLS with a certificate and key in PEM files")
    add(
        "--port",
        type=int,
        metavar="N",
        help="clients connect to N, and the next three ports are used inside (default: 8080, or the first free ones)",
    )
    return made


def main(words: list[str], prog: str = "attache init") -> int:
    """Exit status: 0 if the directory is written, 2 if not."""
    made = parser(prog)
    options = made.parse_args(words)
    try:
        plan = _plan(options)
        text = document(plan)
        _write(options.directory, text)
    except ConfigInvalid as error:
        return print_mistakes(error)
    except (OSError, ValueError, ListenFailed) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return _USAGE
    for one in plan.engines:
        if one.problem:
            print(f"engine {one.address}: {one.problem}", file=sys.stderr)
    for key in plan.keys:
        print(f"key of {key.name}, shown only now: {key.key}")
    has_models = any(one.models for one in plan.engines)
    then = ";" if has_models else ", which serves no model yet: its last lines say what to write; then"
    print(f"wrote {options.directory / _FILE}{then} serve it with:")
    print(f"  {serve_command(options.directory, plan.ports)}")
    return 0


def serve_command(directory: Path, ports: Ports) -> str:
    """What serves the directory; the address of extproc's page is in no file."""
    metrics = "" if ports.metrics == Ports().metrics else f" --metrics 127.0.0.1:{ports.metrics}"
    return f"attache serve --config {shlex.quote(str(directory))}{metrics}"


def _plan(options: argparse.Namespace) -> GatewayPlan:
    """Ask the engines. Raises ValueError, OSError or ListenFailed for options that cannot be met."""
    directory: Path = options.directory
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} exists and is not empty; name a new directory")
    if len(options.tenant) > len(options.key):
        raise ValueError("there are more --tenant than --key; write a --key for each")
    limit = None if options.limit is None else _LIMIT.fullmatch(options.limit)
    if options.limit is not None and limit is None:
        raise ValueError(f"--limit {options.limit!a} is no limit; write one such as 60/minute")
    for file in options.tls or ():
        if not file.is_file():
            raise ValueError(f"--tls: there is no file {file}; put the certificate and its key there in PEM")
    connection = _connection(options)
    addresses = list(dict.fromkeys(_address(one, connection) for one in options.engine))
    settings = _settings(connection)
    ports = free_ports() if options.port is None else _ports_from(options.port)
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        engines = tuple(pool.map(partial(inspect_engine, settings=settings), addresses))
    keys = tuple(
        Key(name, tenant or name, _PREFIX + token_urlsafe(_RANDOM_BYTES))
        for name, tenant in zip_longest(options.key, options.tenant)
    )
    return GatewayPlan(
        engines,
        ports,
        keys,
        None if limit is None else (int(limit[1]), limit[2]),
        None if options.tls is None else (str(options.tls[0].resolve()), str(options.tls[1].resolve())),
        connection,
    )


def _connection(options: argparse.Namespace) -> EngineConnection:
    """Raises ValueError."""
    ca, name, key = options.engine_ca, options.engine_server_name, options.engine_key_file
    if ca is None and name is not None:
        raise ValueError("--engine-server-name is for engines that serve TLS; write --engine-ca FILE, too")
    tls = None if ca is None else EngineTls(ca_file=str(ca.resolve()), server_name=name)
    return EngineConnection(tls=tls, api_key_file=None if key is None else str(key.resolve()))


def _settings(connection: EngineConnection) -> ConnectionSettings:
    """Raises ValueError."""
    access = EngineCredentials(os.environ, time.monotonic)  # noqa: TID251 - the clock of the shell
    try:
        settings = asyncio.run(access.settings_for_service(connection))
    except (OSError, ValueError) as error:
        raise ValueError(f"--engine-ca or --engine-key-file cannot be used: {error}") from error
    return msgspec.structs.replace(settings, server_name=connection.server_name_of(None))


def _address(text: str, connection: EngineConnection) -> str:
    """Raises ValueError."""
    scheme, _, rest = text.rpartition("://")
    address = rest.rstrip("/") if scheme in {"http", "https"} else text
    place = parse_endpoint(address)
    if scheme == "https" and connection.tls is None:
        raise ValueError(f"--engine {text}: name the authorities that sign its certificate with --engine-ca FILE")
    if scheme == "http" and connection.tls is not None:
        raise ValueError(f"--engine {text}: with --engine-ca, all engines serve TLS; write a directory for the others")
    if connection.tls is not None and place.is_ip and not connection.server_name_of(None):
        raise ValueError(f"--engine {text}: write the name in its certificate with --engine-server-name NAME")
    return address


def free_ports() -> Ports:
    """The usual ports; if one is in use, the first four in a row from 8090 on that are free. Raises ValueError."""
    for ports in (Ports(), *(_in_a_row(first) for first in range(8090, 9000, 10))):
        try:
            _check_free(ports)
        except ListenFailed:
            continue
        return ports
    raise ValueError("no four free ports in a row were found; name the first of four with --port")


def _ports_from(first: int) -> Ports:
    """Raises ValueError or ListenFailed."""
    if not 1 <= first <= 65_532:
        raise ValueError(f"--port {first}: write a number from 1 to 65532")
    ports = _in_a_row(first)
    _check_free(ports)
    return ports


def _in_a_row(first: int) -> Ports:
    return Ports(*range(first, first + 4))


def _check_free(ports: Ports) -> None:
    for port in msgspec.structs.astuple(ports):
        try_to_bind(f"127.0.0.1:{port}", "--port")


def inspect_engine(address: str, settings: ConnectionSettings) -> Engine:
    """What the engine at ``address`` is and serves."""
    try:
        listed = parse_model_list(_get(address, _MODELS_PATH, settings)).base
    except (OSError, BadResponse, UnreadableResponse) as error:
        is_away = isinstance(error, ConnectionRefusedError | TimeoutError)
        advice = "start it" if is_away else "see whether it needs --engine-ca or --engine-key-file"
        problem = f"does not list its models at {_MODELS_PATH}: {error}; {advice}, then add it to {_FILE}"
        return Engine(address, problem=problem)
    usable = sorted(one for one in listed if one.isprintable() and 0 < len(one) <= _LONGEST_MODEL)
    models, others = tuple(usable[:_MOST_MODELS]), {*usable[_MOST_MODELS:], *(listed - set(usable))}
    problem = f"these models are left out: {quoted_names(others)}; add those that clients need" if others else ""
    return Engine(address, models, _type_at(address, settings), problem if listed else "lists no model; load one")


def _type_at(address: str, settings: ConnectionSettings) -> str:
    """By the first name of its metrics that a known engine has; empty if there is none."""
    for path in dict.fromkeys(one.metrics_path for one in _TYPES.values()):
        try:
            page = _get(address, path, settings)
        except (OSError, BadResponse):
            continue
        named = filter(None, (engine_with_metric(line.decode(errors="replace")) for line in page.splitlines()))
        found = (path, next(named, ""))
        for label, dialect in _TYPES.items():
            if (dialect.metrics_path, dialect.name) == found:
                return label
    return ""


def _get(address: str, path: str, settings: ConnectionSettings) -> bytes:
    """The body of a 200; redirects are failures. Raises OSError or BadResponse."""
    host, port = parse_endpoint(address)[:2]
    ends_at_s = time.monotonic() + _PATIENCE_S  # noqa: TID251 - the clock of the shell
    answer = ResponseParser()
    with ExitStack() as opened:
        connection = opened.enter_context(socket.create_connection((host, port), _PATIENCE_S))
        if settings.tls is not None:
            name = settings.server_name or host
            connection = opened.enter_context(settings.tls.wrap_socket(connection, server_hostname=name))
        connection.sendall(encode_get_request(host, port, path, settings.authorization))
        while (left_s := ends_at_s - time.monotonic()) > 0:  # noqa: TID251 - the clock of the shell
            connection.settimeout(left_s)
            piece = connection.recv(_PIECE)
            if not piece:
                raise BadResponse("the connection ended before the answer did")
            if (body := answer.receive(piece)) is not None:
                return body
    raise BadResponse(f"the answer took longer than {_PATIENCE_S:g} s")


def _write(directory: Path, text: str) -> None:
    """Only what can be loaded is written. Raises ConfigInvalid or OSError."""
    with TemporaryDirectory() as tried:
        (Path(tried) / _FILE).write_text(text)
        load_directory(Path(tried))
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / _FILE).open("x") as file:
        file.write(text)


def yaml_scalar(text: str) -> str:
    """``text``, which prints, as YAML."""
    return text if _PLAIN.fullmatch(text) else _quoted(text)


def _quoted(text: str | None) -> str:
    return json.dumps(text, ensure_ascii=False)


def document(plan: GatewayPlan) -> str:
    """The file."""
    by_model: dict[str, list[Engine]] = {}
    for engine in plan.engines:
        for model in engine.models:
            by_model.setdefault(model, []).append(engine)
    absent = [one.address for one in plan.engines if not one.models]
    parts = [_gateway(plan)]
    for name, (model, engines) in zip(_names(by_model), by_model.items(), strict=True):
        parts += [_server(name, model, engines, plan.connection), _route(name, model, plan)]
    if absent or not by_model:
        example = [Engine(address) for address in absent] or [Engine("127.0.0.1:8000")]
        objects = [_server("example", "MODEL", example, plan.connection), _route("example", "MODEL", plan)]
        parts.append(_commented(objects, absent))
    return "---\n".join(parts)


def _commented(parts: Iterable[str], absent: Sequence[str]) -> str:
    who = f"These engines listed no model: {', '.join(absent)}." if absent else "No engine was named."
    lines = "---\n".join(parts).splitlines()
    head = (
        f"# {who}\n# Remove the '#' before these lines, and write the name that the engines list in place of MODEL.\n"
    )
    return head + "".join(f"# {line}\n" for line in lines)


def _names(models: Iterable[str]) -> Iterator[str]:
    """Of objects, each another one: the last part of the model's name."""
    taken: set[str] = set()
    for model in models:
        last = re.sub(r"[^a-z0-9]+", "-", model.lower().rpartition("/")[2])[:_LONGEST_NAME].strip("-") or "model"
        name = next(
            one for one in (last, *(f"{last}-{number}" for number in range(2, len(taken) + 3))) if one not in taken
        )
        taken.add(name)
        yield name


def _head(kind: str, name: str) -> str:
    return f"apiVersion: attache.dev/v1alpha1\nkind: {kind}\nmetadata: {{name: {json.dumps(name)}}}\nspec:\n"


def _gateway(plan: GatewayPlan) -> str:
    listen = f"127.0.0.1:{plan.ports.listen}"
    lines = [
        "# How Envoy listens, authenticates callers and calls extproc.\n",
        _head("GatewayConfig", "gateway"),
    ]
    if plan.tls is None:
        lines.append(
            f"  listen: {listen}    # clients connect here; 0.0.0.0 in place of 127.0.0.1: from other machines\n"
        )
    else:
        cert, key = map(_quoted, plan.tls)
        lines += [
            "  listeners:    # clients connect here\n",
            "    - name: https\n",
            f"      address: {listen}    # 0.0.0.0 in place of 127.0.0.1: from other machines\n",
            "      tls:\n",
            "        certificates:    # PEM; a renewed pair is used without a restart\n",
            f"          - certFile: {cert}\n",
            f"            keyFile: {key}\n",
        ]
    lines += [
        f"  admin: 127.0.0.1:{plan.ports.admin}    # Envoy's admin interface, for this machine only\n",
        f"  extproc: 127.0.0.1:{plan.ports.extproc}    # where Envoy calls extproc\n",
    ]
    if plan.keys:
        lines.append(
            "  authentication:\n    apiKeys:    # clients send 'authorization: Bearer KEY'; here are only digests\n"
        )
    for one in plan.keys:
        lines += [
            f"      - name: {json.dumps(one.name)}\n",
            f"        tenant: {_quoted(one.tenant)}    # limits and fair queues are by tenant\n",
            f"        keySHA256: {json.dumps(sha256(one.key.encode()).hexdigest())}\n",
        ]
    return "".join(lines)


def _server(name: str, model: str, engines: Sequence[Engine], connection: EngineConnection) -> str:
    engine = _TYPES[next((one.type for one in engines if one.type), _DEFAULT_TYPE)].name
    usual = next(label for label, dialect in _TYPES.items() if dialect.name == engine)
    lines = [
        "# The engines that serve one model.\n",
        _head("ModelServer", name),
        f"  model: {yaml_scalar(model)}    # the name that the engines list\n",
        f"  engine: {engine}    # the server program, which determines the names of metrics\n",
        "  endpoints:    # IP:PORT or NAME:PORT of each engine\n",
    ]
    for one in engines:
        lines.append(f"    - address: {json.dumps(one.address)}\n")
        if one.type not in {"", usual}:
            lines.append(f"      labels: {{{_TYPE_LABEL}: {one.type}}}    # another program than the others'\n")
    if connection.references_files_or_variables:
        lines.append("  connection:    # how Envoy and extproc call them\n")
    if connection.tls is not None:
        lines += ["    tls:\n", f"      caFile: {_quoted(connection.tls.ca_file)}    # who signs their certificates\n"]
        if connection.tls.server_name is not None:
            lines.append(f"      serverName: {_quoted(connection.tls.server_name)}    # the name in these\n")
    if connection.api_key_file is not None:
        lines.append(f"    apiKeyFile: {_quoted(connection.api_key_file)}    # the key that they require\n")
    return "".join(lines)


def _route(name: str, model: str, plan: GatewayPlan) -> str:
    lines = [
        "# The name that clients ask for, and who serves it.\n",
        _head("ModelRoute", name),
        f"  modelName: {yaml_scalar(model)}    # in the field 'model' of requests; may be another name\n",
        f"  rules:\n    - targetModels: [{{modelServerName: {json.dumps(name)}}}]\n",
    ]
    if plan.limit is not None:
        # without keys, nothing says which tenant a client is of
        per = "Tenant" if plan.keys else "Route"
        requests, unit = plan.limit
        lines.append(f"  rateLimits:    # beyond it: 429\n    - {{per: {per}, unit: {unit}, requests: {requests}}}\n")
    return "".join(lines)

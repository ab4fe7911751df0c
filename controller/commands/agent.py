# SPDX-License-Identifier: Apache-2.0
"""``attache agent``: the sidecar of an engine that reports its readiness, drains it and loads its adapters."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import signal
import sys
import time
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from extproc.api.error_hints import address_hint
from extproc.engines.dialects import DIALECTS
from extproc.logs import add_log_options, start_logging

if TYPE_CHECKING:
    from controller.agents.runtime.settings import AgentSettings

_HIGHEST_PORT: Final = 65535


def parser(prog: str = "attache agent") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=(
            "Run in an engine's pod: report when the model really answers, warm it up, drain it before it ends,"
            " load and unload LoRA adapters or models of a V2 repository, and show its metrics under one set of names."
        ),
        epilog=(
            "Exit status: 0 after SIGTERM, once the engine is drained; 2 for a mistake in the options. 'drain' asks a"
            " running agent to drain its engine, and ends when it is drained: 1 if the agent does not answer."
        ),
    )
    add = made.add_argument
    add("action", nargs="?", choices=["serve", "drain"], default="serve", help="default: %(default)s")
    add("--engine", metavar="URL", default="http://127.0.0.1:8000", help="default: %(default)s")
    add("--dialect", choices=sorted(DIALECTS), default="vLLM", help="which kind of engine it is; default: %(default)s")
    add(
        "--listen",
        type=_listen,
        metavar="ADDRESS",
        default="0.0.0.0:9000",
        help="IP:PORT; default: %(default)s",
    )
    add("--agent", metavar="URL", default="http://127.0.0.1:9000", help="for 'drain'; default: %(default)s")
    add("--model", metavar="NAME", default="", help="the model to ask; default: the first that the engine lists")
    add("--engine-metrics", metavar="URL", help="default: where engines of its kind have them")
    add("--engine-key-file", type=Path, metavar="FILE", help="holds the engine's API key")
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="calls that change something need this bearer token; default: none is needed",
    )
    _add_health(made)
    _add_adapters(made)
    _add_batching(made)
    add_log_options(made)
    return made


def _add_health(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group("readiness").add_argument
    add("--probe-interval", type=_above_0, metavar="SECONDS", default=2.0, help="default: %(default)s")
    add("--probe-timeout", type=_above_0, metavar="SECONDS", default=2.0, help="default: %(default)s")
    add(
        "--probe-failures",
        type=_whole,
        metavar="N",
        default=3,
        help="not ready after so many failed probes in a row; default: %(default)s",
    )
    add(
        "--dead-after",
        type=_seconds,
        metavar="SECONDS",
        default=120.0,
        help="/live fails after so long without a good answer; default: %(default)s",
    )
    add(
        "--stalled-after",
        type=_seconds,
        metavar="SECONDS",
        default=120.0,
        help="not ready after so long in which requests run and nothing is computed; default: %(default)s",
    )
    add(
        "--probe-request",
        type=Path,
        metavar="FILE",
        help='the request that shows that the model answers, for V2 servers: JSON {"path": ..., "body": {...}}',
    )
    add(
        "--disaggregated",
        action="store_true",
        help="the engine is one of prefill and decode: it is asked in a way that needs no other engine",
    )
    add("--warm-up", type=_count, metavar="N", default=0, help="rounds of the prompts below; default: %(default)s")
    add(
        "--warm-up-tokens",
        type=_lengths,
        metavar="N[,N...]",
        default=(16, 512, 2048),
        help="rough lengths of the prompts in tokens; default: 16,512,2048",
    )
    add("--warm-up-prompts", type=Path, metavar="FILE", help="further prompts, one a line")
    add("--warm-up-timeout", type=_seconds, metavar="SECONDS", default=300.0, help="default: %(default)s")
    add = made.add_argument_group("drain").add_argument
    add(
        "--drain-timeout",
        type=_seconds,
        metavar="SECONDS",
        default=600.0,
        help="the grace; the pod's terminationGracePeriodSeconds has to be longer; default: %(default)s",
    )
    add(
        "--settle",
        type=_seconds,
        metavar="SECONDS",
        default=5.0,
        help="the shortest drain, so that gateways notice it; default: %(default)s",
    )


def _add_adapters(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group("adapters").add_argument
    add(
        "--adapters",
        type=Path,
        metavar="FILE",
        help="those to load, or models of a V2 server:"
        ' JSON {NAME: {"uri": URI, "pinned": false, "memory": BYTES, "format": FORMAT}}; changes are followed',
    )
    add(
        "--max-adapters",
        type=_count,
        metavar="N",
        default=0,
        help="the most adapters that the engine holds; default: from its metrics or refusals",
    )
    add(
        "--max-memory",
        type=_count,
        metavar="BYTES",
        default=0,
        help="what all models that the engine holds may take together, as the file has it; default: any",
    )
    add(
        "--idle-unload",
        type=_seconds,
        metavar="SECONDS",
        default=0.0,
        help="unload what is not pinned and was not used for so long; default: never",
    )
    add(
        "--keep-adapter",
        type=_seconds,
        metavar="SECONDS",
        default=2.0,
        help="an adapter stays at least so long after it was loaded or used; default: %(default)s",
    )
    add(
        "--weights-cache",
        type=Path,
        metavar="DIR",
        default=Path("/var/cache/attache"),
        help="where adapters are downloaded to; default: %(default)s",
    )
    add(
        "--link-dir",
        type=Path,
        metavar="DIR",
        help="where they appear by name: the model repository of a V2 server; default: 'adapters' in the cache",
    )
    add(
        "--allow-path",
        type=Path,
        metavar="DIR",
        action="append",
        default=[],
        help="local adapters may be below it; may be repeated; default: the cache",
    )
    add(
        "--allow-uri",
        type=_prefix,
        metavar="PREFIX",
        action="append",
        default=[],
        help="URIs in calls begin with it; may be repeated; default: any URI. The file may have any",
    )
    add(
        "--declared-only",
        action="store_true",
        help="calls load only adapters that the file declares, from the declared source",
    )
    add("--download-timeout", type=_seconds, metavar="SECONDS", default=1800.0, help="default: %(default)s")
    add("--load-timeout", type=_seconds, metavar="SECONDS", default=120.0, help="of the engine; default: %(default)s")


def _add_batching(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group("batching").add_argument
    add(
        "--batch-listen",
        type=_listen,
        metavar="ADDRESS",
        help="IP:PORT; requests that come there go to the engine, and those of V1 and V2 for tensors are joined into"
        " one call",
    )
    add(
        "--batch-size",
        type=_whole,
        metavar="N",
        default=32,
        help="the most instances, or rows of tensors, of a call that joins several; default: %(default)s",
    )
    add(
        "--batch-delay",
        type=_seconds,
        metavar="SECONDS",
        default=0.005,
        help="how long a request waits for others while the engine computes; default: %(default)s",
    )


def main(words: list[str], prog: str) -> int:
    """Exit status: see the parser's epilogue."""
    made = parser(prog)
    options = made.parse_args(words)
    if options.action == "drain":
        return _drain(options.agent)
    from controller.agents.runtime.settings import parse_settings  # noqa: PLC0415 - not for 'drain'

    try:
        settings = parse_settings(options)
    except (OSError, ValueError) as error:
        made.error(str(error))
    start_logging(options)
    try:
        asyncio.run(_run(settings, *options.listen))
    except OSError as error:
        places = (f"{host}:{port}" for host, port in filter(None, (options.listen, options.batch_listen)))
        print(f"{' or '.join(places)} cannot be listened on: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


async def _run(settings: AgentSettings, host: str, port: int) -> None:
    # the server takes a third of a second to import: not for --help, nor for 'drain'
    from controller.agents.runtime.adapter_files import DownloaderProcess  # noqa: PLC0415
    from controller.agents.runtime.agent import EngineAgent  # noqa: PLC0415
    from controller.agents.runtime.batcher import serve_batcher  # noqa: PLC0415
    from controller.agents.runtime.engine_client import EngineClient  # noqa: PLC0415
    from controller.agents.runtime.server import AgentServer, serve_agent  # noqa: PLC0415

    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, ending.set)
    adapters = settings.adapters
    downloads = DownloaderProcess(adapters.cache, timeout_s=adapters.download_timeout_s, command=adapters.downloader)
    async with EngineClient(settings.engine, settings.dialect, settings.engine_key_file) as engine:
        unix_clock = time.time  # noqa: TID251 - the edge
        agent = EngineAgent(settings, engine, downloads, clock=loop.time, unix_clock=unix_clock)
        async with contextlib.AsyncExitStack() as servers:
            await servers.enter_async_context(serve_agent(AgentServer(agent, loop.time), host, port))
            if settings.batcher is not None:
                running = serve_batcher(settings.batcher, agent.batches, loop.time)
                agent.batcher = await servers.enter_async_context(running)
            await agent.run_until(ending)


def _drain(agent: str) -> int:
    """Send the drain request to the agent, and wait until it is answered."""
    parts = urlsplit(agent)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 9000)
    try:
        connection.request("POST", "/drain")
        answer = connection.getresponse()
        print(answer.read().decode(errors="replace"))
    except (OSError, http.client.HTTPException) as error:
        print(f"{agent} does not answer: {error}", file=sys.stderr)
        return 1
    finally:
        connection.close()
    return 0 if answer.status == 200 else 1


def _listen(text: str) -> tuple[str, int]:
    """As extproc.api.addresses does it, whose import costs each pod 2.4 MB."""
    host, _, port = text.rpartition(":")
    host = "127.0.0.1" if host.lower() == "localhost" else host
    try:
        if not 0 < int(port) <= _HIGHEST_PORT:
            raise ValueError(port)
        return str(ip_address(host.strip("[]"))), int(port)
    except ValueError:
        raise argparse.ArgumentTypeError(address_hint(text, takes_names=False)) from None


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError("write a number of seconds")
    return value


def _above_0(text: str) -> float:
    value = _seconds(text)
    if not value:
        raise argparse.ArgumentTypeError("write a number of seconds above 0")
    return value


def _prefix(text: str) -> str:
    if "://" not in text:
        raise argparse.ArgumentTypeError("write the beginning of a URI, such as s3://bucket/")
    return text


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("write a whole number, 0 or more")
    return value


def _whole(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("write a whole number above 0")
    return value


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(_whole(one) for one in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError("write numbers of tokens, such as 16,512") from None

# SPDX-License-Identifier: Apache-2.0
"""``attache download``: weights from where they are stored to a cache that all pods of a node share."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import ssl
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from extproc.api.addresses import parse_address
from extproc.api.quantities import ByteSize, Duration
from extproc.logs import add_log_options, start_logging

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from controller.agents.downloader.download import DownloadJob
    from controller.agents.downloader.progress import ProgressListener

_DIGEST: Final = re.compile(r"[0-9a-fA-F]{64}")
_TERMINATED: Final = 143
_STATUSES: Final = (
    "Exit status: 0; 2: a mistake in the options, or a library is missing; 3: the source has no such thing; 4: it"
    " refuses the credentials; 5: it cannot be reached, stalls, or changed meanwhile; 6: a wrong checksum, or an"
    " archive that is not safe to unpack; 7: the disk is full; 8: --timeout is over; 9: the cache or the link cannot be"
    " written; 143: stopped by a signal. After 5, 7, 8, 9 and 143 the next run continues."
)


def parser(prog: str = "attache download") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=(
            "Fetch a model's weights to this machine: one download for all processes, resumed after a crash, "
            "verified, in bounded memory. Credentials come from the environment, or from files that NAME_FILE names."
        ),
        epilog=_STATUSES,
    )
    add = made.add_argument
    add("uri", metavar="URI", help="hf://, s3://, gs://, az://, http(s)://, oci://, hdfs://, pvc:// or file://")
    add("--cache", metavar="DIR", type=Path, default=Path("/var/cache/attache"), help="default: %(default)s")
    add(
        "--link",
        metavar="PATH",
        type=Path,
        help="create a link to the weights at this path; a directory gets a link for each file",
    )
    add("--revision", metavar="NAME", default="", help="a branch, tag or commit of hf://, a tag or digest of oci://")
    add("--allow", metavar="GLOB", action="append", default=[], help="only files that match one of these")
    add("--ignore", metavar="GLOB", action="append", default=[], help="no file that matches one of these")
    add(
        "--sha256",
        metavar="FILE=HEX",
        action="append",
        default=[],
        type=_pair,
        help="the checksum that a file must have, in addition to that of its source",
    )
    add("--no-unpack", dest="unpack", action="store_false", help="keep a zip or tar archive as it is")
    add(
        "--hold",
        action="store_true",
        help="keep running after the download until a signal, so that the weights are not evicted",
    )
    _add_limits(made)
    _add_reports(made)
    add_log_options(made)
    return made


def _add_limits(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group("limits").add_argument
    add("--parallel", metavar="N", type=_count, default=4, help="requests at once; default: %(default)s")
    add("--part-size", metavar="SIZE", type=_size, default="64Mi", help="of a request; default: %(default)s")
    add("--timeout", metavar="DURATION", type=_duration, default="12h", help="for all of it; default: %(default)s")
    add("--connect-timeout", metavar="DURATION", type=_duration, default="10s", help="default: %(default)s")
    add(
        "--stall-timeout",
        metavar="DURATION",
        type=_duration,
        default="30s",
        help="send a new request after so long without data, or with less than 1 KiB/s; default: %(default)s",
    )
    add("--attempts", metavar="N", type=_count, default=8, help="in a row without progress; default: %(default)s")
    add("--max-redirects", metavar="N", type=int, default=5, help="default: %(default)s")
    add("--max-unpacked", metavar="SIZE", type=_size, default="4Ti", help="of an archive's files; default: %(default)s")
    add("--keep-free", metavar="SIZE", type=_size, default="1Gi", help="of the cache's disk; default: %(default)s")
    add(
        "--cache-limit",
        metavar="SIZE",
        type=_size,
        help="remove the least recently used weights that no process holds (--hold) to stay below this; default: never",
    )
    add(
        "--no-stale",
        dest="stale",
        action="store_false",
        help="fail if the source is away, even if an old answer is cached",
    )


def _add_reports(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group("where things are, and who is told").add_argument
    add(
        "--claims",
        metavar="DIR",
        type=Path,
        default=Path("/mnt/pvc"),
        help="pvc://NAME/ is DIR/NAME; default: %(default)s",
    )
    add(
        "--files",
        metavar="DIR",
        type=Path,
        default=Path("/"),
        help="file:// may only name paths below it; default: %(default)s",
    )
    add(
        "--ca-file",
        metavar="FILE",
        action="append",
        default=[],
        help="certificate authorities in addition to the machine's",
    )
    add("--metrics", metavar="ADDRESS", help="serve /metrics and /readyz at ip:port")
    add(
        "--progress",
        metavar="FILE",
        help="keep a JSON document of the progress there; -: a line of JSON for each change",
    )
    add(
        "--pod-condition",
        action="store_true",
        help="report in our pod's status (POD_NAME, POD_NAMESPACE): attache.dev/WeightsReady",
    )


def main(words: list[str], prog: str) -> int:
    """Run the command; returns the exit status."""
    made = parser(prog)
    options = made.parse_args(words)
    # half a second to import: not for --help
    from controller.agents.downloader.core.errors import DownloadError  # noqa: PLC0415

    start_logging(options)
    for noisy in ("httpx", "azure", "botocore", "urllib3"):  # they log URLs, which are signed
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        if options.metrics:
            parse_address(options.metrics)
        return asyncio.run(_run(options, _job(options)))
    except ValueError as error:
        made.error(str(error))
    except DownloadError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130


def _job(options: argparse.Namespace) -> DownloadJob:
    from controller.agents.downloader.archives import ArchiveLimits  # noqa: PLC0415
    from controller.agents.downloader.core import uri  # noqa: PLC0415
    from controller.agents.downloader.core.fetch_plan import FileSelection, RetryPolicy  # noqa: PLC0415
    from controller.agents.downloader.download import CacheFillSettings, DownloadJob  # noqa: PLC0415
    from controller.agents.downloader.fetch import FetchSettings  # noqa: PLC0415
    from controller.agents.downloader.transfer import Timeouts  # noqa: PLC0415

    wanted = FileSelection(
        uri.parse_uri(options.uri),
        revision=options.revision,
        allow=tuple(options.allow),
        ignore=tuple(options.ignore),
        sha256=tuple(options.sha256),
        unpack=options.unpack,
    )
    rules = CacheFillSettings(
        sizes=FetchSettings(parallel=options.parallel, part=options.part_size),
        retry=RetryPolicy(attempts=options.attempts),
        limits=ArchiveLimits(size=options.max_unpacked),
        keep_free=options.keep_free,
        cache_limit=options.cache_limit,
    )
    timeouts = Timeouts(options.connect_timeout, options.stall_timeout, redirects=options.max_redirects)
    return DownloadJob(
        wanted,
        uri.redact_uri(options.uri),
        options.cache,
        link=options.link,
        rules=rules,
        timeouts=timeouts,
        timeout_s=options.timeout,
        allow_stale=options.stale,
        claims=options.claims,
        files=options.files,
        ca_files=_authorities(options.ca_file),
    )


def _authorities(files: Sequence[str]) -> tuple[str, ...]:
    """The files and that of the environment; raises ValueError for one that holds no certificates."""
    bundle = os.environ.get("AWS_CA_BUNDLE")
    found = (*files, *([bundle] if bundle else ()))
    for file in found:
        try:
            ssl.create_default_context(cafile=file)
        except OSError as error:
            why = "no PEM in it" if isinstance(error, ssl.SSLError) else error.strerror
            raise ValueError(f"'{file}' has no certificates that can be read ({why}); write a PEM file") from None
    return found


async def _run(options: argparse.Namespace, job: DownloadJob) -> int:
    from controller.agents.downloader.download import download  # noqa: PLC0415
    from controller.agents.downloader.environment import EnvironmentReader  # noqa: PLC0415
    from controller.agents.downloader.progress import ProgressTracker  # noqa: PLC0415

    stopped = asyncio.Event()
    async with _listeners(options) as (listeners, ready):
        work = asyncio.create_task(download(job, EnvironmentReader(), ProgressTracker(job.shown_uri, listeners)))
        loop = asyncio.get_running_loop()

        def stop() -> None:
            stopped.set()
            work.cancel()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        await asyncio.wait({work})
        if work.cancelled():
            return _TERMINATED
        done = work.result()
        ready()
        print(job.link or done.path, flush=True)  # --hold: a reader gets the line before the buffer is full
        if options.hold:
            await stopped.wait()
        if done.use is not None:
            done.use.release()
    return 0


@contextlib.asynccontextmanager
async def _listeners(options: argparse.Namespace) -> AsyncIterator[tuple[list[ProgressListener], Callable[[], None]]]:
    """The listeners of progress, and a function to call once the weights are complete."""
    from controller.agents.downloader.progress import ProgressFile, ProgressLines, ProgressMetrics  # noqa: PLC0415

    ready = asyncio.Event()
    found: list[ProgressListener] = []
    if options.progress:
        found.append(ProgressLines() if options.progress == "-" else ProgressFile(Path(options.progress)))
    async with contextlib.AsyncExitStack() as stack:
        if options.metrics:
            from controller.kube.metrics_and_health import serve_pages  # noqa: PLC0415

            metrics = ProgressMetrics()
            found.append(metrics)
            await stack.enter_async_context(serve_pages(options.metrics, metrics.registry, ready.is_set))
        if options.pod_condition:
            await _report_to_pod(stack, found)
        yield found, ready.set


async def _report_to_pod(stack: contextlib.AsyncExitStack, found: list[ProgressListener]) -> None:
    from controller.agents.downloader.progress import PodConditionWriter  # noqa: PLC0415
    from controller.kube.client import connect  # noqa: PLC0415
    from controller.kube.cluster_access import find_access  # noqa: PLC0415
    from controller.kube.errors import ClusterAccessInvalid  # noqa: PLC0415

    try:
        access = find_access()
    except ClusterAccessInvalid as error:
        logging.getLogger("attache.download").warning("the pod's condition is not written: %s", error)
        return
    client = await stack.enter_async_context(connect(access, manager="attache-download", timeout_s=5.0))
    name = os.environ.get("POD_NAME") or socket.gethostname()
    condition = PodConditionWriter(client, os.environ.get("POD_NAMESPACE") or access.namespace, name)
    found.append(condition)
    await stack.enter_async_context(condition.writing_in_background())


def _pair(text: str) -> tuple[str, str]:
    file, _, digest = text.rpartition("=")
    if not file or not _DIGEST.fullmatch(digest):
        raise argparse.ArgumentTypeError("write FILE=HEX with 64 hexadecimal digits")
    return file, digest.lower()


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 256:
        raise argparse.ArgumentTypeError("a number from 1 to 256")
    return int(text)


def _size(text: str) -> int:
    try:
        return int(ByteSize(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _duration(text: str) -> float:
    try:
        found = float(Duration(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if found <= 0:
        raise argparse.ArgumentTypeError("longer than nothing")
    return found

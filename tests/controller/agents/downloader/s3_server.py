# SPDX-License-Identifier: Apache-2.0
"""A server that speaks S3: moto's, or versitygw if ``ATTACHE_VERSITYGW`` names its binary.

moto holds an object in memory whole for each ranged answer and checks no signatures; versitygw does neither.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config

from bench.stack.processes import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

_ACCESS = "access"
_SECRET = "secret-of-tests"  # noqa: S105
VERSITYGW = os.environ.get("ATTACHE_VERSITYGW", "")


class S3Server:
    """``environment``: what a client needs, but for the endpoint. ``folder``: of buckets, with versitygw."""

    def __init__(self, host: str, folder: Path | None) -> None:
        self.host = host
        self.folder = folder
        self.environment = {
            "AWS_ACCESS_KEY_ID": _ACCESS,
            "AWS_SECRET_ACCESS_KEY": _SECRET,
            "AWS_ENDPOINT_URL_S3": f"http://{host}",
        }
        self.client: Any = boto3.session.Session(_ACCESS, _SECRET, region_name="us-east-1").client(
            "s3", endpoint_url=f"http://{host}", config=Config(s3={"addressing_style": "path"})
        )

    def put(self, bucket: str, key: str, content: bytes, **more: Any) -> None:  # noqa: ANN401 - as boto3 has it
        """Store an object; makes the bucket."""
        self.make(bucket)
        self.client.put_object(Bucket=bucket, Key=key, Body=content, **more)

    def make(self, bucket: str) -> None:
        """Make a bucket, if it is not there."""
        with contextlib.suppress(
            self.client.exceptions.BucketAlreadyOwnedByYou, self.client.exceptions.BucketAlreadyExists
        ):
            self.client.create_bucket(Bucket=bucket)


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    """One of the two on a free port."""
    if VERSITYGW:
        with _versitygw() as server:
            yield server
        return
    from moto.server import ThreadedMotoServer  # noqa: PLC0415 - a second to import

    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    try:
        host, port = moto.get_host_and_port()
        yield S3Server(f"{host}:{port}", None)
    finally:
        moto.stop()


@contextlib.contextmanager
def _versitygw() -> Iterator[S3Server]:
    with tempfile.TemporaryDirectory() as folder:
        host = f"127.0.0.1:{free_ports(1)[0]}"
        buckets = Path(folder) / "buckets"
        buckets.mkdir()
        words = [VERSITYGW, "--access", _ACCESS, "--secret", _SECRET, "--port", host, "posix", "--nometa", str(buckets)]
        running = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait_for(host)
            yield S3Server(host, buckets)
        finally:
            running.terminate()
            running.wait(10)


def _wait_for(host: str) -> None:
    name, _, port = host.rpartition(":")
    for _ in range(200):
        with contextlib.suppress(OSError):
            socket.create_connection((name, int(port)), 1).close()
            return
        time.sleep(0.05)
    raise TimeoutError(host)

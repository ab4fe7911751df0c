# SPDX-License-Identifier: Apache-2.0
"""The certificate of the gRPC port follows its files, and a bad one never takes the place of a good one."""

from __future__ import annotations

import asyncio
import datetime as dt
from typing import TYPE_CHECKING

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from bench.cluster.certificates import Authority
from extproc.listen_sockets import listen
from extproc.metrics.request_metrics import Metrics, TlsMetrics
from extproc.rpc.server import RpcServer
from extproc.streams.health import HealthService
from extproc.streams.tls import CertificateInvalid, ReloadingCertificate, TlsFiles, TlsRequirements, self_signed
from tests.extproc.runtime.test_app import free_port
from tests.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

NOW = dt.datetime.now(dt.UTC)
REQUEST = health_pb2.HealthCheckRequest()


def issue(files: TlsFiles, authority: Authority, *, name: str = "localhost") -> None:
    """Write a pair, each file whole."""
    certificate, key = authority.issue(name, names=[name])
    for path, text in ((files.certificate, certificate), (files.key, key)):
        draft = path.with_suffix(".new")
        draft.write_text(text)
        draft.replace(path)


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key")


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def followed(files: TlsFiles | None, registry: CollectorRegistry) -> ReloadingCertificate:
    return ReloadingCertificate(files, TlsMetrics(registry), lambda: NOW)


def loads(registry: CollectorRegistry, result: str) -> float:
    return registry.get_sample_value("attache_tls_certificate_loads_total", {"result": result}) or 0.0


async def answers(port: int, authority: Authority) -> bool:
    """Whether a new connection that trusts ``authority`` alone gets an answer."""
    trust = grpc.ssl_channel_credentials(authority.certificate.encode())
    async with grpc.aio.secure_channel(f"localhost:{port}", trust) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(REQUEST, timeout=5)
        except grpc.aio.AioRpcError:
            return False
    return True


async def test_new_connections_get_the_new_certificate_and_open_ones_go_on(
    files: TlsFiles, registry: CollectorRegistry
) -> None:
    first, second = Authority(NOW), Authority(NOW)
    issue(files, first)
    one = followed(files, registry)
    port, server = free_port(), RpcServer(HealthService(Metrics(list, lambda: 0.0, lambda: 0.0)).handlers)
    await server.start(listen(f"127.0.0.1:{port}"), one.context)
    try:
        trust = grpc.ssl_channel_credentials(first.certificate.encode())
        async with grpc.aio.secure_channel(f"localhost:{port}", trust) as open_one:
            stub = health_pb2_grpc.HealthStub(open_one)
            await stub.Check(REQUEST, timeout=120)
            issue(files, second)
            one.reload()
            assert await answers(port, second)
            assert not await answers(port, first)
            await stub.Check(REQUEST, timeout=120)
    finally:
        await server.close()
    # threads of the client close the connection that it has refused
    open_ones = asyncio.get_running_loop()._transports  # type: ignore[attr-defined]
    await eventually(lambda: all(one.is_closing() for one in list(open_ones.values())))
    assert loads(registry, "used") == 2


def test_a_pair_that_does_not_fit_is_refused_once_and_the_last_stays(
    files: TlsFiles, registry: CollectorRegistry
) -> None:
    authority = Authority(NOW)
    issue(files, authority)
    one = followed(files, registry)
    key = files.key.read_text()
    issue(files, authority)
    fitting = files.key.read_text()
    files.key.write_text(key)
    for _ in range(3):
        one.reload()
    assert (loads(registry, "used"), loads(registry, "refused")) == (1, 1)
    files.key.write_text(fitting)
    one.reload()
    assert loads(registry, "used") == 2


def test_files_that_are_gone_leave_the_last(files: TlsFiles, registry: CollectorRegistry) -> None:
    issue(files, Authority(NOW))
    one = followed(files, registry)
    files.key.unlink()
    for _ in range(3):
        one.reload()
    assert loads(registry, "refused") == 1


@pytest.mark.parametrize(
    ("certificate", "key", "said"),
    [
        ("", "", r"tls\.crt has no PEM certificate"),
        (None, "nonsense", r"tls\.key has no PEM private key"),
        (None, None, r"in .*tls\.key is not that of the certificate in .*tls\.crt"),
    ],
)
def test_what_cannot_be_used_from_the_start_says_why(
    files: TlsFiles, registry: CollectorRegistry, certificate: str | None, key: str | None, said: str
) -> None:
    issue(files, Authority(NOW))
    if certificate is not None:
        files.certificate.write_text(certificate)
    files.key.write_text(self_signed(NOW).key.decode() if key is None else key)
    with pytest.raises(CertificateInvalid, match=said):
        followed(files, registry)


def test_missing_files_are_named(files: TlsFiles, registry: CollectorRegistry) -> None:
    with pytest.raises(CertificateInvalid, match=r"tls\.crt: No such file"):
        followed(files, registry)


def test_our_own_certificate_is_valid_for_years_and_its_end_is_told(registry: CollectorRegistry) -> None:
    followed(None, registry)
    expires = registry.get_sample_value("attache_tls_certificate_expires_timestamp_seconds")
    found = x509.load_pem_x509_certificate(self_signed(NOW).certificate)
    assert expires == found.not_valid_after_utc.timestamp()
    assert found.not_valid_after_utc - NOW > dt.timedelta(days=3000)


def test_suites_of_tls_12_can_be_chosen_and_those_that_are_none_are_told() -> None:
    chosen = TlsRequirements(ciphers="ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES256-GCM-SHA384").context()
    names = {one["name"] for one in chosen.get_ciphers() if one["protocol"] == "TLSv1.2"}
    assert names == {"ECDHE-ECDSA-AES128-GCM-SHA256", "ECDHE-RSA-AES256-GCM-SHA384"}
    with pytest.raises(ValueError, match="OpenSSL has no cipher suite of 'NONE-AT-ALL'"):
        TlsRequirements(ciphers="NONE-AT-ALL").context()

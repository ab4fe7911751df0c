# SPDX-License-Identifier: Apache-2.0
"""KEDA's side of its protocol, with bytes that are written and read by hand: it shares no code with ours."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from bench.stack.processes import free_ports
from controller.autoscaler.export.desired_replicas import DesiredReplicas, DesiredReplicasStore, desired_by_target
from controller.autoscaler.export.keda import KedaScaler, TlsFiles, server_credentials
from controller.autoscaler.export.keda_access import ReadPermissions
from tests.certificates import Authority
from tests.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PATH = "/externalscaler.ExternalScaler/"


def varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def part(number: int, content: bytes) -> bytes:
    """A field with a length: text, or a message."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def reference(namespace: str, **metadata: str) -> bytes:
    """ScaledObjectRef: name 1, namespace 2, scalerMetadata 3, a map of key 1 and value 2."""
    found = part(1, b"some-scaled-object") + part(2, namespace.encode())
    for key, value in metadata.items():
        found += part(3, part(1, key.encode()) + part(2, value.encode()))
    return found


def fields(message: bytes) -> dict[int, Any]:
    """A message's fields by number; of repeated ones the last."""
    found: dict[int, Any] = {}
    place = 0

    def read() -> int:
        nonlocal place
        number = shift = 0
        while True:
            byte = message[place]
            place += 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return number

    while place < len(message):
        key = read()
        if key & 7 == 0:
            found[key >> 3] = read()
        elif key & 7 == 1:
            found[key >> 3] = struct.unpack("<d", message[place : place + 8])[0]
            place += 8
        else:
            length = read()
            found[key >> 3] = message[place : place + length]
            place += length
    return found


@pytest.fixture
def decisions() -> DesiredReplicasStore:
    return DesiredReplicasStore()


@pytest.fixture
async def channel(decisions: DesiredReplicasStore) -> AsyncIterator[grpc.aio.Channel]:
    scaler = KedaScaler(decisions)
    port = await scaler.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as connected:
        yield connected
    await scaler.stop(0)


async def call(channel: grpc.aio.Channel, method: str, message: bytes) -> dict[int, Any]:
    answer = await channel.unary_unary(PATH + method)(message, timeout=10)
    return fields(answer)


async def refusal(channel: grpc.aio.Channel, method: str, message: bytes) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, method, message)
    return caught.value.code(), caught.value.details() or ""


async def test_the_metric_is_the_desired_replicas_with_a_target_of_one(
    channel: grpc.aio.Channel, decisions: DesiredReplicasStore
) -> None:
    decisions.set_desired("shop/llama", {"h100": DesiredReplicas(7, is_active=True)})
    named = reference("shop", binding="llama")
    spec = fields((await call(channel, "GetMetricSpec", named))[1])
    assert spec == {1: b"attache-desired-replicas", 2: 1, 3: 1.0}
    asked = part(1, named) + part(2, b"attache-desired-replicas")
    assert fields((await call(channel, "GetMetrics", asked))[1]) == {1: b"attache-desired-replicas", 2: 7, 3: 7.0}
    assert await call(channel, "IsActive", named) == {1: 1}


async def test_each_target_has_its_own(channel: grpc.aio.Channel, decisions: DesiredReplicasStore) -> None:
    decisions.set_desired(
        "shop/llama", {"h100": DesiredReplicas(2, is_active=True), "l40s": DesiredReplicas(0, is_active=False)}
    )
    first, second = (reference("shop", binding="llama", target=name) for name in ("h100", "l40s"))
    assert fields((await call(channel, "GetMetrics", part(1, first)))[1])[2] == 2
    # zero is not written
    assert 2 not in fields((await call(channel, "GetMetrics", part(1, second)))[1])
    assert await call(channel, "IsActive", second) == {}
    code, text = await refusal(channel, "IsActive", reference("shop", binding="llama"))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "h100, l40s" in text


async def test_what_is_not_known_fails_and_is_never_zero(
    channel: grpc.aio.Channel, decisions: DesiredReplicasStore
) -> None:
    named = reference("shop", binding="llama")
    for method, message in (("IsActive", named), ("GetMetrics", part(1, named))):
        assert (await refusal(channel, method, message))[0] is grpc.StatusCode.UNAVAILABLE
    decisions.set_desired("shop/llama", {"h100": DesiredReplicas(2, is_active=True)})
    assert await call(channel, "IsActive", named) == {1: 1}
    decisions.forget("shop/llama")
    assert (await refusal(channel, "IsActive", named))[0] is grpc.StatusCode.UNAVAILABLE


async def test_a_binding_of_another_namespace_cannot_be_read(
    channel: grpc.aio.Channel, decisions: DesiredReplicasStore
) -> None:
    decisions.set_desired("shop/llama", {"h100": DesiredReplicas(2, is_active=True)})
    assert (await refusal(channel, "IsActive", reference("bank", binding="llama")))[0] is grpc.StatusCode.UNAVAILABLE
    for wrong in (reference("bank", binding="shop/llama"), reference("bank")):
        for method in ("IsActive", "GetMetricSpec"):
            assert (await refusal(channel, method, wrong))[0] is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_change_is_pushed_and_the_same_is_not_repeated(
    channel: grpc.aio.Channel, decisions: DesiredReplicasStore
) -> None:
    told: asyncio.Queue[bool] = asyncio.Queue()

    async def listen() -> None:
        async for answer in channel.unary_stream(PATH + "StreamIsActive")(reference("shop", binding="llama")):
            told.put_nowait(bool(fields(answer).get(1)))

    async with asyncio.timeout(120):
        listening = asyncio.create_task(listen())
        decisions.set_desired("shop/llama", {"h100": DesiredReplicas(0, is_active=False)})
        assert await told.get() is False
        decisions.set_desired("shop/llama", {"h100": DesiredReplicas(1, is_active=True)})
        assert await told.get() is True
        # more replicas are no news for this stream, nor is that nothing is known
        decisions.set_desired("shop/llama", {"h100": DesiredReplicas(5, is_active=True)})
        await asyncio.sleep(0)
        decisions.forget("shop/llama")
        await asyncio.sleep(0)
        decisions.set_desired("shop/llama", {"h100": DesiredReplicas(0, is_active=False)})
        assert await told.get() is False
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


async def test_a_stream_says_it_again_now_and_then(decisions: DesiredReplicasStore) -> None:
    scaler = KedaScaler(decisions, repeat_s=0.01)
    port = await scaler.start("127.0.0.1:0")
    decisions.set_desired("shop/llama", {"h100": DesiredReplicas(3, is_active=True)})
    async with asyncio.timeout(120), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stream = channel.unary_stream(PATH + "StreamIsActive")(reference("shop", binding="llama"))
        assert [fields(await stream.read()) for _ in range(3)] == [{1: 1}] * 3
        stream.cancel()
    await scaler.stop(0)


async def test_with_tls_files_are_read_anew_and_clients_checked(
    decisions: DesiredReplicasStore, tmp_path: Path
) -> None:
    authority, stranger = Authority(), Authority("somebody else")
    files = authority.issue(dns=["keda.test"]).write(tmp_path, "server")
    (tmp_path / "clients.crt").write_bytes(authority.cert)
    follow = TlsFiles(Path(files["certFile"]), Path(files["keyFile"]), tmp_path / "clients.crt")
    scaler = KedaScaler(decisions)
    port = await scaler.start("127.0.0.1:0", server_credentials(follow))
    decisions.set_desired("shop/llama", {"h100": DesiredReplicas(3, is_active=True)})

    async def ask(trusts: Authority, shows: Authority | None) -> dict[int, Any]:
        pair = shows.issue("keda") if shows else None
        trusted = grpc.ssl_channel_credentials(trusts.cert, pair and pair.key, pair and pair.cert)
        options = (("grpc.ssl_target_name_override", "keda.test"), ("grpc.use_local_subchannel_pool", 1))
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", trusted, options=options) as channel:
            return await call(channel, "IsActive", reference("shop", binding="llama"))

    assert await ask(authority, authority) == {1: 1}
    for shows in (None, stranger):
        with pytest.raises(grpc.aio.AioRpcError):
            await ask(authority, shows)
    # replaced while it runs, first by what cannot be used
    follow.certificate.write_bytes(b"no certificate")
    assert await ask(authority, authority) == {1: 1}
    stranger.issue(dns=["keda.test"]).write(tmp_path, "server")
    assert await ask(stranger, authority) == {1: 1}
    await scaler.stop(0)


def test_files_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    missing = TlsFiles(tmp_path / "no.crt", tmp_path / "no.key")
    with pytest.raises(OSError, match="no\\.crt"):
        server_credentials(missing)
    authority = Authority()
    first, second = authority.issue(), authority.issue()
    files = TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key")
    files.certificate.write_bytes(first.cert)
    files.key.write_bytes(second.key)
    with pytest.raises(ValueError, match="private key is of another certificate"):
        server_credentials(files)
    key = load_pem_private_key(first.key, None)
    encryption = BestAvailableEncryption(b"secret")
    files.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    with pytest.raises(ValueError, match="password"):
        server_credentials(files)


def test_what_was_decided_by_target() -> None:
    desired = {"h100": 3, "l40s": 0, "gone": None}
    assert desired_by_target(desired) == {
        "h100": DesiredReplicas(3, is_active=True),
        "l40s": DesiredReplicas(0, is_active=False),
    }


async def test_it_serves_until_it_is_cancelled(decisions: DesiredReplicasStore) -> None:
    decisions.set_desired("shop/llama", {"h100": DesiredReplicas(3, is_active=True)})
    address = f"127.0.0.1:{free_ports(1)[0]}"
    async with asyncio.timeout(120), grpc.aio.insecure_channel(address) as channel:
        for _ in range(2):
            serving = asyncio.create_task(KedaScaler(decisions).run(address))
            asked = channel.unary_unary(PATH + "IsActive")
            assert fields(await asked(reference("shop", binding="llama"), wait_for_ready=True)) == {1: 1}
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        with pytest.raises(grpc.aio.AioRpcError):
            await asked(reference("shop", binding="llama"))


async def test_who_no_longer_leads_knows_nothing(channel: grpc.aio.Channel, decisions: DesiredReplicasStore) -> None:
    decisions.set_desired("shop/llama", {"h100": DesiredReplicas(2, is_active=True)})
    decisions.clear()
    code, _ = await refusal(channel, "IsActive", reference("shop", binding="llama"))
    assert code is grpc.StatusCode.UNAVAILABLE


async def test_an_address_that_is_taken_is_told(decisions: DesiredReplicasStore) -> None:
    first, second = KedaScaler(decisions), KedaScaler(decisions)
    port = await first.start("127.0.0.1:0")
    with pytest.raises(OSError, match="cannot listen"):
        await second.start(f"127.0.0.1:{port}")
    await first.stop(0)
    await second.stop(0)


async def test_one_caller_cannot_take_all_streams(decisions: DesiredReplicasStore) -> None:
    scaler = KedaScaler(decisions, most_streams=16)
    port = await scaler.start("127.0.0.1:0")
    decisions.set_desired("shop/llama", {"h100": DesiredReplicas(3, is_active=True)})
    async with asyncio.timeout(120), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        open_stream = channel.unary_stream(PATH + "StreamIsActive")
        kept = [open_stream(reference("shop", binding="llama")) for _ in range(2)]
        assert [fields(await one.read()) for one in kept] == [{1: 1}] * 2
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await open_stream(reference("shop", binding="llama")).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "2 streams are open about the namespace shop" in (caught.value.details() or "")
        assert "--keda-streams" in (caught.value.details() or "")
        # what is asked without a stream is answered all the same, and a stream that ends makes room
        assert await call(channel, "IsActive", reference("shop", binding="llama")) == {1: 1}
        kept[0].cancel()

        async def has_room() -> bool:
            kept[0] = open_stream(reference("shop", binding="llama"))
            try:
                return fields(await kept[0].read()) == {1: 1}
            except grpc.aio.AioRpcError:
                return False

        await eventually(has_room)
        # one caller gets half, whatever namespaces it makes up
        for number in range(6):
            decisions.set_desired(f"made-up-{number}/llama", {"h100": DesiredReplicas(3, is_active=True)})
            kept.append(open_stream(reference(f"made-up-{number}", binding="llama")))
            await kept[-1].read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await open_stream(reference("one-more", binding="llama")).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "8 streams of ipv4:127.0.0.1 are open" in (caught.value.details() or "")
    await scaler.stop(0)


async def test_news_of_a_binding_wake_only_those_who_ask_about_it(decisions: DesiredReplicasStore) -> None:
    decisions.set_desired("shop/llama", {"h100": DesiredReplicas(3, is_active=True)})
    last = decisions.last_decision("shop/llama", "")
    asked: list[str] = []
    known = decisions.last_decision

    def counted(binding: str, target: str) -> DesiredReplicas:
        asked.append(binding)
        return known(binding, target)

    decisions.last_decision = counted  # type: ignore[method-assign]
    waits = [asyncio.create_task(decisions.wait_for_change(last, "shop/llama", "")) for _ in range(100)]
    await asyncio.sleep(0)
    asked.clear()
    for number in range(100):
        decisions.set_desired("shop/other", {"h100": DesiredReplicas(number, is_active=True)})
        await asyncio.sleep(0)
    assert asked == []
    decisions.set_desired("shop/llama", {"h100": DesiredReplicas(4, is_active=True)})
    assert await asyncio.gather(*waits) == [DesiredReplicas(4, is_active=True)] * 100


async def test_only_listed_namespaces_are_told(decisions: DesiredReplicasStore) -> None:
    scaler = KedaScaler(decisions, readers=ReadPermissions(namespaces=frozenset({"shop"})))
    port = await scaler.start("127.0.0.1:0")
    for namespace in ("shop", "bank"):
        decisions.set_desired(f"{namespace}/llama", {"h100": DesiredReplicas(3, is_active=True)})
    async with asyncio.timeout(120), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert await call(channel, "IsActive", reference("shop", binding="llama")) == {1: 1}
        for method in ("IsActive", "GetMetricSpec"):
            code, text = await refusal(channel, method, reference("bank", binding="llama"))
            assert code is grpc.StatusCode.PERMISSION_DENIED
            assert "--keda-namespace bank" in text
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_stream(PATH + "StreamIsActive")(reference("bank", binding="llama")).read()
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    await scaler.stop(0)


async def test_a_clients_certificate_says_what_it_may_read(decisions: DesiredReplicasStore, tmp_path: Path) -> None:
    authority = Authority()
    files = authority.issue(dns=["keda.test"]).write(tmp_path, "server")
    (tmp_path / "clients.crt").write_bytes(authority.cert)
    follow = TlsFiles(Path(files["certFile"]), Path(files["keyFile"]), tmp_path / "clients.crt")
    readers = ReadPermissions(clients={"keda-operator": frozenset(), "scaler.shop": frozenset({"shop"})})
    scaler = KedaScaler(decisions, readers=readers)
    port = await scaler.start("127.0.0.1:0", server_credentials(follow))
    for namespace in ("shop", "bank"):
        decisions.set_desired(f"{namespace}/llama", {"h100": DesiredReplicas(3, is_active=True)})

    async def ask(name: str, namespace: str, *dns: str) -> tuple[grpc.StatusCode, str]:
        pair = authority.issue(name, dns=dns)
        trusted = grpc.ssl_channel_credentials(authority.cert, pair.key, pair.cert)
        options = (("grpc.ssl_target_name_override", "keda.test"), ("grpc.use_local_subchannel_pool", 1))
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", trusted, options=options) as channel:
            try:
                await call(channel, "IsActive", reference(namespace, binding="llama"))
            except grpc.aio.AioRpcError as error:
                return error.code(), error.details() or ""
            return grpc.StatusCode.OK, ""

    async with asyncio.timeout(120):
        assert (await ask("keda-operator", "bank"))[0] is grpc.StatusCode.OK
        assert (await ask("tenant", "shop", "scaler.shop"))[0] is grpc.StatusCode.OK
        code, text = await ask("tenant", "bank", "scaler.shop")
        assert code is grpc.StatusCode.PERMISSION_DENIED
        assert "not for the namespace bank" in text
        code, text = await ask("tenant", "shop", "elsewhere")
        assert code is grpc.StatusCode.PERMISSION_DENIED
        assert "elsewhere" in text
    await scaler.stop(0)


async def test_what_is_no_name_is_refused_without_an_echo(channel: grpc.aio.Channel) -> None:
    for wrong in (reference("shop", binding="x" * 254), reference("x" * 60_000, binding="a")):
        code, text = await refusal(channel, "IsActive", wrong)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert len(text) < 100
    # no reference is that long: it is not even read
    code, _ = await refusal(channel, "IsActive", reference("shop", binding="x" * 70_000))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED

# SPDX-License-Identifier: Apache-2.0
"""attache epp without a cluster: llm-d's file-discovery, its flags and its Envoy, unchanged; files are followed."""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.certificates import Authority
from tests.extproc.feeds.test_engine_scraper import ELSEWHERE, page_elsewhere
from tests.fork_server import output_of
from tests.waiting import eventually
from tests.with_envoy.gateways import endpoints_file, engines, gateway

if TYPE_CHECKING:
    from pathlib import Path

CHAT = "/v1/chat/completions"
BODY = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}
CONFIG = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
  - type: file-discovery
    parameters: {{path: {path}, watchFile: true}}
  - type: random-picker
schedulingProfiles:
  - name: default
    plugins: [{{pluginRef: random-picker}}]
dataLayer:
  discovery: {{pluginRef: file-discovery}}
"""


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


async def test_the_file_lists_the_endpoints_and_its_changes_are_used(tmp_path: Path) -> None:
    config = CONFIG.format(path=tmp_path / "config" / "endpoints.json")
    async with engines(3) as addresses:
        first, second, _ = addresses
        async with gateway(tmp_path, [first], picker=config, is_epp=True) as made, httpx.AsyncClient() as http:
            file = made.config / "endpoints.json"

            async def served() -> set[str]:
                answers = [await http.post(made.url + CHAT, json=BODY) for _ in range(8)]
                assert {one.status_code for one in answers} <= {200, 503}
                return {one.json().get("served", "nobody") for one in answers}

            assert await served() == {first}
            new = file.with_name("new")
            new.write_text(endpoints_file(addresses))
            new.replace(file)

            async def are_all() -> bool:
                return await served() == set(addresses)

            await eventually(are_all)
            file.write_text("endpoints: 3")
            role = made.metrics.rpartition(":")[2]
            page = f"http://127.0.0.1:{int(role) + 1}/metrics"

            async def is_told() -> bool:
                return 'reason="EndpointsInvalid"} 1.0' in (await http.get(page)).text

            await eventually(is_told)
            assert await served() <= set(addresses)
            file.write_text(endpoints_file([second]))

            async def is_second() -> bool:
                return await served() == {second}

            await eventually(is_second)


async def test_without_a_cluster_and_without_discovery_it_says_what_to_write(tmp_path: Path) -> None:
    file = tmp_path / "epp.yaml"
    file.write_text(
        CONFIG.format(path="x").replace("random-picker", "max-score-picker").replace("dataLayer", "datLayer")
    )
    command = [sys.executable, "-m", "attache", "epp", "--pool-name=llama", f"--config-file={file}"]
    status, told = await output_of(command, tmp_path)
    assert status == 2
    assert "file-discovery" in told
    assert "datLayer" in told


async def test_tls_12_is_refused_where_the_flag_says_so(tmp_path: Path) -> None:
    config = CONFIG.format(path=tmp_path / "config" / "endpoints.json")
    context = {"tls_params": {"tls_maximum_protocol_version": "TLSv1_3"}}
    flags = ["--secure-serving=true", "--tls-min-version=VersionTLS13"]
    async with engines(1) as addresses:
        made = gateway(tmp_path, addresses, picker=config, is_epp=True, flags=flags, tls=context)
        async with made as running, httpx.AsyncClient() as http:
            assert (await http.post(running.url + CHAT, json=BODY)).status_code == 200
            host, _, port = running.extproc.rpartition(":")
            assert await handshake(host, int(port), ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
            with pytest.raises(OSError):  # noqa: PT011 - of ssl, of whatever kind
                await handshake(host, int(port), ssl.TLSVersion.TLSv1_2)


async def handshake(host: str, port: int, version: ssl.TLSVersion) -> str:
    """The version that both sides take."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        return str(writer.get_extra_info("ssl_object").version())
    finally:
        writer.close()


async def test_names_of_files_are_relative_to_the_file_that_has_them(tmp_path: Path) -> None:
    authority = Authority("engines")
    pair = authority.issue(ips=["127.0.0.1"]).write(tmp_path, "engine")
    (tmp_path / "ca.pem").write_bytes(authority.cert)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair["certFile"], pair["keyFile"])
    async with engines(1) as addresses, page_elsewhere(ELSEWHERE, context) as port:
        source = f"{{scheme: https, insecureSkipVerify: false, caCertPath: ../ca.pem, port: {port}}}"
        picker = "  - type: random-picker\n"
        config = CONFIG.format(path=tmp_path / "config" / "endpoints.json")
        config = config.replace(picker, f"{picker}  - {{type: metrics-data-source, parameters: {source}}}\n")
        async with gateway(tmp_path, addresses, picker=config, is_epp=True) as made, httpx.AsyncClient() as http:

            async def is_read() -> bool:
                page = (await http.get(f"{made.metrics}/metrics")).text
                return f'attache_engine_waiting{{endpoint="{addresses[0]}",' in page and "} 7.0\n" in page

            await eventually(is_read)


SCORES = "x-gateway-destination-endpoint-scores"


@pytest.mark.parametrize(("flags", "is_sent"), [(["--emit-endpoint-scores"], True), ([], False)])
async def test_the_gateway_gets_the_scores_of_all_endpoints_on_request(
    tmp_path: Path, flags: list[str], is_sent: bool
) -> None:
    config = CONFIG.format(path=tmp_path / "config" / "endpoints.json")
    config = config.replace("  - type: random-picker", "  - type: max-score-picker\n  - type: queue-scorer")
    config = config.replace("[{pluginRef: random-picker}]", "[{pluginRef: queue-scorer, weight: 2}]")
    shown = {"header": {"key": "x-scores", "value": f"%DYNAMIC_METADATA(envoy.lb:{SCORES})%"}}
    route = {"match": {"prefix": "/"}, "route": {"cluster": "pool"}, "response_headers_to_add": [shown]}
    async with engines(2) as addresses:
        made = gateway(tmp_path, addresses, picker=config, is_epp=True, flags=flags, routes=[route])
        async with made as running, httpx.AsyncClient() as http:
            answer = await http.post(running.url + CHAT, json=BODY)
    assert answer.json()["served"] in addresses
    found = answer.headers.get("x-scores", "-")
    assert (json.loads(found) if is_sent else found) == (dict.fromkeys(addresses, 2) if is_sent else "-")

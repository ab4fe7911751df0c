# SPDX-License-Identifier: Apache-2.0
"""Gateways that are configured elsewhere: a real Envoy with ext_proc in full-duplex mode, and engines that tell what
reached them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec
from aiohttp import web

from bench.stack.loopback_stack import envoy_command
from bench.stack.processes import Processes, free_ports, ports_in_a_row

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

USAGE = b'"usage": {"prompt_tokens": 10, "completion_tokens": 2}'


class Engine:
    """Answers with what it got; on wish a stream, or nothing but a status."""

    def __init__(self) -> None:
        self.requests = 0

    async def handle(self, http: web.Request) -> web.StreamResponse:
        body = await http.read()
        self.requests += 1
        told = {
            "served": f"127.0.0.1:{http.transport.get_extra_info('sockname')[1]}",  # type: ignore[union-attr]
            "method": http.method,
            "path": http.path,
            "headers": dict(http.headers),
            "bytes": len(body),
            "digest": hashlib.sha256(body).hexdigest(),
        }
        pieces = int(http.headers.get("x-pieces", "0"))
        if not pieces:
            return web.json_response(told, headers={"x-told": "1"})
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-told": json.dumps(told)})
        await response.prepare(http)
        size = int(http.headers.get("x-piece-bytes", "50"))
        for number in range(pieces):
            await response.write(b"data: " + f"{number} ".encode() + b"x" * size + b"\n\n")
        await response.write(b"data: {" + USAGE + b"}\n\ndata: [DONE]\n\n")
        return response


@asynccontextmanager
async def engines(count: int) -> AsyncIterator[list[str]]:
    """Their addresses."""
    runners = []
    try:
        addresses = []
        for _ in range(count):
            app = web.Application(client_max_size=64 * 1024 * 1024)
            app.router.add_route("*", "/{path:.*}", Engine().handle)
            runner = web.AppRunner(app, access_log=None)
            runners.append(runner)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            addresses.append(f"127.0.0.1:{runner.addresses[0][1]}")
        yield addresses
    finally:
        for runner in runners:
            await runner.cleanup()


def pool_cluster(kind: str, addresses: Sequence[str]) -> dict[str, Any]:
    """How the gateway reads the pick: ``original_dst``: the header, as one address. ``override_host``: the metadata, as
    a list, as Istio does. ``override_header``: the header, as a list, as Envoy Gateway's endpointOverride does.
    """
    if kind == "original_dst":
        return {
            "name": "pool",
            "type": "ORIGINAL_DST",
            "connect_timeout": "1s",
            "lb_policy": "CLUSTER_PROVIDED",
            "original_dst_lb_config": {"use_http_header": True, "http_header_name": "x-gateway-destination-endpoint"},
        }
    key = "x-gateway-destination-endpoint"
    endpoints = [
        {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}
        for host, port in (address.split(":") for address in addresses)
    ]
    round_robin = {
        "name": "envoy.load_balancing_policies.round_robin",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.load_balancing_policies.round_robin.v3.RoundRobin"
        },
    }
    source = {"header": key} if kind == "override_header" else {"metadata": {"key": "envoy.lb", "path": [{"key": key}]}}
    override = {
        "@type": "type.googleapis.com/envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [source],
        "selected_host_key": {"key": "envoy.lb", "path": [{"key": f"{key}-served"}]},
        "fallback_policy": {"policies": [{"typed_extension_config": round_robin}]},
    }
    policy = {"name": "envoy.load_balancing_policies.override_host", "typed_config": override}
    return {
        "name": "pool",
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {"cluster_name": "pool", "endpoints": [{"lb_endpoints": endpoints}]},
        "load_balancing_policy": {"policies": [{"typed_extension_config": policy}]},
    }


NO_HINT: Final = object()
IN_PIECES: Final = {
    "request_header_mode": "SEND",
    "response_header_mode": "SEND",
    "request_body_mode": "FULL_DUPLEX_STREAMED",
    "response_body_mode": "FULL_DUPLEX_STREAMED",
    "request_trailer_mode": "SEND",
    "response_trailer_mode": "SEND",
}
# Of requests that another picker has decided.
COPIES: Final = {**IN_PIECES, "request_body_mode": "STREAMED", "response_body_mode": "STREAMED"}
WHOLE_BODIES: Final = {
    "request_header_mode": "SEND",
    "response_header_mode": "SKIP",
    "request_body_mode": "BUFFERED",
    "response_body_mode": "NONE",
    "request_trailer_mode": "SKIP",
    "response_trailer_mode": "SKIP",
}


def bootstrap(  # noqa: PLR0913 - what tests want to be different
    *,
    listeners: Sequence[tuple[int, object]],
    admin: int,
    extproc: int,
    cluster: dict[str, Any],
    tls: dict[str, Any] | None = None,
    host: str = "127.0.0.1",
    mode: Mapping[str, str] = IN_PIECES,
    filters: Sequence[dict[str, Any]] = (),
    routes: Sequence[dict[str, Any]] = (),
    takes_envoy_headers: bool = False,
) -> dict[str, Any]:
    """An Envoy as the inference extension's gateways set it up. ``listeners``: a port and the subset hint given there.

    ``host`` and ``extproc``: where the picker is. ``tls``: the common TLS context towards it; None: plain text.
    ``mode``: ext_proc's processing mode; WHOLE_BODIES: as kgateway 2.0 and 2.1; COPIES: none of our answers is read.
    ``filters``: in front of ext_proc. ``routes``: before the one to the pool. ``takes_envoy_headers``: from the picker,
    which by default may not set headers that begin with ``x-envoy``.
    """
    http2: dict[str, Any] = {
        "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    at = {"endpoint": {"address": {"socket_address": {"address": host, "port_value": extproc}}}}
    picker = {
        "name": "extproc",
        "type": "STATIC",
        "connect_timeout": "1s",
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
        "load_assignment": {"cluster_name": "extproc", "endpoints": [{"lb_endpoints": [at]}]},
    }
    if tls is not None:
        context = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"
        socket = {"@type": context, "common_tls_context": tls, "sni": "picker"}
        picker["transport_socket"] = {"name": "envoy.transport_sockets.tls", "typed_config": socket}
        # so that there are handshakes while requests come
        http2["common_http_protocol_options"] = {"max_requests_per_connection": 5}
    rules = {"mutation_rules": {"allow_envoy": True}} if takes_envoy_headers else {}
    return {
        "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": admin}}},
        "static_resources": {
            "listeners": [
                _listener(port, hint, cluster, mode=mode, filters=filters, routes=routes, rules=rules)
                for port, hint in listeners
            ],
            "clusters": [picker, cluster],
        },
    }


def _listener(
    port: int,
    hint: object,
    cluster: dict[str, Any],
    *,
    mode: Mapping[str, str],
    filters: Sequence[dict[str, Any]],
    routes: Sequence[dict[str, Any]],
    rules: Mapping[str, object],
) -> dict[str, Any]:
    ext_proc = {
        **rules,
        "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "extproc"}},
        "failure_mode_allow": False,
        "message_timeout": "30s",
        "processing_mode": mode,
        "observability_mode": mode is COPIES,
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }
    filters = [*filters, {"name": "envoy.filters.http.ext_proc", "typed_config": ext_proc}]
    if hint is not NO_HINT:
        value = {"x-gateway-destination-endpoint-subset": hint}
        filters.insert(
            0,
            {
                "name": "envoy.filters.http.set_metadata",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config",
                    "metadata": [{"metadata_namespace": "envoy.lb.subset_hint", "value": value}],
                },
            },
        )
    filters.append(
        {
            "name": "envoy.filters.http.router",
            "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
        }
    )
    retry = {"retry_on": "connect-failure,reset-before-request,503", "num_retries": 3}
    # only who has a list can go down it
    retries = {"retry_policy": retry} if "load_assignment" in cluster else {}
    route = {"match": {"prefix": "/"}, "route": {"cluster": "pool", "timeout": "60s", **retries}}
    manager = {
        "@type": (
            "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
        ),
        "stat_prefix": "gateway",
        "http_filters": filters,
        "http_protocol_options": {"enable_trailers": True},
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [*routes, route]}]},
        "access_log": [_access_log()],
    }
    chain = {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
    return {
        "name": f"gateway-{port}",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "filter_chains": [{"filters": [chain]}],
    }


def _access_log() -> dict[str, Any]:
    """To Envoy's output: of each request its status, and what the picker told of its cost."""
    stdout = "type.googleapis.com/envoy.extensions.access_loggers.stream.v3.StdoutAccessLog"
    line = "cost=%DYNAMIC_METADATA(envoy.lb:x-gateway-inference-request-cost)% status=%RESPONSE_CODE%\n"
    return {
        "name": "envoy.access_loggers.stdout",
        "typed_config": {"@type": stdout, "log_format": {"text_format_source": {"inline_string": line}}},
    }


def endpoints_file(addresses: Sequence[str]) -> str:
    """As llm-d's file-discovery reads it."""
    parts = [address.rsplit(":", 1) for address in addresses]
    listed = [{"name": f"vllm-{n}", "address": host, "port": port} for n, (host, port) in enumerate(parts)]
    return json.dumps({"endpoints": listed})


def pool_config(addresses: Sequence[str], *, picker: bool = False) -> str:
    """One ModelServer called ``pool``, and no route: whatever comes goes there. ``picker``: as ``picker.yaml`` says."""
    endpoints = ", ".join(f'{{address: "{address}"}}' for address in addresses)
    return f"""
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {{name: pool}}
spec: {{model: base, scrapeInterval: 0s, {"pickerConfig: picker.yaml, " if picker else ""}endpoints: [{endpoints}]}}
"""


class Gateway(msgspec.Struct, frozen=True):
    """URLs of Envoy, one for each subset hint, of its administration, and of extproc's metrics; extproc's address,
    configuration and process.
    """

    urls: tuple[str, ...]
    admin: str
    metrics: str
    extproc: str
    config: Path
    pid: int

    @property
    def url(self) -> str:
        """The first, or only, one."""
        return self.urls[0]


@asynccontextmanager
async def gateway(  # noqa: PLR0913 - what tests want to be different
    directory: Path,
    addresses: Sequence[str],
    *,
    kind: str = "original_dst",
    flags: Sequence[str] = (),
    hints: Sequence[object] = (NO_HINT,),
    tls: dict[str, Any] | None = None,
    picker: str = "",
    mode: Mapping[str, str] = IN_PIECES,
    filters: Sequence[dict[str, Any]] = (),
    routes: Sequence[dict[str, Any]] = (),
    is_epp: bool = False,
    pool: str = "",
    takes_envoy_headers: bool = False,
) -> AsyncIterator[Gateway]:
    """extproc and an Envoy that listens once for each of ``hints``. ``tls``: see ``bootstrap``; ``flags`` say it to
    extproc.

    ``picker``: an EndpointPickerConfig. ``mode``, ``filters``, ``routes``: see ``bootstrap``. ``is_epp``: attache epp
    without a cluster, whose endpoints ``endpoints.json`` beside the EndpointPickerConfig lists, in place of extproc.
    ``pool``: the ModelServer, in place of a usual one. ``takes_envoy_headers``: see ``bootstrap``.
    """
    (admin, extproc, health, *listen), metrics = free_ports(3 + len(hints)), ports_in_a_row(2)
    config = directory / "config"
    config.mkdir(parents=True)
    if is_epp:
        (config / "endpoints.json").write_text(endpoints_file(addresses))
    else:
        (config / "pool.yaml").write_text(pool or pool_config(addresses, picker=bool(picker)))
    if picker:
        (config / "picker.yaml").write_text(picker)
    bundle = directory / "envoy"
    bundle.mkdir()
    configured = bootstrap(
        listeners=list(zip(listen, hints, strict=True)),
        admin=admin,
        extproc=extproc,
        cluster=pool_cluster(kind, addresses),
        tls=tls,
        mode=mode,
        filters=filters,
        routes=routes,
        takes_envoy_headers=takes_envoy_headers,
    )
    (bundle / "bootstrap.json").write_text(json.dumps(configured))
    command = [sys.executable, "-m", "extproc", "--config", str(config), "--listen", f"127.0.0.1:{extproc}"]
    # nobody takes over
    command += ["--metrics", f"127.0.0.1:{metrics}", "--pool", "pool", "--grace", "0s"]
    if is_epp:
        ports = {"grpc-port": extproc, "grpc-health-port": health, "metrics-port": metrics}
        command = [sys.executable, "-m", "attache", "epp", "--bind-address=127.0.0.1", "--secure-serving=false"]
        command += [f"--{name}={port}" for name, port in ports.items()]
        command += ["--pool-name=slurm_job_42", f"--config-file={config / 'picker.yaml'}"]
    async with Processes(directory) as processes, aiohttp.ClientSession() as http:

        async def answers(url: str) -> bool:
            try:
                async with http.get(url) as response:
                    return response.status == 200
            except aiohttp.ClientError:
                return False

        pid = await processes.start("extproc", [*command, *flags])
        await processes.start("envoy", envoy_command(bundle))
        await processes.wait_ready("extproc", lambda: answers(f"http://127.0.0.1:{metrics}/readyz"))
        await processes.wait_ready("envoy", lambda: answers(f"http://127.0.0.1:{admin}/ready"))
        urls = tuple(f"http://127.0.0.1:{port}" for port in listen)
        yield Gateway(
            urls, f"http://127.0.0.1:{admin}", f"http://127.0.0.1:{metrics}", f"127.0.0.1:{extproc}", config, pid
        )

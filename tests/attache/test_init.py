# SPDX-License-Identifier: Apache-2.0
"""``attache init``: a directory that can be served, whatever engines answer."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import ssl
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Protocol

import pytest
import yaml

from attache import init
from attache.init import Engine, GatewayPlan, Key, Ports, document, main, yaml_scalar
from bench.stack.processes import free_ports
from extproc.api.config_loader import load_directory
from extproc.cli.check import main as check
from extproc.feeds.engine_http import ConnectionSettings
from tests.certificates import Authority

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from extproc.api.config_snapshot import Snapshot

    class Start(Protocol):
        def __call__(
            self, pages: Mapping[str, bytes], key: str = "", files: Mapping[str, str] | None = None
        ) -> str: ...


VLLM, SGLANG = b"vllm:num_requests_running 0\n", b"sglang:num_running_reqs 0\n"
NAME = "engine.example.com"


def models(*names: str) -> bytes:
    return json.dumps({"data": [{"id": name} for name in names]}).encode()


@pytest.fixture
def engine() -> Iterator[Start]:
    """Starts a server that answers with these pages by path, and any other with a redirect; its address. ``key``: it
    requires this one. ``files``: of its certificate, if it serves TLS.
    """
    servers: list[ThreadingHTTPServer] = []

    def start(pages: Mapping[str, bytes], key: str = "", files: Mapping[str, str] | None = None) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = pages.get(self.path)
                is_known = not key or self.headers["authorization"] == f"Bearer {key}"
                self.send_response((302 if page is None else 200) if is_known else 401)
                self.send_header("location", "/v1/models")
                self.send_header("content-length", str(len(page or b"")))
                self.end_headers()
                self.wfile.write(page or b"")

            def log_message(self, *_: object) -> None:
                return

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if files is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(files["certFile"], files["keyFile"])
            server.socket = context.wrap_socket(server.socket, server_side=True)
        servers.append(server)
        Thread(target=server.serve_forever, daemon=True).start()
        return f"127.0.0.1:{server.server_port}"

    yield start
    for one in servers:
        one.shutdown()
        one.server_close()


def made(directory: Path, *words: str) -> Snapshot:
    """What the command writes; ``attache check`` has no note on it."""
    assert main([str(directory), "--port", str(free_row()), *words]) == 0
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert check([str(directory)]) == 0
    assert "note" not in out.getvalue()
    return load_directory(directory)


def free_row() -> int:
    """The first of four free ports in a row."""
    while True:
        (first,) = free_ports(1)
        try:
            for port in range(first, first + 4):
                with socket.socket() as tried:
                    tried.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first


def test_engines_with_the_same_model_share_a_server_of_their_kinds(
    engine: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = engine({"/v1/models": models("meta/llama"), "/metrics": VLLM})
    two = engine({"/v1/models": models("meta/llama", "other"), "/metrics": b"# HELP x\n" + SGLANG})
    three = engine({"/v1/models": models("third-model"), "/prometheus/metrics": b"trtllm_x 1\n"})
    found = made(tmp_path / "new", "--engine", one, "--engine", f"http://{two}/", "--engine", three)
    servers = {one.spec.model: one.spec for one in found.servers}
    assert {name: one.engine for name, one in servers.items()} == {
        "meta/llama": "vLLM",
        "other": "SGLang",
        "third-model": "TensorRT-LLM",
    }
    assert [(each.address, each.labels) for each in servers["meta/llama"].endpoints] == [
        (one, {}),
        (two, {"llm-d.ai/engine-type": "sglang"}),
    ]
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "attache.yaml; serve it with:" in printed.out


def test_engines_behind_tls_and_a_key_are_asked_and_written_with_both(
    engine: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = Authority()
    pair = authority.issue(dns=[NAME]).write(tmp_path, "engine")
    pages = {"/v1/models": models("meta/llama"), "/metrics": SGLANG}
    address = engine(pages, "sk-engine", pair)
    (tmp_path / "ca.pem").write_bytes(authority.cert)
    (tmp_path / "engine's key").write_text("sk-engine\n")
    words = ("--engine-ca", str(tmp_path / "ca.pem"), "--engine-server-name", NAME)
    key = ("--engine-key-file", str(tmp_path / "engine's key"))
    own = ("--tls", pair["certFile"], pair["keyFile"], "--key", "web", "--limit", "60/minute")
    found = made(tmp_path / "new", "--engine", f"https://{address}", *words, *key, *own)
    (server,) = found.servers
    assert (server.spec.model, server.spec.engine) == ("meta/llama", "SGLang")
    assert server.spec.connection.referenced_files == (key[1], words[1])
    assert server.spec.connection.tls is not None
    assert server.spec.connection.tls.server_name == NAME
    assert "sk-engine" not in (tmp_path / "new/attache.yaml").read_text()
    capsys.readouterr()
    # another name, another authority, no key, plain HTTP
    (tmp_path / "other.pem").write_bytes(Authority().cert)
    for number, (given, why) in enumerate(
        (
            ((*words[:3], "other.example.com", *key), "Hostname mismatch"),
            (("--engine-ca", str(tmp_path / "other.pem"), *words[2:], *key), "certificate verify failed"),
            (words, "401"),
            (key, "see whether it needs --engine-ca"),
        )
    ):
        assert not made(tmp_path / f"without-{number}", "--engine", address, *given).servers
        assert why in capsys.readouterr().err


def test_a_limit_without_keys_is_of_all_clients(tmp_path: Path, engine: Start) -> None:
    found = made(tmp_path / "new", "--limit", "9/hour", "--engine", engine({"/v1/models": models("meta/llama")}))
    assert [one.per for route in found.routes for one in route.spec.rate_limits] == ["Route"]


def test_each_line_of_metrics_is_read_once(engine: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(init, "engine_with_metric", lines.append)
    address = engine({"/v1/models": models("meta/llama"), "/metrics": b"a 1\nb 1\n", "/prometheus/metrics": b"c 1\n"})
    made(tmp_path / "new", "--engine", address)
    assert lines == ["a 1", "b 1", "c 1"]


def test_keys_are_printed_once_and_written_as_digests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = made(tmp_path / "new", "--key", "web", "--key", "batch", "--tenant", "acme", "--limit", "60/minute")
    keys = [line.rpartition(" ")[2] for line in capsys.readouterr().out.splitlines() if line.startswith("key of")]
    text = (tmp_path / "new" / "attache.yaml").read_text()
    assert len(set(keys)) == 2
    assert all(key not in text for key in keys)
    authentication = found.gateway.authentication
    assert authentication is not None
    assert [(one.name, one.tenant, one.digest) for one in authentication.api_keys] == [
        ("web", "acme", sha256(keys[0].encode()).hexdigest()),
        ("batch", "batch", sha256(keys[1].encode()).hexdigest()),
    ]


def test_an_engine_that_does_not_answer_has_a_commented_example_that_can_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (port,) = free_ports(1)
    found = made(tmp_path / "new", "--engine", f"127.0.0.1:{port}", "--limit", "60/minute")
    printed = capsys.readouterr()
    assert f"engine 127.0.0.1:{port}: does not list its models" in printed.err
    assert "attache.yaml, which serves no model yet: its last lines say what to write; then" in printed.out
    assert not found.servers
    file = tmp_path / "new" / "attache.yaml"
    head, _, example = file.read_text().partition("in place of MODEL.\n")
    file.write_text(head + "\n" + "".join(f"{line[2:]}\n" for line in example.splitlines()))
    (server,) = load_directory(tmp_path / "new").servers
    assert server.spec.endpoints[0].address == f"127.0.0.1:{port}"


@pytest.mark.parametrize(
    "name",
    [
        '"a": b',
        "x\n---\nkind: Evil",
        "null",
        "yes",
        "1e3",
        "0x10",
        "a # b",
        "{a: b}",
        "!!python/x",
        "é\u2028",
        "\x85",
        "'",
    ],
)
def test_any_name_of_a_model_is_itself_or_left_out(name: str, engine: Start, tmp_path: Path) -> None:
    found = made(tmp_path / "new", "--engine", engine({"/v1/models": models("meta/llama", name), "/metrics": VLLM}))
    expected = {"meta/llama", name} if name.isprintable() else {"meta/llama"}
    assert {one.spec.model for one in found.servers} == expected


def test_what_no_engine_sends_is_bounded(engine: Start, tmp_path: Path) -> None:
    many = engine({"/v1/models": models(*(f"model-{number}" for number in range(4000))), "/metrics": VLLM})
    more = engine({"/v1/models": models(*(f"model-{number}" for number in range(10_000)))})
    endless = engine({"/v1/models": b"[" * 5_000_000})
    elsewhere = engine({})
    found = made(tmp_path / "new", *(word for one in (many, more, endless, elsewhere) for word in ("--engine", one)))
    assert len(found.servers) == 32
    assert {one.address for server in found.servers for one in server.spec.endpoints} == {many}


def test_an_engine_that_never_ends_its_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "_PATIENCE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = init.inspect_engine(f"127.0.0.1:{silent.getsockname()[1]}", ConnectionSettings())
    assert "timed out" in found.problem


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("x")
    assert main([str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--limit", "many"), "write one such as 60/minute"),
        (("--tenant", "acme"), "write a --key for each"),
        (("--engine", "nowhere"), "write nowhere:8000"),
        (("--port", "70000"), "from 1 to 65532"),
        (("--key", "a: b"), "name"),
        (("--tls", "no.crt", "no.key"), "there is no file no.crt"),
        (("--engine", "https://127.0.0.1:1"), "with --engine-ca FILE"),
        (("--engine-server-name", NAME), "write --engine-ca FILE, too"),
        (("--engine-ca", "no.pem"), "No such file or directory"),
        (("--engine-ca", __file__), "--engine-ca or --engine-key-file cannot be used"),
        (("--engine-key-file", os.devnull), "the engines' key is empty"),
        (("--engine", "127.0.0.1:1", "--engine-ca", "ca.pem"), "write the name in its certificate"),
        (("--engine", "http://127.0.0.1:1", "--engine-ca", "ca.pem"), "all engines serve TLS"),
    ],
)
def test_a_mistake_in_the_options_writes_nothing(
    words: tuple[str, ...], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "new"), *words]) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_tls_names_the_files_that_are_there(tmp_path: Path) -> None:
    files = [tmp_path / "a b.crt", tmp_path / "key"]
    for one in files:
        one.write_text("x")
    found = made(tmp_path / "new", "--tls", *map(str, files))
    assert found.gateway.listeners[0].referenced_files == tuple(map(str, files))


def test_a_port_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = free_row()
    with socket.create_server(("127.0.0.1", first + 2)):
        assert main([str(tmp_path / "new"), "--port", str(first)]) == 2
        assert f"cannot listen on 127.0.0.1:{first + 2}" in capsys.readouterr().err


def test_a_file_that_is_written_is_plain_to_read() -> None:
    plan = GatewayPlan((Engine("127.0.0.1:8001", ("meta/llama",), "vllm"),), Ports(), (Key("web", "acme", "sk-x"),))
    text = document(plan)
    assert [one["kind"] for one in yaml.safe_load_all(text)] == ["GatewayConfig", "ModelServer", "ModelRoute"]
    assert "  model: meta/llama    # the name that the engines list\n" in text
    assert max(map(len, text.splitlines())) <= 120
    assert yaml_scalar("llama") == '"llama"'

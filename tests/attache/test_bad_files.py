# SPDX-License-Identifier: Apache-2.0
"""Options that name a file or an address that cannot be used: every command says so in a line and ends with 2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from attache.__main__ import main
from attache.commands import COMMANDS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CONFIG = """\
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec: {model: base, endpoints: [{address: "127.0.0.1:8001"}]}
"""
# Of each command that reads files, calls that get as far as reading FILE; none is answered by anybody else.
CALLS: Final = (
    "check FILE",
    "render FILE",
    "convert FILE",
    "explain --config FILE request.json",
    "bundle --config FILE --out out",
    "extproc --config FILE",
    "serve --config FILE",
    "extproc --config config --metrics off --listen unix:socket --tls-cert FILE --tls-key FILE",
    "extproc --config config --metrics off --listen unix:socket --console-token FILE",
    "download https://127.0.0.1:1/weights.tar --cache cache --ca-file FILE",
    "agent --model llama --listen 127.0.0.1:1 --probe-request FILE",
    "explain-scaling default/llama --manager https://127.0.0.1:1 --token-file FILE",
    "explain-scaling default/llama --manager https://127.0.0.1:1 --ca FILE",
    "keys serve --config config --listen 127.0.0.1:1 --token-file FILE",
    "run --trace FILE",
    "replay --trace FILE",
    "compare FILE FILE",
    "workload --trace FILE",
    "lab --traces FILE --out out",
)
# Nothing to read, or none of its files has to be there: a cluster, a download, simulated engines or a log come first.
WITHOUT: Final = frozenset(
    {
        *("gateway", "epp", "manager", "envoy", "top", "engine", "up", "autoscale", "validate", "bench", "completion"),
        *("usage", "slo", "init", "reset", "translate"),
    }
)
# An empty file is no object, and a directory of them is a place to look in.
EMPTY_IS_FINE: Final = frozenset({"render", "convert"})
SIZE: Final = 100_000_000


def _huge(file: Path) -> None:
    with file.open("wb") as out:
        out.truncate(SIZE)


KINDS: Final[dict[str, Callable[[Path], object]]] = {
    "missing": lambda _: None,
    "directory": lambda file: file.mkdir(),
    "empty": lambda file: file.write_bytes(b""),
    "binary": lambda file: file.write_bytes(bytes(range(256)) * 8),
    "huge": _huge,
}


def test_every_command_is_tried_or_reads_no_file() -> None:
    assert {call.partition(" ")[0] for call in CALLS} | WITHOUT == set(COMMANDS)


@pytest.mark.parametrize("call", CALLS)
def test_a_file_that_cannot_be_used_is_told_of_in_a_line(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "all.yaml").write_text(CONFIG)
    (tmp_path / "request.json").write_text('{"model": "base", "messages": []}')
    for kind, make in KINDS.items():
        make(tmp_path / kind)
    for kind in (kind for kind in KINDS if _is_mistake(call.partition(" ")[0], kind)):
        try:
            status = main([word.replace("FILE", kind) for word in call.split()])
        except SystemExit as ended:
            status = int(ended.code or 0)
        said = "".join(capsys.readouterr())
        assert status == 2, f"{kind}: {said}"
        assert "Traceback" not in said
        lines = [line for line in said.splitlines() if not line.startswith(("usage:", " "))]
        assert any(kind in line or "certificate" in line for line in lines), f"{kind}: {said}"
        assert len(said) < 4000


def _is_mistake(command: str, kind: str) -> bool:
    if command == "render" and kind == "directory":
        return False
    return not (command in EMPTY_IS_FINE and kind == "empty")


@pytest.mark.parametrize("call", ["agent --model llama --listen {}", "extproc --config config --listen {}"])
def test_a_process_listens_on_no_name(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "all.yaml").write_text(CONFIG)
    with pytest.raises(SystemExit):
        main(call.format("gateway.example:9002").split())
    assert "not on a name: write 0.0.0.0:9002 for all interfaces" in capsys.readouterr().err

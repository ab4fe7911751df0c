# SPDX-License-Identifier: Apache-2.0
"""attache completion: scripts that know every command and option."""

from __future__ import annotations

import subprocess

import pytest

from attache.commands import COMMANDS
from attache.completion import main
from tests.programs import program


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_knows_commands_and_their_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([shell]) == 0
    script = capsys.readouterr().out
    for word in (*COMMANDS, "decision-log", "kv-events-port", "slo-ttft"):
        assert word in script


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["attache", "ex"], {"extproc", "explain", "explain-scaling"}),
        (["attache", "extproc", "--decision-l"], {"--decision-log"}),
    ],
)
def test_bash_completes(words: list[str], expected: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(["bash"])
    script = capsys.readouterr().out
    ask = (
        f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}\n"
        "$(complete -p attache | sed 's/.*-F \\([^ ]*\\).*/\\1/')\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run([program("bash"), "-c", script + "\n" + ask], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == expected

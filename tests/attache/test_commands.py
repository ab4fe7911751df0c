# SPDX-License-Identifier: Apache-2.0
"""The one command: it finds programs, says what was meant, and loads little."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from attache import __version__
from attache.__main__ import main, misspelt_option, usage
from attache.commands import COMMANDS, Command

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = """\
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec: {model: base, endpoints: [{address: "127.0.0.1:8001"}]}
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: llama}
spec: {modelName: llama, rules: [{targetModels: [{modelServerName: llama}]}]}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "all.yaml").write_text(CONFIG)
    return tmp_path


def test_help_lists_every_command_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    for command in COMMANDS.values():
        assert re.search(rf"^  {command.name} +{re.escape(command.summary)}$", said, re.MULTILINE)
    assert max(map(len, said.splitlines())) <= 100


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_options_with_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == main(["help", name]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: attache {name}")
    parser = COMMANDS[name].load().parser("attache")
    assert parser.description
    assert parser.description.split()[0] in said
    assert [action.dest for action in parser._actions if not action.help] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_of_every_commands_help_is_a_call_that_its_options_take(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main([name, "-h"])
    example = capsys.readouterr().out.rstrip().rpartition("\n")[2].strip()
    program, command, *words = shlex.split(example.partition(" > ")[0])
    assert (program, command) == ("attache", name)
    # ends the process if there is a mistake
    parser = COMMANDS[name].load().parser("attache")
    if COMMANDS[name].passes_options:
        parser.parse_known_args(words)
    else:
        parser.parse_args(words)


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if not command.passes_options])
def test_a_misspelt_option_of_every_command_is_told_what_was_meant(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = COMMANDS[name].load().parser("attache")
    known = [option for option in parser._option_string_actions if option.startswith("--") and option != "--help"]
    for option in known:
        wrong = f"{option[:4]}{option[3:]}x"
        assert main([name, wrong]) == 2
        said = capsys.readouterr().err
        assert f"there is no option '{wrong}'; did you mean '{option}'?" in said
        assert f"try: attache {name} --help" in said


def test_an_option_with_one_dash_is_told_of_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bundle", "-config", "a", "-out", "b"]) == 2
    assert "there is no option '-config'; did you mean '--config'?" in capsys.readouterr().err


def test_without_a_command_the_list_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert usage() in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"attache {__version__}\n"


def test_a_misspelt_command_is_told_what_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chek", "config"]) == 2
    assert "no command 'chek'; did you mean 'check'?" in capsys.readouterr().err
    assert main(["zzz"]) == 2
    assert "did you mean" not in capsys.readouterr().err


def test_a_misspelt_option_is_told_what_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["extproc", "--confg", "config"]) == 2
    assert "no option '--confg'; did you mean '--config'?" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--config=x"], ["--conf", "x"], ["--", "--confg"], ["-x"], ["x"]])
def test_options_that_exist_in_full_or_in_part_pass(words: list[str]) -> None:
    assert misspelt_option(COMMANDS["extproc"].load().parser("attache"), words) == ""


def test_check_prints_a_summary(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(config)]) == 0
    assert capsys.readouterr().out == f"{config} is valid: 1 ModelRoute, 1 ModelServer with 1 endpoint\n"


def test_check_prints_every_mistake_and_their_number(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (config / "all.yaml").write_text(CONFIG.replace("modelName: llama", "modelNam: llama").replace("8001", "80010"))
    assert main(["check", str(config)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3
    assert said[-1] == "2 mistakes"


def test_a_command_whose_extra_is_missing_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)  # as if it were not installed
    for name in [name for name in sys.modules if name.partition(".")[0] == "bench"]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["replay", "--trace", "x"]) == 2
    assert "pip install 'attache[bench]'" in capsys.readouterr().err


def test_a_module_of_ours_that_is_missing_is_no_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attache.__main__.COMMANDS", {"odd": Command("odd", "", "extproc.not_there", "")})
    with pytest.raises(ModuleNotFoundError):
        main(["odd"])


@pytest.mark.parametrize("words", [["--help"], ["check"], ["extproc", "--help"], ["bundle", "--help"]])
def test_what_needs_no_network_loads_neither_grpc_nor_numpy_nor_envoys_schema(words: list[str], config: Path) -> None:
    program = (
        "import sys; from attache.__main__ import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "sys.exit(','.join({'grpc', 'numpy', 'envoy_data_plane'} & set(sys.modules)) or 0)"
    )
    given = [*words, str(config)] if words == ["check"] else words
    done = subprocess.run([sys.executable, "-c", program, *given], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", [["explain", "--help"], ["--help"], ["top", "--help"]])
def test_a_reader_of_the_output_may_leave_as_head_does(words: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "attache", *words], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert (done.stderr, done.returncode) == ("", 141)

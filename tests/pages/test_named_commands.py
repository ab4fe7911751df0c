# SPDX-License-Identifier: Apache-2.0
"""What pages, manifests and the Makefile's help name as a command exists, with the arguments that they give it."""

from __future__ import annotations

import re
import shlex
import sys
from argparse import ArgumentParser
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from attache.__main__ import misspelt_option
from attache.commands import COMMANDS
from tests.named_commands import PAGES, ROOT, NamedCommand, named_commands

if TYPE_CHECKING:
    from collections.abc import Sequence

# definitions are generated from docstrings
MANIFESTS = sorted(
    one
    for top in ("deploy", "manifests")
    for one in (ROOT / top).rglob("*")
    if one.is_file() and "crds" not in one.parts and one.suffix != ".md"
)
MAKEFILE = (ROOT / "Makefile").read_text()
OURS = {"attache", "bench", "controller", "extproc", "tests", "tools"}


def named(program: str) -> list[NamedCommand]:
    """Each once, with a page that has it."""
    found = (one for page in (*PAGES, *MANIFESTS) for one in named_commands(page))
    return sorted({(one.words, one.is_mention): one for one in found if one.program == program}.values())


def of(program: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("command", named(program), ids=lambda one: " ".join(one.words))


class Parsed(Exception):
    """The arguments are taken."""


def expect_parses(module: str, words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of ``python -m module`` takes these arguments; it ends before it does anything."""
    real = ArgumentParser.parse_args

    def parse(self: ArgumentParser, args: Sequence[str] | None = None, namespace: None = None) -> None:
        real(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", [module, *words])
    is_package = find_spec(f"{module}.__main__") is not None if hasattr(import_module(module), "__path__") else False
    with pytest.raises(Parsed):
        import_module(f"{module}.__main__" if is_package else module).main()


@of("python")
def test_a_module_can_be_imported_and_takes_the_arguments(
    command: NamedCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    option, module, *words = command.words
    assert option == "-m"
    assert find_spec(module) is not None, f"{command.page} names {module}"
    if words and module.partition(".")[0] in OURS:
        expect_parses(module, words, monkeypatch)


def module_names() -> list[str]:
    """Modules between backticks, such as ``bench.lab.fairness``."""
    ours = re.compile(r"`((?:bench|tests|tools)(?:\.[a-z_]+)+)[ `]")
    found = {name for page in PAGES for name in ours.findall(page.read_text())}
    return sorted(name for name in found if name.rpartition(".")[2] not in {"md", "py", "toml", "yaml"})


@pytest.mark.parametrize("name", module_names())
def test_a_module_that_is_named_alone_exists(name: str) -> None:
    assert find_spec(name) is not None


@of("attache")
def test_a_command_of_ours_has_the_options(command: NamedCommand) -> None:
    name, *words = command.words
    if name.startswith("-") or name == "COMMAND":
        return
    parser = COMMANDS[name].load().parser("attache")
    if command.is_mention and not COMMANDS[name].passes_options:
        assert misspelt_option(parser, words) == "", command.page


@of("make")
def test_make_has_the_target(command: NamedCommand) -> None:
    targets = set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))
    assert {word for word in command.words if "=" not in word} <= targets, command.page


def given_to_make() -> list[tuple[str, str]]:
    """Targets with what pages and the Makefile's help give them as ARGS."""
    pages = {
        (one.words[0], word.removeprefix("ARGS="))
        for one in named("make")
        for word in one.words
        if word.startswith("ARGS=")
    }
    helps = re.findall(r"^([\w-]+):.*## .*\(ARGS=(\"[^\"]*\"|[^\s:)]+)", MAKEFILE, re.MULTILINE)
    return sorted(pages | {(target, words.strip('"')) for target, words in helps})


@pytest.mark.parametrize(("target", "words"), given_to_make())
def test_the_program_of_a_target_takes_the_arguments(target: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (recipe,) = re.findall(rf"^{target}:.*\n((?:[\t#].*\n|ifndef.*\n)*)", MAKEFILE, re.MULTILINE)
    programs = re.findall(r"\$\(RUN\) -m (bench\S*) (.*)\$\(ARGS\)", recipe)
    assert programs or "PYTEST" in recipe or target.startswith("test")
    for module, first in programs:
        before = re.sub(r"\$\(if (?:[^()]|\$\(\w+\))*\)", "", first)
        expect_parses(module, shlex.split(f"{before} {words}"), monkeypatch)


def test_commands_are_found_in_blocks_and_in_prose() -> None:
    pages = {(one.page, one.program, one.is_mention) for page in PAGES for one in named_commands(page)}
    assert pages >= {
        ("README.md", "attache", False),
        ("README.md", "make", True),
        ("CHANGELOG.md", "make", True),
        ("CHANGELOG.md", "python", True),
        ("docs/performance.md", "python", True),
    }

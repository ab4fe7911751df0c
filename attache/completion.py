# SPDX-License-Identifier: Apache-2.0
"""``attache completion``: scripts that complete commands and options in a shell, made from the parsers by shtab."""

from __future__ import annotations

import argparse
from pathlib import Path

import shtab

from attache.commands import COMMANDS

_SHELLS = ("bash", "zsh", "fish")


def parser(prog: str = "attache completion") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Print a script that completes attache's commands and options in a shell.",
        epilog=f"""to install it:
  bash  {prog} bash > ~/.local/share/bash-completion/completions/attache
  zsh   {prog} zsh > DIR/_attache      (DIR: one of $fpath)
  fish  {prog} fish > ~/.config/fish/completions/attache.fish""",
    )
    made.add_argument("shell", choices=_SHELLS, help="the shell")
    return made


def main(words: list[str], prog: str = "attache completion") -> int:
    """Print the script."""
    shell = parser(prog).parse_args(words).shell
    print(shtab.complete(all_commands_parser(), shell=shell))
    return 0


def all_commands_parser() -> argparse.ArgumentParser:
    """All commands as one parser. Commands whose extra is not installed are in it without options."""
    made = argparse.ArgumentParser(prog="attache")
    made.add_argument("--version", action="store_true", help="print the version")
    commands = made.add_subparsers()
    for command in COMMANDS.values():
        try:
            options = command.load().parser(f"attache {command.name}")
        except ModuleNotFoundError:
            commands.add_parser(command.name, help=command.summary)
            continue
        _mark_files(options)
        commands.add_parser(command.name, help=command.summary, parents=[options], add_help=False)
    return made


def _mark_files(parser: argparse.ArgumentParser) -> None:
    """shtab completes names of files and directories for arguments that are marked."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no public way to list arguments
        if action.type is Path or action.metavar in {"FILE", "DIR"}:
            action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE  # type: ignore[attr-defined] # shtab's own

# SPDX-License-Identifier: Apache-2.0
"""The command line: ``attache COMMAND``, also as ``python -m attache COMMAND``."""

from __future__ import annotations

import os
import select
import sys
from typing import TYPE_CHECKING, Final

from attache import __version__
from attache.commands import COMMANDS, GROUPS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

    from attache.commands import Command


_USAGE: Final = 2
# As shells say of a program that SIGPIPE has ended.
_READER_LEFT: Final = 128 + 13
_OURS: Final = frozenset({"attache", "extproc", "controller", "bench"})


def main(arguments: list[str] | None = None) -> int:
    """Exit status: that of the command; 2 for a command that does not exist or cannot be loaded; 141 where ``head`` or
    another reader of the output has left.
    """
    try:
        status = _main(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        # what is left of the output would be tried again at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_LEFT
    return status


def _reader_has_left() -> bool:
    """Whether it is our output that nobody reads, and not another pipe or connection."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _main(arguments: list[str] | None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    first = words[0] if words else ""
    if first in COMMANDS:
        return _run(COMMANDS[first], words[1:])
    match first:
        case "--version":
            print(f"attache {__version__}")
            return 0
        case "--help" | "-h" | "help":
            if words[1:] and words[1] in COMMANDS:
                return _run(COMMANDS[words[1]], ["--help"])
            print(usage())
            return 0
        case "":
            print(usage(), file=sys.stderr)
            return _USAGE
    what = "option" if first.startswith("-") else "command"
    return _refuse(f"there is no {what} '{first}'{suggestion(first, COMMANDS)}", "attache --help")


def usage() -> str:
    """The commands in their groups."""
    width = max(map(len, COMMANDS)) + 2
    lines = ["usage: attache COMMAND ...", "", "Turn Envoy into a gateway for large language models."]
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {one.name:{width}}{one.summary}" for one in commands)]
    return "\n".join([*lines, "", "attache COMMAND --help shows a command's options, attache --version the version."])


def _run(command: Command, words: list[str]) -> int:
    prog = f"attache {command.name}"
    try:
        return _run_installed(command, prog, words)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in _OURS or not command.extra:
            raise
        package = f"attache[{command.extra}]"
        return _refuse(f"{prog} needs the Python package '{missing}'; run: pip install '{package}'")


def _run_installed(command: Command, prog: str, words: list[str]) -> int:
    program = command.load()
    if command.has_modes and words and not words[0].startswith("-"):
        return program.main(words, prog)
    if not {"--help", "-h"}.isdisjoint(words):
        print(f"{program.parser(prog).format_help()}\nexample:\n  {prog} {command.example}")
        return 0
    if not command.passes_options:
        mistake = misspelt_option(program.parser(prog), words)
        if mistake:
            return _refuse(f"{prog}: {mistake}", f"{prog} --help")
    if command.needs_envoy:
        from attache.envoy import export_path  # noqa: PLC0415 - most commands start no Envoy

        export_path()
    return program.main(words, prog)


def suggestion(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` if a known word is close, else nothing."""
    import difflib  # noqa: PLC0415 - not when all is well

    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def misspelt_option(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """What is wrong with the first long option that ``parser`` does not have; empty if it has them all.

    argparse would first complain of required options that are missing, although one of them may just be misspelt.
    """
    known = parser._option_string_actions  # noqa: SLF001 - argparse has no public way to list options
    for word in words:
        if word == "--":
            break
        name = word.partition("=")[0]
        if name.startswith("-") and f"-{name}" in known and name not in known:
            return f"there is no option '{name}'; did you mean '-{name}'?"
        # as argparse does, a beginning of an option's name is taken for the option
        if name.startswith("--") and not any(option.startswith(name) for option in known):
            return f"there is no option '{name}'{suggestion(name, known)}"
    return ""


def _refuse(message: str, help_command: str = "") -> int:
    print(message, file=sys.stderr)
    if help_command:
        print(f"try: {help_command}", file=sys.stderr)
    return _USAGE


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""The reference page of the command line: every command with its options."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from attache.commands import GROUPS
from controller.api.crds.field_docs import wrapped
from tools.reference.kinds import MARK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attache.commands import Command

_HEAD: Final = """\
# Commands

`attache COMMAND --help` says the same. Every command exits with 0 if it succeeded and with 2 for a mistake in its
options or its configuration; where another status has a meaning, its section says so.
"""


def page() -> str:
    """The Markdown page."""
    lines = [MARK, "", _HEAD]
    for title, commands in GROUPS.items():
        lines += [f"## {title}", ""]
        for command in commands:
            lines += _section(command)
    return "\n".join(lines)


def _section(command: Command) -> Iterator[str]:
    parser = command.load().parser(f"attache {command.name}")
    yield from (f"### attache {command.name}", "", wrapped(_text(parser.description or "")), "")
    if command.extra:
        yield from (f"It needs `pip install 'attache[{command.extra}]'`.", "")
    yield from ("| argument | meaning |", "|---|---|")
    for action in parser._actions:  # noqa: SLF001 - argparse has no public way to list arguments
        if action.help is not argparse.SUPPRESS and action.dest != "help":
            yield f"| {_name(action)} | {_text(_expanded(action, parser.prog))} |"
    yield ""
    if (parser.epilog or "").startswith("Exit status"):
        yield from (wrapped(_text(parser.epilog or "")), "")


def _name(action: argparse.Action) -> str:
    """``--listen ADDRESS``, or the choices in place of the metavar."""
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if not action.option_strings:
        return f"`{metavar}`"
    option = action.option_strings[-1]
    return f"`{option}`" if action.nargs == 0 else f"`{option} {metavar}`"


def _expanded(action: argparse.Action, prog: str) -> str:
    """The help with its defaults; choices are added, because the table has no usage line."""
    said = (action.help or "") % {**vars(action), "prog": prog}
    choices = f"; one of {', '.join(map(str, action.choices))}" if action.choices else ""
    return said + choices


def _text(text: str) -> str:
    """Words that Markdown or HTML would read as markup are escaped."""
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;").replace("{}", "`{}`")

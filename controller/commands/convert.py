# SPDX-License-Identifier: Apache-2.0
"""``attache convert``: objects of other autoscalers as ours, on standard output."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from extproc.api.documents import read, split
from extproc.api.errors import ConfigInvalid, Mistake
from extproc.cli.system import counted, report

if TYPE_CHECKING:
    from collections.abc import Iterator

    from controller.convert.fields import Object

_LIST: Final = "List"


def parser(prog: str = "attache convert") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=(
            "Print VariantAutoscalings of llm-d and AutoscalingPolicies (with their Bindings) of Kthena as"
            " AutoscalingPolicies and AutoscalingPolicyBindings of ours. What cannot be carried over is told on"
            " standard error."
        ),
        epilog="Exit status: 0, or 2 for a mistake in the options or in a file.",
    )
    made.add_argument("files", nargs="+", metavar="FILE", help="YAML or JSON; - reads standard input")
    return made


def main(words: list[str], prog: str) -> int:
    """Exit status: 0, or 2 for a mistake in the options or in a file."""
    options = parser(prog).parse_args(words)
    # types of all kinds take a quarter of a second to load: not for --help
    from controller.convert.convert import convert  # noqa: PLC0415
    from controller.convert.fields import Invalid  # noqa: PLC0415

    try:
        found = convert(list(_objects(options.files)))
    except ConfigInvalid as error:
        return report(error)
    except Invalid as error:
        print(_plain(str(error)), file=sys.stderr)
        return 2
    for text in found.warnings:
        print(f"warning: {_plain(text)}", file=sys.stderr)
    print(yaml.dump_all(found.objects, Dumper=_Dumper, sort_keys=False, width=118, explicit_start=True), end="")
    made = counted(len(found.objects), "object")
    print(f"{made} written, {counted(len(found.warnings), 'warning')}", file=sys.stderr)
    return 0


def _plain(text: str) -> str:
    """One line that cannot command a terminal: whoever converts a file need not be its author."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


class _Dumper(yaml.SafeDumper):
    """Everything in full: people read it."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ANN401, ARG002 - as the base class has it
        return True


def _objects(files: list[str]) -> Iterator[Object]:
    """Those of lists, too; raises ConfigInvalid."""
    for file in files:
        for document in split(file, _text(file)):
            value, findings = read(document)
            if findings:
                raise ConfigInvalid(document.mistakes(findings))
            if value is None:
                continue
            items = (
                value.get("items") if isinstance(value, dict) and str(value.get("kind")).endswith(_LIST) else [value]
            )
            for item in items if isinstance(items, list) else []:
                if not isinstance(item, dict) or not item.get("kind") or not item.get("apiVersion"):
                    raise ConfigInvalid(document.mistakes([((), "is no object; write apiVersion, kind and metadata")]))
                yield item


def _text(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid([Mistake(file, 0, "", f"cannot be read: {error}")]) from None

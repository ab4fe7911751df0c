# SPDX-License-Identifier: Apache-2.0
"""``attache convert``: objects of other autoscalers as ours, on standard output.

What is converted is checked as ours; other objects are named.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import yaml

from controller.api.autoscaling_binding import AutoscalingPolicyBinding
from controller.api.autoscaling_policy import AutoscalingPolicy
from controller.convert import kthena_autoscaling, variant_autoscaling
from controller.convert.foreign_fields import (
    ConversionFailed,
    ConversionResult,
    Object,
    check_object_shape,
    object_title,
)
from extproc.api.config_errors import ConfigInvalid, Mistake, escape_unprintable
from extproc.api.quantities import decode_quantity
from extproc.api.yaml_documents import parse_document, split_documents
from extproc.cli.common import pluralize, print_mistakes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_OURS: Final = {"AutoscalingPolicy": AutoscalingPolicy, "AutoscalingPolicyBinding": AutoscalingPolicyBinding}
_LIST: Final = "List"


def convert(objects: Sequence[Object]) -> ConversionResult:
    """Raises Invalid where an object cannot be understood, or has something that ours may not have."""
    variants, policies, warnings = [], [], []
    for thing in objects:
        check_object_shape(thing)
        group, kind = str(thing.get("apiVersion", "")).partition("/")[0], thing.get("kind")
        if group in variant_autoscaling.GROUPS and kind == variant_autoscaling.KIND:
            variants.append((thing, object_title(thing)))
        elif group == kthena_autoscaling.GROUP and kind in kthena_autoscaling.KINDS:
            policies.append((thing, object_title(thing)))
        else:
            warnings.append(f"{object_title(thing)}: left out; it is not a kind that can be converted")
    found = [variant_autoscaling.convert(variants), kthena_autoscaling.convert(policies)]
    made = tuple(thing for one in found for thing in one.objects)
    for thing in made:
        validate_objects(thing)
    twice = next((name for name, count in Counter(map(object_title, made)).items() if count > 1), None)
    if twice is not None:
        raise ConversionFailed(f"{twice}: two of these would be written; convert them one by one, or rename one")
    warned = (*(text for one in found for text in one.warnings), *warnings)
    return ConversionResult(made, tuple(dict.fromkeys(warned)))


def validate_objects(thing: Object) -> None:
    """By our own types; raises Invalid."""
    try:
        msgspec.convert(
            {"metadata": thing["metadata"], "spec": thing["spec"]}, _OURS[thing["kind"]], dec_hook=decode_quantity
        )
    except msgspec.ValidationError as error:
        raise ConversionFailed(f"{object_title(thing)}: cannot be written here: {error}") from None


def parser(prog: str = "attache convert") -> argparse.ArgumentParser:
    """The options of the command."""
    made = argparse.ArgumentParser(
        prog=prog,
        description=(
            "Print VariantAutoscalings of llm-d and AutoscalingPolicies (with their Bindings) of Kthena as"
            " AutoscalingPolicies and AutoscalingPolicyBindings of ours. Fields that cannot be converted are "
            "reported on standard error."
        ),
        epilog="Exit status: 0, or 2 for a mistake in the options or in a file.",
    )
    made.add_argument("files", nargs="+", metavar="FILE", help="YAML or JSON; - reads standard input")
    return made


def main(words: list[str], prog: str) -> int:
    """Exit status: 0, or 2 for a mistake in the options or in a file."""
    options = parser(prog).parse_args(words)
    # types of all kinds take a quarter of a second to load: not for --help
    from controller.convert.foreign_fields import ConversionFailed  # noqa: PLC0415

    try:
        found = convert(list(_objects(options.files)))
    except ConfigInvalid as error:
        return print_mistakes(error)
    except ConversionFailed as error:
        print(escape_unprintable(str(error)), file=sys.stderr)
        return 2
    for text in found.warnings:
        print(f"warning: {escape_unprintable(text)}", file=sys.stderr)
    print(yaml.dump_all(found.objects, Dumper=_ReadableDumper, sort_keys=False, width=118, explicit_start=True), end="")
    made = pluralize(len(found.objects), "object")
    print(f"{made} written, {pluralize(len(found.warnings), 'warning')}", file=sys.stderr)
    return 0


class _ReadableDumper(yaml.SafeDumper):
    """Everything in full: people read it."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ANN401, ARG002 - as the base class has it
        return True


def _objects(files: list[str]) -> Iterator[Object]:
    """Those of lists, too; raises ConfigInvalid."""
    for file in files:
        for document in split_documents(file, _text(file)):
            value, findings = parse_document(document)
            if findings:
                raise ConfigInvalid(document.locate_mistakes(findings))
            if value is None:
                continue
            items = (
                value.get("items") if isinstance(value, dict) and str(value.get("kind")).endswith(_LIST) else [value]
            )
            for item in items if isinstance(items, list) else []:
                if not isinstance(item, dict) or not item.get("kind") or not item.get("apiVersion"):
                    raise ConfigInvalid(
                        document.locate_mistakes([((), "is no object; write apiVersion, kind and metadata")])
                    )
                yield item


def _text(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid([Mistake(file, 0, "", f"cannot be read: {error}")]) from None

# SPDX-License-Identifier: Apache-2.0
"""A preset's rules and the settings as arguments and environment of a container."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from controller.models.runtimes.settings import NAMES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from controller.api.serving_runtime import Arguments

# JSON in arguments has braces, too, but never a bare word in them.
_PLACE: Final = re.compile(r"(?<!\$)\{([A-Za-z]+)\}")
_ANY: Final = "*"


class Words(NamedTuple):
    """``args``: of the command line. ``env``: as a container has it."""

    args: list[str]
    env: list[dict[str, Any]]


def words(rules: Sequence[Arguments], settings: Mapping[str, str]) -> Words:
    """What the rules that hold add, in their order."""
    holding = [one for one in rules if _holds(one.when, settings)]
    env = [msgspec.to_builtins(one) for rule in holding for one in rule.env]
    filled = [{**one, "value": _filled(one["value"], settings)} if one.get("value") else one for one in env]
    return Words(
        args=[_filled(one, settings) for rule in holding for one in rule.args],
        env=[{name: value for name, value in one.items() if value is not None} for one in filled],
    )


def unknown_settings(rules: Iterable[Arguments]) -> Iterator[str]:
    """Names in rules that are no settings: a rule with one never holds, or leaves the place unfilled."""
    for rule in rules:
        texts = [*rule.args, *(one.value or "" for one in rule.env)]
        used = {*rule.when, *(name for text in texts for name in _PLACE.findall(text))}
        yield from sorted(used - NAMES)


def _holds(when: Mapping[str, str], settings: Mapping[str, str]) -> bool:
    return all(name in settings and value in (_ANY, settings[name]) for name, value in when.items())


def _filled(text: str, settings: Mapping[str, str]) -> str:
    return _PLACE.sub(lambda match: settings.get(match[1], match[0]), text)

# SPDX-License-Identifier: Apache-2.0
"""Reading foreign objects so that no field is lost unnoticed, and writing ours."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Final

import msgspec

from extproc.api.quantities import Duration
from extproc.api.spec import API_VERSION, DEFAULT_NAMESPACE

Object = Mapping[str, Any]
_QUANTITY: Final = re.compile(r"^([+-]?[0-9]*\.?[0-9]+)([numkMGTPE]|[KMGTPE]i)?$")
_POWERS: Final = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY: Final = {f"{letter}i": 1024**power for power, letter in enumerate("KMGTPE", start=1)}
# Written by kubectl and the API server, of no use elsewhere.
_NOT_CARRIED: Final = ("kubectl.kubernetes.io/last-applied-configuration",)
_LONGEST_NAME: Final = 20
# Longest text about a value.
_LONGEST_SHOWN: Final = 80
_MOST: Final = 2**63


class ConversionResult(msgspec.Struct, frozen=True):
    """``objects``: ours, ready to be applied. ``warnings``: what differs from before, each with the object that it is
    about.
    """

    objects: tuple[Object, ...]
    warnings: tuple[str, ...] = ()


class ConversionFailed(Exception):
    """A field is missing or of the wrong type; the message names it."""


class FieldReader:
    """An object's fields, each taken once; ``left``: those not taken. ``where``: the path to them."""

    def __init__(self, value: object, where: str) -> None:
        """Raises Invalid if ``value`` is no mapping."""
        if not isinstance(value, Mapping):
            raise ConversionFailed(f"{where}: not an object")
        self.where = where
        self._value = value
        self._taken: set[str] = set()
        self._below: list[FieldReader] = []

    def __contains__(self, name: str) -> bool:
        return self._value.get(name) is not None

    def pop(self, name: str, otherwise: object = None) -> Any:  # noqa: ANN401 - plain data of any kind
        """The value of a field."""
        self._taken.add(name)
        found = self._value.get(name)
        return otherwise if found is None else found

    def pop_required(self, name: str) -> str:
        """A text that must be there; raises Invalid."""
        found = self.pop(name)
        if not isinstance(found, str) or not found:
            raise ConversionFailed(f"{self.where}.{name}: is missing")
        return found

    def pop_number(self, name: str, otherwise: int) -> int:
        """A whole number; raises Invalid."""
        found = self.pop(name, otherwise)
        if not isinstance(found, int) or isinstance(found, bool) or not -_MOST <= found < _MOST:
            raise ConversionFailed(f"{self.where}.{name}: {_shown(found)} is not a whole number of 64 bits")
        return found

    def pop_fields(self, name: str) -> FieldReader:
        """An object in a field; an empty one if it is not there."""
        return self._follow(FieldReader(self.pop(name, {}), f"{self.where}.{name}"))

    def pop_objects(self, name: str) -> list[FieldReader]:
        """The objects of a list."""
        found = self.pop(name, [])
        if not isinstance(found, Sequence) or isinstance(found, str):
            raise ConversionFailed(f"{self.where}.{name}: not a list")
        return [self._follow(FieldReader(one, f"{self.where}.{name}[{index}]")) for index, one in enumerate(found)]

    def pop_object_mapping(self, name: str) -> dict[str, FieldReader]:
        """The objects of a mapping."""
        found = self.pop(name, {})
        if not isinstance(found, Mapping):
            raise ConversionFailed(f"{self.where}.{name}: not an object")
        return {str(key): self._follow(FieldReader(one, f"{self.where}.{name}.{key}")) for key, one in found.items()}

    def unused_warnings(self) -> list[str]:
        """A warning for each field that was not taken, here and below."""
        mine = [
            f"{self.where}.{name}: not carried over; there is nothing like it here"
            for name, value in self._value.items()
            if name not in self._taken and value is not None
        ]
        return [*mine, *(text for one in self._below for text in one.unused_warnings())]

    def _follow(self, below: FieldReader) -> FieldReader:
        self._below.append(below)
        return below


def check_object_shape(thing: Object) -> None:
    """Raises Invalid where an object is not as every object of Kubernetes is."""
    _expect(thing, ("apiVersion", "kind"), str, "")
    metadata = _expect(thing, ("metadata",), Mapping, "")
    if metadata is not None:
        _expect(metadata, ("name", "namespace"), str, "metadata.")
        for field in ("labels", "annotations"):
            texts = _expect(metadata, (field,), Mapping, "metadata.")
            if not all(isinstance(one, str) for pair in (texts or {}).items() for one in pair):
                raise ConversionFailed(f"metadata.{field}: is not a mapping of texts")


def _expect(block: Object, names: Sequence[str], kind: type, where: str) -> Any:  # noqa: ANN401 - plain data
    """The value of the last name; raises Invalid for one of another kind."""
    found = None
    for name in names:
        found = block.get(name)
        if found is not None and not isinstance(found, kind):
            raise ConversionFailed(f"{where}{name}: {_shown(found)} is not {'a text' if kind is str else 'an object'}")
    return found


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _LONGEST_SHOWN else f"{shown[:_LONGEST_SHOWN]}..."


def object_title(thing: Object) -> str:
    """``Kind namespace/name``, for messages."""
    metadata = thing.get("metadata") or {}
    name, namespace = metadata.get("name", "?"), metadata.get("namespace", DEFAULT_NAMESPACE)
    return f"{thing.get('kind', '?')} {namespace}/{name}"


def new_object(kind: str, like: Object, name: str, spec: Mapping[str, Any]) -> Object:
    """An object of ours with the namespace, labels and annotations of ``like``."""
    metadata = like.get("metadata") or {}
    found: dict[str, Any] = {"name": name}
    if metadata.get("namespace"):
        found["namespace"] = metadata["namespace"]
    for field in ("labels", "annotations"):
        kept = {key: value for key, value in (metadata.get(field) or {}).items() if key not in _NOT_CARRIED}
        if kept:
            found[field] = kept
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": found, "spec": dict(spec)}


def parse_quantity(text: object, where: str) -> float:
    """A Kubernetes quantity as a number; raises Invalid."""
    found = _QUANTITY.match(str(text))
    try:
        if found is None:
            number, unit = Decimal(str(text)), ""
        else:
            number, unit = Decimal(found[1]), found[2] or ""
        if unit in _BINARY:
            number *= _BINARY[unit]
        value = float(number.scaleb(_POWERS.get(unit, 0)))
    except (InvalidOperation, ValueError):
        raise ConversionFailed(f"{where}: {_shown(text)} is not a quantity") from None
    if not math.isfinite(value):
        raise ConversionFailed(f"{where}: {_shown(text)} is not a finite quantity")
    return value


def parse_duration(text: object, where: str) -> float:
    """A duration as Go writes them; raises Invalid."""
    if not isinstance(text, str):
        raise ConversionFailed(f"{where}: {_shown(text)} is not a duration, such as 30s")
    try:
        return float(Duration(text))
    except ValueError as error:
        raise ConversionFailed(f"{where}: {error}") from None


def to_object_name(text: str) -> str:
    """A name of Kubernetes from any text, such as a model's."""
    found = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return found[:63].rstrip("-") or "model"


def unique_target_names(names: Sequence[str]) -> list[str]:
    """Short, different names of targets, each as near to its object's as can be."""
    # in their order, and by how many were tried of each
    found: dict[str, None] = {}
    counts = Counter[str]()
    for name in names:
        short = to_object_name(name)
        short = short if short[0].isalpha() else f"t-{short}"
        # ends differ more often than beginnings: llama-70b-h100, llama-70b-l40s
        if len(short) > _LONGEST_NAME:
            end = short[-_LONGEST_NAME:]
            # whole words, if there are any
            short = (end.partition("-")[2] or end).lstrip("-0123456789")
        unique, stem = short or "target", short[: _LONGEST_NAME - 3].rstrip("-")
        while unique in found:
            counts[stem] += 1
            unique = f"{stem}-{counts[stem] + 1}"
        found[unique] = None
    return list(found)

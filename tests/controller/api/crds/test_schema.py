# SPDX-License-Identifier: Apache-2.0
"""Structs become the structural schemas that Kubernetes takes."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
import pytest

from controller.api.crds.schema import crd_schema
from extproc.api.quantities import ByteSize, Duration
from extproc.api.spec import Spec, exactly_one, list_map_keys


class Inner(Spec, frozen=True):
    """One of several. ``name``: of it."""

    CEL: ClassVar = (exactly_one("name", "size"),)

    name: str | None = None
    size: ByteSize = ByteSize("1Mi")


class Outer(Spec, frozen=True):
    """The whole."""

    needed: Annotated[int, msgspec.Meta(gt=0, le=9)]
    wait_time: Duration = Duration("1s")
    one: Inner = Inner()
    changed: Inner = Inner(size=ByteSize("2Mi"))
    some: Annotated[tuple[Inner, ...], msgspec.Meta(max_length=3, extra_json_schema=list_map_keys("name"))] = ()
    words: dict[str, str] = msgspec.field(default_factory=dict)
    anything: dict[str, Any] | None = None
    number_or_null: float | None = 0.5
    choice: Literal["A", "B"] = "A"
    either: int | Annotated[str, msgspec.Meta(pattern="^[0-9]+%$")] = 1


def properties(cls: type) -> dict[str, Any]:
    found: dict[str, Any] = crd_schema(cls)["properties"]
    return found


def test_types_bounds_and_defaults() -> None:
    found = properties(Outer)
    assert found["needed"] == {
        "type": "integer",
        "format": "int64",
        "minimum": 0,
        "exclusiveMinimum": True,
        "maximum": 9,
    }
    assert found["choice"] == {"type": "string", "enum": ["A", "B"], "default": "A"}
    assert found["waitTime"]["default"] == "1s"
    assert crd_schema(Outer)["required"] == ["needed"]


def test_a_struct_that_is_a_default_is_an_empty_object_or_what_differs() -> None:
    found = properties(Outer)
    assert found["one"]["default"] == {}
    assert found["changed"]["default"] == {"size": "2Mi"}


def test_empty_collections_are_no_defaults() -> None:
    found = properties(Outer)
    assert "default" not in found["some"]
    assert "default" not in found["words"]


def test_null_is_kept_only_where_it_is_not_the_default_anyway() -> None:
    found = properties(Outer)
    assert found["numberOrNull"] == {"type": "number", "default": 0.5, "nullable": True}
    assert "nullable" not in found["anything"]


def test_lists_say_what_tells_their_items_apart() -> None:
    some = properties(Outer)["some"]
    assert some["maxItems"] == 3
    assert some["x-kubernetes-list-type"] == "map"
    assert some["x-kubernetes-list-map-keys"] == ["name"]


def test_rules_and_meanings_stand_beside_the_fields() -> None:
    inner = properties(Outer)["some"]["items"]
    assert inner["description"] == "One of several."
    assert inner["properties"]["name"]["description"] == "Of it"
    (rule,) = inner["x-kubernetes-validations"]
    assert rule == {
        "rule": "(has(self.name) ? 1 : 0) + (has(self.size) ? 1 : 0) == 1",
        "message": "write exactly one of name, size",
    }


def test_a_number_or_text_has_the_checks_of_both() -> None:
    either = properties(Outer)["either"]
    assert either["x-kubernetes-int-or-string"] is True
    assert either["pattern"] == "^[0-9]+%$"
    assert "type" not in either


def test_free_maps_keep_what_they_are_given() -> None:
    assert properties(Outer)["anything"] == {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def test_a_type_that_kubernetes_has_no_schema_for_is_said() -> None:
    class Odd(Spec, frozen=True):
        """Of two types."""

        field: bool | str = True

    with pytest.raises(TypeError, match="boolean"):
        crd_schema(Odd)

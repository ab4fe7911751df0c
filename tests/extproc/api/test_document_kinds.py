# SPDX-License-Identifier: Apache-2.0
"""The table of kinds and the Snapshot have the same fields."""

from __future__ import annotations

from types import GenericAlias
from typing import get_origin, get_type_hints

from extproc.api.config_snapshot import Snapshot
from extproc.api.document_kinds import DOCUMENT_KINDS
from extproc.api.picker_config import EndpointPickerConfig


def test_a_snapshot_has_a_field_of_its_own_type_for_each_kind() -> None:
    tuples = {name: hint for name, hint in get_type_hints(Snapshot).items() if get_origin(hint) is tuple}
    kinds = [kind for kind in DOCUMENT_KINDS if kind.field and kind.document is not EndpointPickerConfig]
    assert {kind.field: GenericAlias(tuple, (kind.document, ...)) for kind in kinds} == tuples

# SPDX-License-Identifier: Apache-2.0
"""Which listeners a route is attached to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from extproc.api.workload import ParentReference


def is_attached(parent_refs: Iterable[ParentReference], listener: str) -> bool:
    """Whether a route with these references is served by the listener of that name.

    In a directory ``sectionName`` alone counts, as there are no gateways. A route that names no listener is served by
    all.
    """
    refs = tuple(parent_refs)
    return not refs or any(ref.section_name in (None, listener) for ref in refs)

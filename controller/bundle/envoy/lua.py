# SPDX-License-Identifier: Apache-2.0
"""Scripts of Envoy's Lua filters: texts with marks such as ``@MODEL@``, and what takes their places."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envoy_data_plane.envoy.config.core.v3 import DataSource
from envoy_data_plane.envoy.extensions.filters.http.lua.v3 import Lua

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def lua_filter_config(script: str, marks: Mapping[str, str]) -> Lua:
    """The filter's configuration."""
    return Lua(default_source_code=DataSource(inline_string=fill_placeholders(script, marks)))


def fill_placeholders(script: str, marks: Mapping[str, str]) -> str:
    """``script`` with each mark replaced, in this order: what takes the place of one may have later ones in it."""
    for mark, text in marks.items():
        script = script.replace(mark, text)
    return script


def lua_string(value: bytes) -> str:
    """Within quotation marks, whatever it has in it."""
    return "".join(f"\\{byte:03d}" for byte in value)


def lua_set(names: Iterable[str]) -> str:
    """The inside of a table in which each of these names is true."""
    return ", ".join(f'["{name}"] = true' for name in names)


def lua_bool(*, value: bool) -> str:
    """As Lua writes it."""
    return "true" if value else "false"

# SPDX-License-Identifier: Apache-2.0
"""Packages with plugins, as pip would install them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

HEAD = """
import msgspec
import numpy as np
from extproc.scheduling.registry import PluginType

"""


def install_plugin(site: Path, source: str, entry_points: dict[str, str], module: str = "my_package") -> Path:
    """Into a directory for ``sys.path``; ``entry_points``: of the group, by plugin type. Returns the module's file."""
    metadata = site / f"{module}-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
    lines = "".join(f"{name} = {where}\n" for name, where in entry_points.items())
    (metadata / "entry_points.txt").write_text(f"[attache.scheduling]\n{lines}")
    file = site / f"{module}.py"
    file.write_text(source)
    return file

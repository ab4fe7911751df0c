# SPDX-License-Identifier: Apache-2.0
"""Libraries that only some schemes need, imported when such a URI is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from controller.agents.downloader.core.errors import LibraryMissing


def library(module: str, extra: str) -> Any:  # noqa: ANN401 - modules have no common type
    """The module; raises LibraryMissing, which says what to install."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or module).partition(".")[0]
        raise LibraryMissing(
            f"this needs the Python package '{package}'; run: pip install 'attache[{extra}]'"
        ) from error

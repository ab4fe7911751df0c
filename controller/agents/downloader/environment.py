# SPDX-License-Identifier: Apache-2.0
"""Settings and credentials from variables or from files of mounted Secrets that they name, and optional libraries."""

from __future__ import annotations

import hashlib
import os
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from controller.agents.downloader.core.errors import LibraryMissing, UriInvalid

if TYPE_CHECKING:
    from collections.abc import Mapping

_WHO: Final = re.compile(
    r"(?:HF|HUGGING_FACE|AWS|GOOGLE|AZURE|ATTACHE|DOCKER|REGISTRY|SSL|REQUESTS|CURL)_.*|.*_proxy", re.IGNORECASE
)
_NAMES_FILE: Final = re.compile(r"_FILE$|_CREDENTIALS$|^DOCKER_CONFIG$")
_DOCKER_FILES: Final = ("config.json", ".dockerconfigjson")


def _content(path: Path) -> str:
    """Empty if there is none to read."""
    for one in (path, *(path / name for name in _DOCKER_FILES)):
        try:
            return one.read_text()
        except (OSError, UnicodeDecodeError):
            continue
    return ""


class EnvironmentReader:
    """``NAME``, or what is in the file that ``NAME_FILE`` names. Never printed."""

    def __init__(self, variables: Mapping[str, str] = os.environ) -> None:
        self._variables = variables

    def get(self, *names: str) -> str:
        """The first of these that is set; empty if none is. Raises UriInvalid for a file that cannot be read."""
        for name in names:
            if self._variables.get(name):
                return self._variables[name].strip()
            file = self._variables.get(f"{name}_FILE")
            if file:
                try:
                    return Path(file).read_text().strip()
                except (OSError, UnicodeDecodeError) as error:
                    raise UriInvalid(f"{name}_FILE cannot be read: {error}") from error
        return ""

    def source_settings_digest(self) -> str:
        """A digest of all settings that identify us to sources or lead to them, and of the files that these name."""
        mine = {name: value for name, value in self._variables.items() if _WHO.fullmatch(name)}
        files = {name: _content(Path(path)) for name, path in mine.items() if _NAMES_FILE.search(name)}
        return hashlib.sha256(repr((sorted(mine.items()), sorted(files.items()))).encode()).hexdigest()

    def is_on(self, name: str) -> bool:
        """Whether a switch is set."""
        return self.get(name).lower() in ("1", "true", "yes", "on")


def import_optional(module: str, extra: str) -> Any:  # noqa: ANN401 - modules have no common type
    """The module; raises LibraryMissing with the package to install."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or module).partition(".")[0]
        raise LibraryMissing(
            f"this needs the Python package '{package}'; run: pip install 'attache[{extra}]'"
        ) from error

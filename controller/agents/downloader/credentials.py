# SPDX-License-Identifier: Apache-2.0
"""Settings and credentials from the environment, or from files of mounted Secrets that it names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from controller.agents.downloader.core.errors import UriInvalid

if TYPE_CHECKING:
    from collections.abc import Mapping


class Environment:
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

    def is_on(self, name: str) -> bool:
        """Whether a switch is set."""
        return self.get(name).lower() in ("1", "true", "yes", "on")

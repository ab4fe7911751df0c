# SPDX-License-Identifier: Apache-2.0
"""How far a download is, as others may read it."""

from __future__ import annotations

from typing import Literal

import msgspec

Phase = Literal["Resolving", "Waiting", "Downloading", "Unpacking", "Ready", "Failed"]


class Progress(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """``bytes_done`` counts what was there before, too. ``bytes_fetched``: by this process, repeats included.

    ``reason`` and ``message``: of a failure, or of an attempt that is repeated.
    """

    phase: Phase
    uri: str
    revision: str = ""
    key: str = ""
    files_total: int = 0
    files_done: int = 0
    bytes_total: int = 0
    bytes_done: int = 0
    bytes_fetched: int = 0
    retries: int = 0
    reason: str = ""
    message: str = ""

    def sentence(self) -> str:
        """For people, in a pod's condition and in the log."""
        if self.phase in ("Failed", "Ready", "Waiting", "Resolving") and self.message:
            return self.message
        share = f" ({100 * self.bytes_done // self.bytes_total}%)" if self.bytes_total else ""
        size = f"{self.bytes_done / 1e6:.0f} of {self.bytes_total / 1e6:.0f} MB{share}"
        return f"{self.phase} {self.uri}: {self.files_done} of {self.files_total} files, {size}"

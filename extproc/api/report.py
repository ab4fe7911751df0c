# SPDX-License-Identifier: Apache-2.0
"""What a process that follows a configuration directory uses of it, in its own words

extproc and the bundle's writer serve it as JSON, at ``/config`` of the address where their metrics are. Whoever writes
the directory reads there, file by file, what of it is in use.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import xxhash

REPORT_PATH = "/config"


class ConfigReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """``files``: those in use, by name, as ``content_digest`` has their content. ``refused``: why newer ones are not
    used, empty if they are. ``waiting``: what newer ones wait for, if that is known. ``missing_keys``: files and
    variables with keys that cannot be read, with the reason of each. ``has_nothing``: it serves nothing at all, as
    after a restart with files that it refuses.
    """

    files: Mapping[str, str] = {}
    refused: str = ""
    waiting: str = ""
    missing_keys: tuple[str, ...] = ()
    has_nothing: bool = False


def content_digest(content: bytes) -> str:
    """Of a file; equal for equal content."""
    return xxhash.xxh3_64_hexdigest(content)

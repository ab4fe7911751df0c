# SPDX-License-Identifier: Apache-2.0
"""What goes wrong on a node, on request."""

from __future__ import annotations

from bench.cluster.node.images import ImageMissing, repository


class NodeFaults:
    """Faults that new starts of containers meet. Killing processes and losing the node: see ``Node``."""

    def __init__(self) -> None:
        self._missing_images: set[str] = set()
        self._crashing: set[str] = set()
        self._slow_s: dict[str, float] = {}

    def image_never_pulls(self, image: str) -> None:
        """Containers with this image (without tag) wait with ErrImagePull, then ImagePullBackOff."""
        self._missing_images.add(repository(image))

    def crash_at_start(self, key: str) -> None:
        """The containers of the pod ``namespace/name`` end with status 1 as soon as they start: CrashLoopBackOff."""
        self._crashing.add(key)

    def slow_start(self, image: str, for_s: float) -> None:
        """Containers with this image start so much later, as if they were pulled or loaded weights."""
        self._slow_s[repository(image)] = for_s

    def heal(self) -> None:
        """Nothing goes wrong with starts any more."""
        self._missing_images.clear()
        self._crashing.clear()
        self._slow_s.clear()

    def check_image(self, image: str) -> None:
        """Raises ImageMissing."""
        if repository(image) in self._missing_images:
            raise ImageMissing(f'failed to pull image "{image}": it was made to be missing')

    def crashes(self, key: str) -> bool:
        """Whether this pod's containers crash at once."""
        return key in self._crashing

    def start_delay_s(self, image: str) -> float:
        """How much later containers with this image start."""
        return self._slow_s.get(repository(image), 0.0)

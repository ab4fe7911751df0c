# SPDX-License-Identifier: Apache-2.0
"""Pods by label, so that those of a target are found without looking at all of a namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from controller.roles.scaling.pods import PodView

_Bucket = tuple[str, str, str]


class PodIndex:
    """Only labels that somebody has asked for are indexed: pods have many more."""

    def __init__(self) -> None:
        self._pods: dict[str, PodView] = {}
        self._labels: set[str] = set()
        self._keys: dict[_Bucket, set[str]] = {}

    def put(self, key: str, pod: PodView | None) -> None:
        """A pod as last heard; None once it is gone."""
        before = self._pods.pop(key, None)
        if before is not None:
            for bucket in self._buckets(before, self._labels):
                found = self._keys[bucket]
                found.discard(key)
                if not found:
                    del self._keys[bucket]
        if pod is not None:
            self._pods[key] = pod
            self._add(pod, self._labels)

    def of(self, namespace: str, selector: Mapping[str, str]) -> list[PodView]:
        """Pods with all of these labels, by name; none where ``selector`` is empty."""
        missing = selector.keys() - self._labels
        if missing:
            self._labels |= missing
            for pod in self._pods.values():
                self._add(pod, missing)
        if not selector:
            return []
        buckets = [self._keys.get((namespace, name, value)) for name, value in selector.items()]
        found = [one for one in buckets if one]
        if len(found) < len(buckets):
            return []
        keys = min(found, key=len)
        return [self._pods[key] for key in sorted(keys) if all(key in one for one in found)]

    def _add(self, pod: PodView, labels: Iterable[str]) -> None:
        for bucket in self._buckets(pod, labels):
            self._keys.setdefault(bucket, set()).add(pod.key)

    def _buckets(self, pod: PodView, labels: Iterable[str]) -> list[_Bucket]:
        namespace = pod.key.partition("/")[0]
        return [(namespace, name, pod.labels[name]) for name in labels if name in pod.labels]

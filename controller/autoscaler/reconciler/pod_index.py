# SPDX-License-Identifier: Apache-2.0
"""Pods by label, so that those of a target are found without looking at all of a namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from controller.autoscaler.reconciler.pods import PodView

_Bucket = tuple[str, str, str]
_Query = tuple[str, tuple[tuple[str, str], ...]]


class PodIndex:
    """Only labels that somebody has asked for are indexed: pods have many more. What was found is kept until one of its
    pods changes, or another one comes that has one of its labels.
    """

    def __init__(self) -> None:
        self._pods: dict[str, PodView] = {}
        self._labels: set[str] = set()
        self._keys: dict[_Bucket, set[str]] = {}
        self._found: dict[_Query, list[PodView]] = {}
        self._queries: dict[_Bucket, set[_Query]] = {}
        # grows with each change
        self.version = 0

    def put(self, key: str, pod: PodView | None) -> None:
        """A pod as last heard; None once it is gone."""
        self.version += 1
        before = self._pods.pop(key, None)
        if before is not None:
            for bucket in self._buckets(before, self._labels):
                found = self._keys[bucket]
                found.discard(key)
                if not found:
                    del self._keys[bucket]
                self._forget(bucket)
        if pod is not None:
            self._pods[key] = pod
            for bucket in self._add(pod, self._labels):
                self._forget(bucket)

    def of(self, namespace: str, selector: Mapping[str, str]) -> list[PodView]:
        """Pods with all of these labels, by name; none where ``selector`` is empty. The list must not be changed."""
        query = namespace, tuple(selector.items())
        found = self._found.get(query)
        if found is None and selector:
            found = self._found[query] = self._looked_up(namespace, selector)
            for name, value in selector.items():
                self._queries.setdefault((namespace, name, value), set()).add(query)
        return [] if found is None else found

    def _looked_up(self, namespace: str, selector: Mapping[str, str]) -> list[PodView]:
        missing = selector.keys() - self._labels
        if missing:
            self._labels |= missing
            for pod in self._pods.values():
                self._add(pod, missing)
        buckets = [self._keys.get((namespace, name, value)) for name, value in selector.items()]
        full = [one for one in buckets if one]
        if len(full) < len(buckets):
            return []
        keys = min(full, key=len)
        return [self._pods[key] for key in sorted(keys) if all(key in one for one in full)]

    def _forget(self, bucket: _Bucket) -> None:
        for query in self._queries.pop(bucket, ()):
            self._found.pop(query, None)

    def _add(self, pod: PodView, labels: Iterable[str]) -> list[_Bucket]:
        buckets = self._buckets(pod, labels)
        for bucket in buckets:
            self._keys.setdefault(bucket, set()).add(pod.key)
        return buckets

    def _buckets(self, pod: PodView, labels: Iterable[str]) -> list[_Bucket]:
        namespace = pod.key.partition("/")[0]
        return [(namespace, name, pod.labels[name]) for name in labels if name in pod.labels]

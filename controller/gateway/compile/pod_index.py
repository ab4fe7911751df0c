# SPDX-License-Identifier: Apache-2.0
"""Which pods belong to which ModelServer or pool, followed change by change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.api.spec import namespace_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from controller.gateway.compile.pods import Pod


class PodIndex:
    """All pods, and those that each owner selects. Owners are named ``namespace/name``, and select in their
    namespace.
    """

    def __init__(self) -> None:
        self._pods: dict[str, dict[str, Pod]] = {}
        self._labels: dict[str, dict[str, Mapping[str, str]]] = {}
        self._selected: dict[str, dict[str, Pod]] = {}

    def select(self, owner: str, labels: Mapping[str, str] | None) -> None:
        """From now on ``owner`` has the pods with all of ``labels``; None: it is gone."""
        namespace = namespace_of(owner)
        owners = self._labels.setdefault(namespace, {})
        if labels is None:
            owners.pop(owner, None)
            self._selected.pop(owner, None)
        elif owners.get(owner) != labels:
            owners[owner] = labels
            pods = self._pods.get(namespace, {})
            self._selected[owner] = {key: pod for key, pod in pods.items() if pod.has(labels)}

    def put(self, key: str, pod: Pod | None) -> list[str]:
        """A pod as it is now, None if it is gone; the owners that this concerns."""
        namespace = namespace_of(key)
        pods = self._pods.setdefault(namespace, {})
        if pods.get(key) == pod:
            return []
        if pod is None:
            del pods[key]
        else:
            pods[key] = pod
        concerned = []
        for owner, labels in self._labels.get(namespace, {}).items():
            selected = self._selected[owner]
            if pod is not None and pod.has(labels):
                selected[key] = pod
            elif selected.pop(key, None) is None:
                continue
            concerned.append(owner)
        return concerned

    def of(self, owner: str) -> Collection[Pod]:
        """The pods that ``owner`` selects."""
        return self._selected.get(owner, {}).values()

# SPDX-License-Identifier: Apache-2.0
"""Pods of engines, the endpoints that they are to requests, and which belong to which ModelServer or pool."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from extproc.api.spec import namespace_of, object_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

PRICE: Final = "attache.dev/price"
DRAIN: Final = "attache.dev/drain"
# Since when the manager wants a pod to go.
DRAINING: Final = "attache.dev/draining"
# Characters of what people have written wrongly.
_MOST_SHOWN: Final = 40
_OURS: Final = "attache.dev/"
# On endpoints: which pod it is, for people who look at a decision.
POD_LABEL: Final = "attache.dev/pod"
# On endpoints: the node, for pairs that should be on one; a pod's own label goes first.
HOST_LABEL: Final = "kubernetes.io/hostname"


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """What counts of a pod. ``ip``: empty until it has one. ``is_leaving``: it is being deleted, its annotation
    ``attache.dev/drain`` says ``true``, or it has the annotation ``attache.dev/draining``. ``price``: that of its
    annotation ``attache.dev/price``, if it is one.
    ``wrong_price``: what that annotation says instead; empty if nothing is wrong.
    """

    namespace: str
    name: str
    labels: Mapping[str, str]
    ip: str
    is_ready: bool
    is_leaving: bool
    price: float | None = None
    wrong_price: str = ""

    @property
    def key(self) -> str:
        """``namespace/name``."""
        return object_key(self.namespace, self.name)

    def has(self, labels: Mapping[str, str]) -> bool:
        """Whether all of ``labels`` are the pod's."""
        return all(self.labels.get(name) == value for name, value in labels.items())

    def endpoints(self, ports: Sequence[int]) -> Iterator[Mapping[str, Any]]:
        """What requests can be sent to: a ready pod's ports, as documents have endpoints."""
        if not self.ip or not self.is_ready:
            return
        host = f"[{self.ip}]" if ":" in self.ip else self.ip
        for number in ports:
            endpoint: dict[str, Any] = {
                "address": f"{host}:{number}",
                "labels": {**self.labels, POD_LABEL: self.name},
            }
            if self.price is not None:
                endpoint["price"] = self.price
            if self.is_leaving:
                endpoint["draining"] = True
            yield endpoint


def pod_of(thing: Mapping[str, Any]) -> Pod:
    """A pod as the API server has it."""
    metadata, status, node = thing["metadata"], thing.get("status") or {}, (thing.get("spec") or {}).get("nodeName")
    annotations = metadata.get("annotations") or {}
    ready = any(one.get("type") == "Ready" and one.get("status") == "True" for one in status.get("conditions") or ())
    price = _price(annotations.get(PRICE))
    wrong_price = ascii(annotations[PRICE][:_MOST_SHOWN])[1:-1] if price is None and PRICE in annotations else ""
    return Pod(
        namespace=metadata.get("namespace", "default"),
        name=metadata["name"],
        labels={**({HOST_LABEL: node} if node else {}), **(metadata.get("labels") or {})},
        ip=_ip(status.get("podIP")),
        is_ready=ready and status.get("phase") == "Running",
        is_leaving="deletionTimestamp" in metadata or annotations.get(DRAIN) == "true" or DRAINING in annotations,
        price=price,
        wrong_price=wrong_price,
    )


def pod_endpoints(ports: Sequence[int], pods: Iterable[Pod]) -> list[Mapping[str, Any]]:
    """Sorted, so that equal pods give equal files. Pods in a node's own network may share an address: one of them
    counts.
    """
    found = {
        one["address"]: one
        for pod in sorted(pods, key=lambda pod: pod.name, reverse=True)
        for one in pod.endpoints(ports)
    }
    return [found[address] for address in sorted(found)]


def trimmed_pod(thing: Mapping[str, Any]) -> dict[str, Any]:
    """What ``pod_of`` reads: a tenth of the whole."""
    metadata, status = thing["metadata"], thing.get("status") or {}
    kept = ("name", "namespace", "uid", "resourceVersion", "labels", "deletionTimestamp")
    slim = {name: metadata[name] for name in kept if name in metadata}
    slim["annotations"] = {
        name: value for name, value in (metadata.get("annotations") or {}).items() if name.startswith(_OURS)
    }
    conditions = [one for one in status.get("conditions") or () if one.get("type") == "Ready"]
    return {
        "apiVersion": thing.get("apiVersion", "v1"),
        "kind": thing.get("kind", "Pod"),
        "metadata": slim,
        "spec": {"nodeName": (thing.get("spec") or {}).get("nodeName")},
        "status": {"podIP": status.get("podIP"), "phase": status.get("phase"), "conditions": conditions},
    }


def _ip(text: str | None) -> str:
    """Empty for what is no address."""
    try:
        return str(ipaddress.ip_address(text or ""))
    except ValueError:
        return ""


def _price(text: str | None) -> float | None:
    """None for what is no positive number: whoever may annotate pods must not be able to stop their server."""
    try:
        price = float(text or "")
    except ValueError:
        return None
    return price if 0 < price < math.inf else None


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

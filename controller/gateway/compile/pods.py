# SPDX-License-Identifier: Apache-2.0
"""Pods of engines, the endpoints that they are to requests, and which belong to which ModelServer or pool."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.api.drain_mark import DRAIN, DRAINING
from extproc.api.addresses import join_host_port
from extproc.api.spec import namespace_of, object_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

PRICE: Final = "attache.dev/price"
# Of a port.
_MOST_DIGITS: Final = 5
# Characters of what people have written wrongly.
_MOST_SHOWN: Final = 40
_OURS: Final = "attache.dev/"
# Which of the pool's ports the pod serves, as ``8000,8001``: llm-d's, and its name before llm-d 0.8.
ACTIVE_PORTS: Final = ("llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports")
# On endpoints: the pod's name, for people who read a decision.
POD_LABEL: Final = "attache.dev/pod"
# On endpoints: the node, for pairs that should be on one; a pod's own label takes precedence.
HOST_LABEL: Final = "kubernetes.io/hostname"


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a pod that matter. ``ip``: empty until it has one. ``is_leaving``: it is being deleted, or has the
    annotation ``attache.dev/drain: "true"`` or ``attache.dev/draining``. ``price``: of its annotation
    ``attache.dev/price``. ``wrong_price``: the annotation's value if it is no price; empty otherwise.
    ``active_ports``: those that it serves, by its annotation ``llm-d.ai/active-ports``; None: all.
    """

    namespace: str
    name: str
    labels: Mapping[str, str]
    ip: str
    is_ready: bool
    is_leaving: bool
    price: float | None = None
    wrong_price: str = ""
    active_ports: frozenset[int] | None = None

    @property
    def key(self) -> str:
        """``namespace/name``."""
        return object_key(self.namespace, self.name)

    def has_labels(self, labels: Mapping[str, str]) -> bool:
        """Whether all of ``labels`` are the pod's."""
        return all(self.labels.get(name) == value for name, value in labels.items())

    def is_selected(self, selectors: Iterable[Mapping[str, str]]) -> bool:
        """Whether all labels of one of these are the pod's."""
        return any(self.has_labels(labels) for labels in selectors)

    def endpoints(self, ports: Sequence[int]) -> Iterator[Mapping[str, Any]]:
        """What requests can be sent to: a ready pod's ports, as documents have endpoints."""
        if not self.ip or not self.is_ready:
            return
        for number in ports:
            if self.active_ports is not None and number not in self.active_ports:
                continue
            endpoint: dict[str, Any] = {
                "address": join_host_port(self.ip, number),
                "labels": {**self.labels, POD_LABEL: self.name},
            }
            if self.price is not None:
                endpoint["price"] = self.price
            if self.is_leaving:
                endpoint["draining"] = True
            yield endpoint


def parse_pod(thing: Mapping[str, Any]) -> Pod:
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
        active_ports=_active_ports(annotations),
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


def trimmed_engine_pod(thing: Mapping[str, Any]) -> dict[str, Any]:
    """What ``parse_pod`` reads, in its place: a fifteenth of the whole, and still what compilation takes, a pod as the
    API server has it.
    """
    metadata, status = thing["metadata"], thing.get("status") or {}
    kept = ("name", "namespace", "uid", "resourceVersion", "labels", "deletionTimestamp")
    slim = {name: metadata[name] for name in kept if name in metadata}
    slim["annotations"] = {
        name: value
        for name, value in (metadata.get("annotations") or {}).items()
        if name.startswith(_OURS) or name in ACTIVE_PORTS
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


def _active_ports(annotations: Mapping[str, str]) -> frozenset[int] | None:
    """As in llm-d, what is no number is left out; so a pod whose annotation has none serves nothing."""
    text = next((annotations[name] for name in ACTIVE_PORTS if name in annotations), None)
    if text is None:
        return None
    parts = (part.strip() for part in text.split(","))
    return frozenset(int(part) for part in parts if part.isascii() and part.isdigit() and len(part) <= _MOST_DIGITS)


def _price(text: str | None) -> float | None:
    """None unless it is a positive number: an invalid annotation of a pod must not stop its ModelServer."""
    try:
        price = float(text or "")
    except ValueError:
        return None
    return price if 0 < price < math.inf else None


class PodIndex:
    """All pods, and those that each owner selects. Owners are named ``namespace/name``, and select in their
    namespace: pods with all labels of one of its selectors.
    """

    def __init__(self) -> None:
        self._pods: dict[str, dict[str, Pod]] = {}
        self._selectors: dict[str, dict[str, Sequence[Mapping[str, str]]]] = {}
        self._selected: dict[str, dict[str, Pod]] = {}

    def set_selectors(self, owner: str, *selectors: Mapping[str, str]) -> None:
        """From now on ``owner`` has the pods of ``selectors``; without one it has none."""
        namespace = namespace_of(owner)
        owners = self._selectors.setdefault(namespace, {})
        if not selectors:
            owners.pop(owner, None)
            self._selected.pop(owner, None)
        elif owners.get(owner) != selectors:
            owners[owner] = selectors
            pods = self._pods.get(namespace, {})
            self._selected[owner] = {key: pod for key, pod in pods.items() if pod.is_selected(selectors)}

    def set_pod(self, key: str, pod: Pod | None) -> list[str]:
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
        for owner, selectors in self._selectors.get(namespace, {}).items():
            selected = self._selected[owner]
            if pod is not None and pod.is_selected(selectors):
                selected[key] = pod
            elif selected.pop(key, None) is None:
                continue
            concerned.append(owner)
        return concerned

    def find_pods(self, owner: str) -> Collection[Pod]:
        """The pods that ``owner`` selects."""
        return self._selected.get(owner, {}).values()

# SPDX-License-Identifier: Apache-2.0
"""Nearness of endpoints to the one that was picked before: for pairs that hand over a KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import msgspec
import numpy as np

from extproc.scheduling.labels import rows_where

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.endpoints.table import Bools, Floats, Ints
    from extproc.scheduling.picker import View

EXTRACTOR_TYPE: Final = "topology-extractor"
# From the nearest to the farthest; the last of the scores is for endpoints that share none of them.
LEVELS: Final = ("host", "rack", "zone", "region")
_SCORES: Final = (1.0, 0.2, 0.05, 0.02, 0.0)
_APART: Final = len(LEVELS)


class TopologyExtractor(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``topology-extractor``: the labels of endpoints that say where they are. ``host``: the same as
    ``hostname``.

    The gateway role gives a pod without the label ``kubernetes.io/hostname`` its node's name there.
    """

    hostname: str = ""
    host: str = ""
    rack: str = ""
    zone: str = ""
    region: str = ""

    @property
    def labels(self) -> tuple[str, ...]:
        """Host, rack, zone, region."""
        return (
            self.hostname or self.host or "kubernetes.io/hostname",
            self.rack or "topology.kubernetes.io/rack",
            self.zone or "topology.kubernetes.io/zone",
            self.region or "topology.kubernetes.io/region",
        )


class TopologyAffinityFilter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``topology-affinity-filter``: endpoints on the host, or in the rack, zone or region, of the peer.

    The peer is the endpoint that the handler of prefill and decode picked before; without one,
    ``peerTopologyHeader`` of a gateway's request says where it is, as ``host=a,rack=b,zone=c,region=d``.
    """

    min_affinity: Literal["", "host", "rack", "zone", "region"] = "host"
    topology_producer_name: str = ""
    peer_topology_header: str = ""

    def with_plugins(self, others: Mapping[str, Any]) -> NearPeer:
        """With the labels of the extractor that it names."""
        farthest = LEVELS.index(self.min_affinity or "host")
        labels = labels_of_levels(others, self.topology_producer_name)
        return NearPeer(labels, farthest, self.peer_topology_header.lower())


class TopologyAffinityScorer(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``topology-affinity-scorer``: 1 on the peer's host, 0.2 in its rack, 0.05 in its zone, 0.02 in its
    region.

    The peer is that of ``topology-affinity-filter``. Elsewhere, and without a peer, the score is 0.
    """

    topology_producer_name: str = ""
    peer_topology_header: str = ""

    def with_plugins(self, others: Mapping[str, Any]) -> NearnessToPeer:
        """With the labels of the extractor that it names."""
        return NearnessToPeer(labels_of_levels(others, self.topology_producer_name), self.peer_topology_header.lower())


class NearPeer(msgspec.Struct, frozen=True):
    """The filter. ``labels``: of each level. ``farthest``: the level that is near enough."""

    labels: tuple[str, ...]
    farthest: int = 0
    header: str = ""

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps all endpoints if none is near, or if nobody knows where the peer is: it must not make requests fail."""
        levels = _levels(view, self.labels, self.header)
        if levels is None:
            return candidates
        near = candidates & (levels <= self.farthest)
        return near if near.any() else candidates


class NearnessToPeer(msgspec.Struct, frozen=True):
    """The scorer. ``labels``: of each level."""

    SCORES: ClassVar = np.array(_SCORES)

    labels: tuple[str, ...]
    header: str = ""

    def score(self, view: View, candidates: Bools) -> Floats:
        """By the nearest level that is shared."""
        levels = _levels(view, self.labels, self.header)
        if levels is None:
            return np.zeros(candidates.size)
        scores: Floats = self.SCORES[levels]
        return scores


def labels_of_levels(others: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The label of each of LEVELS: by the extractor that is called ``name``, else by the first one of the file, else
    the usual labels.
    """
    found = others.get(name)
    if not isinstance(found, TopologyExtractor):
        found = next((one for one in others.values() if isinstance(one, TopologyExtractor)), TopologyExtractor())
    return found.labels


def _levels(view: View, labels: tuple[str, ...], header: str) -> Ints | None:
    """The nearest level that each row shares with the peer; None: it is not known where that is.

    A missing label is no value: it equals no other missing one.
    """
    places = _peer(view, labels, header)
    if not any(places):
        return None
    levels: Ints = np.full(len(view.table.configs), _APART, np.int64)
    for level in reversed(range(_APART)):
        label, place = labels[level], places[level]
        if place:
            levels[_rows_at(view, label, place)] = level
    return levels


def _rows_at(view: View, label: str, place: str) -> Bools:
    return rows_where(view.table, ("is", label, place), lambda labels: labels.get(label) == place)


def _peer(view: View, labels: tuple[str, ...], header: str) -> tuple[str, ...]:
    """Where the peer is, by level; empty where that is not known."""
    if view.peer_row is not None:
        known = view.table.configs[view.peer_row].labels
        return tuple(known.get(label, "") for label in labels)
    # a client that nobody vouches for does not say where its request goes
    text = view.request.headers.get(header, "") if header and view.request.is_trusted else ""
    said = dict(pair.split("=", 1) for pair in text.split(",") if "=" in pair)
    return tuple(said.get(level, "") for level in LEVELS)

# SPDX-License-Identifier: Apache-2.0
"""Filters and scorers by endpoint labels: roles, selectors, context lengths, kinds of GPU, nearness in a topology."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

import msgspec
import numpy as np

from extproc.api.spec import requirement_holds
from extproc.scheduling.endpoint_masks import label_values, rows_where

if TYPE_CHECKING:
    from extproc.endpoints.table import Bools, Floats, Ints
    from extproc.scheduling.picker import View

ROLE_LABEL: Final = "llm-d.ai/role"
RANGE_LABEL: Final = "llm-d.ai/context-length-range"
NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]
EXTRACTOR_TYPE: Final = "topology-extractor"
# From the nearest to the farthest; the last of the scores is for endpoints that share none of them.
LEVELS: Final = ("host", "rack", "zone", "region")
_SCORES: Final = (1.0, 0.2, 0.05, 0.02, 0.0)
_APART: Final = len(LEVELS)


class Requirement(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """One expression of a Kubernetes label selector."""

    key: NonEmpty
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Whether ``labels`` satisfy it. As in Kubernetes, a missing key satisfies NotIn."""
        return requirement_holds(self.key, self.operator, self.values, labels)


class LabelSelectorFilter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``label-selector-filter`` (formerly ``by-label-selector``): a Kubernetes label selector."""

    match_labels: dict[str, str] = {}
    match_expressions: tuple[Requirement, ...] = ()

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps the endpoints for which all matchLabels and matchExpressions hold."""
        required = self.match_labels.items()

        def holds(labels: Mapping[str, str]) -> bool:
            return required <= labels.items() and all(one.holds(labels) for one in self.match_expressions)

        return candidates & rows_where(view.table, (tuple(sorted(required)), self.match_expressions), holds)


class LabelValueFilter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``by-label`` filter: a label with one of ``validValues``; without it only if ``allowsNoLabel``."""

    label: NonEmpty
    valid_values: tuple[str, ...] = ()
    allows_no_label: bool = False

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps no endpoint if none has such a label."""

        def holds(labels: Mapping[str, str]) -> bool:
            return labels[self.label] in self.valid_values if self.label in labels else self.allows_no_label

        return candidates & rows_where(view.table, self, holds)


class PrefillRoleFilter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``prefill-filter``: the label ``llm-d.ai/role`` is a role that includes prefill."""

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Excludes endpoints without the label."""
        roles = ("prefill", "encode-prefill", "prefill-decode", "both", "encode-prefill-decode")
        return LabelValueFilter(ROLE_LABEL, roles).keep(view, candidates)


class DecodeRoleFilter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``decode-filter``: the label ``llm-d.ai/role`` is a role that includes decode, or is missing."""

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps endpoints without the label."""
        roles = ("decode", "prefill-decode", "both", "encode-prefill-decode")
        return LabelValueFilter(ROLE_LABEL, roles, allows_no_label=True).keep(view, candidates)


class EncodeRoleFilter(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``encode-filter``: the label ``llm-d.ai/role`` is a role that includes encode."""

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Excludes endpoints without the label."""
        return LabelValueFilter(ROLE_LABEL, ("encode", "encode-prefill", "encode-prefill-decode")).keep(
            view, candidates
        )


class HeaderLabelAffinityScorer(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``header-label-affinity-scorer``: 1 if the label has the header's value, else 0."""

    WITHOUT_EFFECT: ClassVar = MappingProxyType(
        {"stampResponseHeader": "answers do not carry the label; a client that is to return it must know it"}
    )
    TOLD: ClassVar = "answers do not carry the chosen engine's label in the header, as they do in llm-d"

    header_name: NonEmpty
    label_key: NonEmpty

    def score(self, view: View, candidates: Bools) -> Floats:
        """0 for all endpoints without the header."""
        value = view.request.headers.get(self.header_name.lower())
        if not value:
            return np.zeros(candidates.size)
        key = ("is", self.label_key, value)
        return rows_where(view.table, key, lambda labels: labels.get(self.label_key) == value).astype(np.float64)


class ContextLengthAware(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``context-length-aware``: endpoints labelled with a range of prompt lengths, ``min-max`` in tokens.

    Inside the range: ``0.3 + 0.7 * (0.7 / (1 + width / 10000) + 0.3 * headroom / width)`` with the headroom to its
    upper end; a range of one length scores 1. Outside: ``0.3 / (1 + distance / 1000)``. Without the label: 0.5. A label
    that cannot be read: 0, as a range that includes no length.
    """

    WITHOUT_EFFECT: ClassVar = MappingProxyType(
        {"reusableTokensProducerName": "KV caches are not pulled from peers, so the whole prompt counts"}
    )

    label: NonEmpty = RANGE_LABEL
    enable_filtering: bool = False

    def keep(self, view: View, candidates: Bools) -> Bools:
        """With ``enableFiltering``, exclude endpoints whose range does not include the prompt's length."""
        if not self.enable_filtering:
            return candidates
        least, most = self._ranges(view)
        tokens = view.request.input_tokens
        return candidates & ~((tokens < least) | (tokens > most))

    def score(self, view: View, candidates: Bools) -> Floats:
        """Narrow ranges that include the prompt's length score highest."""
        least, most = self._ranges(view)
        tokens = view.request.input_tokens
        scores = np.full(candidates.size, 0.5)
        for row in (candidates & ~np.isnan(least)).nonzero()[0]:
            low, high = float(least[row]), float(most[row])
            width = high - low
            if low <= tokens <= high:
                fit = 0.7 / (1 + width / 10_000) + 0.3 * (high - tokens) / width if width else 1.0
                scores[row] = 0.3 + 0.7 * fit
            else:
                distance = low - tokens if tokens < low else tokens - high
                scores[row] = 0.3 / (1 + distance / 1000)
        return scores

    def _ranges(self, view: View) -> tuple[Floats, Floats]:
        table = view.table

        def read() -> Floats:
            return np.array([_ends(one.labels.get(self.label)) for one in table.configs]).T

        least, most = table.cached_column(("range", self.label), read)
        return least, most


def context_range(text: str | None) -> tuple[float, float] | None:
    """The ends of a range of prompt lengths, written ``min-max`` in tokens; None if it cannot be read."""
    low, separator, high = (text or "").partition("-")
    ends = low.strip(), high.strip()
    if not separator or not all(end.isascii() and end.isdigit() for end in ends) or int(ends[0]) > int(ends[1]):
        return None
    return float(ends[0]), float(ends[1])


def _ends(text: str | None) -> tuple[float, float]:
    """NaN without a label: such an endpoint takes any length. With one that cannot be read it takes none."""
    if text is None:
        return np.nan, np.nan
    return context_range(text) or (np.inf, -np.inf)


class LabelAttribute(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """A label of endpoints that is called ``attributeKey``."""

    label: NonEmpty
    attribute_key: NonEmpty


class LabelProducer(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``label-producer``: labels of endpoints that are attributes, for ``endpoint-attribute-weight-scorer``.

    ``label`` and ``attributeKey`` are one of them, as releases before had it. ``valueType`` has no effect: values are
    compared as text.
    """

    labels: tuple[LabelAttribute, ...] = ()
    label: str = ""
    attribute_key: str = ""
    value_type: Literal["", "string", "number", "numeric"] = ""

    def label_of(self, attribute: str) -> str:
        """The label that is called ``attribute``; empty: none."""
        if attribute == self.attribute_key:
            return self.label
        return next((one.label for one in self.labels if one.attribute_key == attribute), "")


class AttributeWeightParameters(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``endpoint-attribute-weight-scorer``: ``weight / highest weight`` of an attribute's value.

    The attribute is one of the file's ``label-producer``. A value without a weight, and an endpoint without the
    attribute, have the lowest one.
    """

    attribute_key: NonEmpty
    weights: Annotated[dict[str, Annotated[float, msgspec.Meta(gt=0)]], msgspec.Meta(min_length=1)]
    producer: str = ""

    def with_plugins(self, others: Mapping[str, Any]) -> LabelWeightScorer:
        """With the label that a producer calls so."""
        named = others.get(self.producer)
        producers = [named] if isinstance(named, LabelProducer) else others.values()
        found = (one.label_of(self.attribute_key) for one in producers if isinstance(one, LabelProducer))
        highest = max(self.weights.values())
        scores = {value: weight / highest for value, weight in self.weights.items()}
        return LabelWeightScorer(next(filter(None, found), ""), scores, min(scores.values()))


class LabelWeightScorer(msgspec.Struct, frozen=True):
    """The scorer: each value of the label with its score, and ``other`` for all other endpoints."""

    label: str
    scores: Mapping[str, float]
    other: float = 0.0

    def score(self, view: View, candidates: Bools) -> Floats:
        """The score of each endpoint's value."""
        if not self.label:
            return np.full(candidates.size, self.other)
        # by endpoints, not by weights: a file may list many values that none has
        return np.array([self.scores.get(value, self.other) for value in label_values(view.table, self.label)])


class TopologyExtractor(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``topology-extractor``: the labels of endpoints that give their location. ``host``: the same as
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

    The peer is the endpoint that the handler of prefill and decode picked before; without one, ``peerTopologyHeader``
    of a gateway's request has its location, as ``host=a,rack=b,zone=c,region=d``.
    """

    min_affinity: Literal["", "host", "rack", "zone", "region"] = "host"
    topology_producer_name: str = ""
    peer_topology_header: str = ""

    def with_plugins(self, others: Mapping[str, Any]) -> NearPeerFilter:
        """With the labels of the extractor that it names."""
        farthest = LEVELS.index(self.min_affinity or "host")
        labels = topology_level_labels(others, self.topology_producer_name)
        return NearPeerFilter(labels, farthest, self.peer_topology_header.lower())


class TopologyAffinityScorer(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``topology-affinity-scorer``: 1 on the peer's host, 0.2 in its rack, 0.05 in its zone, 0.02 in its
    region.

    The peer is that of ``topology-affinity-filter``. Elsewhere, and without a peer, the score is 0.
    """

    topology_producer_name: str = ""
    peer_topology_header: str = ""

    def with_plugins(self, others: Mapping[str, Any]) -> PeerNearnessScorer:
        """With the labels of the extractor that it names."""
        return PeerNearnessScorer(
            topology_level_labels(others, self.topology_producer_name), self.peer_topology_header.lower()
        )


class NearPeerFilter(msgspec.Struct, frozen=True):
    """The filter. ``labels``: of each level. ``farthest``: the level that is near enough."""

    labels: tuple[str, ...]
    farthest: int = 0
    header: str = ""

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps all endpoints if none is near, or if the peer's place is unknown: it must not make requests fail."""
        levels = _levels(view, self.labels, self.header)
        if levels is None:
            return candidates
        near = candidates & (levels <= self.farthest)
        return near if near.any() else candidates


class PeerNearnessScorer(msgspec.Struct, frozen=True):
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


def topology_level_labels(others: Mapping[str, Any], name: str) -> tuple[str, ...]:
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
    # an untrusted client must not choose where its request goes
    text = view.request.headers.get(header, "") if header and view.request.is_trusted else ""
    pairs = dict(pair.split("=", 1) for pair in text.split(",") if "=" in pair)
    return tuple(pairs.get(level, "") for level in LEVELS)

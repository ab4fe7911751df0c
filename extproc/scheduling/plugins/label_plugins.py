# SPDX-License-Identifier: Apache-2.0
"""Filters and scorers by endpoint labels: roles, selectors, context lengths."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

import msgspec
import numpy as np

from extproc.api.spec import requirement_holds
from extproc.scheduling.labels import rows_where

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.endpoints.table import Bools, Floats
    from extproc.scheduling.picker import View

ROLE_LABEL: Final = "llm-d.ai/role"
RANGE_LABEL: Final = "llm-d.ai/context-length-range"

NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]


class Requirement(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """One expression of a Kubernetes label selector."""

    key: NonEmpty
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Whether ``labels`` satisfy it. As in Kubernetes, a missing key satisfies NotIn."""
        return requirement_holds(self.key, self.operator, self.values, labels)


class LabelSelector(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``label-selector-filter`` (formerly ``by-label-selector``): a Kubernetes label selector."""

    match_labels: dict[str, str] = {}
    match_expressions: tuple[Requirement, ...] = ()

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps the endpoints for which all matchLabels and matchExpressions hold."""
        required = self.match_labels.items()

        def holds(labels: Mapping[str, str]) -> bool:
            return required <= labels.items() and all(one.holds(labels) for one in self.match_expressions)

        return candidates & rows_where(view.table, (tuple(sorted(required)), self.match_expressions), holds)


class ByLabel(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``by-label`` filter: a label with one of ``validValues``; without it only if ``allowsNoLabel``."""

    label: NonEmpty
    valid_values: tuple[str, ...] = ()
    allows_no_label: bool = False

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps no endpoint if none has such a label."""

        def holds(labels: Mapping[str, str]) -> bool:
            return labels[self.label] in self.valid_values if self.label in labels else self.allows_no_label

        return candidates & rows_where(view.table, self, holds)


class PrefillRole(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``prefill-filter``: the label ``llm-d.ai/role`` is a role that includes prefill."""

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Excludes endpoints without the label."""
        roles = ("prefill", "encode-prefill", "prefill-decode", "both", "encode-prefill-decode")
        return ByLabel(ROLE_LABEL, roles).keep(view, candidates)


class DecodeRole(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``decode-filter``: the label ``llm-d.ai/role`` is a role that includes decode, or is missing."""

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps endpoints without the label."""
        roles = ("decode", "prefill-decode", "both", "encode-prefill-decode")
        return ByLabel(ROLE_LABEL, roles, allows_no_label=True).keep(view, candidates)


class EncodeRole(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``encode-filter``: the label ``llm-d.ai/role`` is a role that includes encode."""

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Excludes endpoints without the label."""
        return ByLabel(ROLE_LABEL, ("encode", "encode-prefill", "encode-prefill-decode")).keep(view, candidates)


class HeaderLabelAffinity(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
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


class ContextLength(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
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

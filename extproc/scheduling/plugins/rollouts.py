# SPDX-License-Identifier: Apache-2.0
"""Screeners: which endpoints a request may see at all, before any profile runs."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np

from extproc.scheduling.labels import has_labels
from extproc.scheduling.plugins.handlers import Disaggregation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.endpoints.table import Bools
    from extproc.scheduling.framework import ProfileHandler
    from extproc.scheduling.picker import View

NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]


class RequiredRoles(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Roles that a revision needs; the form of older releases."""

    values: tuple[NonEmpty, ...] = ()


class RevisionGating(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Keeps both endpoints of a pair on one revision, unless ``mode`` is ``disabled``.

    ``revisionHeaderName``: a request's header that names its revision. ``requiredRoles`` and ``requireRoles``,
    ``roleLabelKey`` and ``disableCoordination`` are accepted without effect: a revision without a prefill endpoint
    prefills on its decode endpoints.
    """

    mode: Literal["sum", "max-role", "disabled"] = "sum"
    revision_label_key: str = ""
    revision_header_name: str = ""
    role_label_key: str = ""
    required_roles: tuple[NonEmpty, ...] = ()
    require_roles: RequiredRoles = RequiredRoles()
    disable_coordination: bool = False

    @property
    def label(self) -> str:
        """The label that names an endpoint's revision."""
        return self.revision_label_key or "disaggregatedset.x-k8s.io/revision"


class HeaderSelector(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """With mode ``strict``, a request's header must equal the label ``labelKey`` of its endpoints."""

    header_name: NonEmpty
    label_key: NonEmpty
    name: str = ""
    mode: Literal["strict", "prefer"] = "strict"


class RolloutScreener(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``disaggregatedset-rollout-screener``: endpoints of the revision that a request names, in every profile.

    Pairs of prefill and decode are of one revision, as with ``groupKey`` of ``disagg-profile-handler``; a groupKey of
    the file goes before it. Without a header, revisions share requests by the load of their endpoints, not by their
    numbers. A header that names no endpoint's label leaves none.
    """

    WITHOUT_EFFECT: ClassVar = MappingProxyType({"scope": "all endpoints of the ModelServer are looked at"})
    TOLD: ClassVar = (
        "revisions share requests by the load of their endpoints, not by their numbers; answers do not carry labels"
    )

    revision_gating: RevisionGating = RevisionGating(mode="disabled")
    header_selectors: tuple[HeaderSelector, ...] = ()

    def with_plugins(self, others: Mapping[str, Any]) -> Rollout:
        """The screener itself, with what each header must equal."""
        del others
        gating = self.revision_gating
        labels = [(one.header_name, one.label_key) for one in self.header_selectors if one.mode == "strict"]
        if gating.revision_header_name:
            labels.insert(0, (gating.revision_header_name, gating.label))
        return Rollout(
            tuple((header.lower(), label) for header, label in labels),
            "" if gating.mode == "disabled" else gating.label,
        )


class Rollout(msgspec.Struct, frozen=True):
    """The screener. ``labels``: by header in lower case, the label that it must equal. ``group_key``: the label that
    both endpoints of a pair share; empty: none.
    """

    labels: tuple[tuple[str, str], ...] = ()
    group_key: str = ""

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps the endpoints whose labels are those that the request's headers name."""
        headers = view.request.headers
        required = {label: value for header, label in self.labels if (value := headers.get(header, ""))}
        return candidates & has_labels(view.table, required) if required else candidates

    def paired(self, handler: ProfileHandler) -> ProfileHandler:
        """``handler`` with pairs of one revision, if it makes pairs and the file does not say how."""
        if self.group_key and isinstance(handler, Disaggregation) and not handler.group_key:
            return msgspec.structs.replace(handler, group_key=self.group_key)
        return handler


class EndpointPin(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``endpoint-pin-screener``: only the endpoint that the header ``x-llm-d-pin-host-port`` names."""

    TOLD: ClassVar = "any client that reaches the gateway can pin its request; let the gateway remove the header"

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps no endpoint if the header names another address."""
        address = view.request.headers.get("x-llm-d-pin-host-port", "").strip()
        if not address:
            return candidates
        row = view.table.row_of(address)
        only = np.zeros(candidates.size, np.bool_)
        if row is not None:
            only[row] = True
        return candidates & only

    def paired(self, handler: ProfileHandler) -> ProfileHandler:
        """The handler as it is."""
        return handler

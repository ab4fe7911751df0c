# SPDX-License-Identifier: Apache-2.0
"""Profile handlers and the deciders of disaggregated serving; screeners, which run before any profile."""

from __future__ import annotations

import random
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from extproc.refusals import BadRequest, NoEndpoint
from extproc.scheduling.endpoint_masks import label_groups, rows_with_labels
from extproc.scheduling.framework import PrefillDecider, Profile
from extproc.scheduling.picker import Pick, PluginFailed, View
from extproc.scheduling.plugins.ineffective_parameters import (
    INDEX_SIZE,
    NEVER_READ,
    NEVER_USED,
    NO_ENCODE_STAGE,
    ONE_INDEX,
    RANKS_ARE_ENDPOINTS,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.endpoints.table import Bools
    from extproc.scheduling.framework import ProfileHandler

Tokens = Annotated[float, msgspec.Meta(ge=0)]
NonEmpty = Annotated[str, msgspec.Meta(min_length=1)]
# Why a request is not prefilled by an endpoint of its own.
_NOT_WANTED: Final = "the decider keeps prefill with decode"
_NO_PREFILL: Final = "the prefill profile found no endpoint"


class SingleProfileHandler(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``single-profile-handler``: runs the only profile."""

    # as in the example of llm-d's own page about file-discovery, which its plugin does not read
    WITHOUT_EFFECT: ClassVar = MappingProxyType(dict.fromkeys(("scorer", "picker"), NEVER_READ))

    def needs(self, profiles: Mapping[str, Profile]) -> str | None:
        """An error message unless there is exactly one profile."""
        return (
            None
            if len(profiles) == 1
            else "takes exactly one scheduling profile; use a header or disagg handler for more"
        )

    def run(
        self, view: View, profiles: Mapping[str, Profile], deciders: Mapping[str, PrefillDecider], rng: random.Random
    ) -> Pick:
        """Run the profile."""
        del deciders
        (profile,) = profiles.values()
        return profile.pick(view, rng=rng)


class HeaderProfileHandler(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``header-profile-handler``: runs the profile that a header names, else ``defaultProfile``."""

    header_name: str = "EPP-Profile"
    default_profile: str = "decode"

    def needs(self, profiles: Mapping[str, Profile]) -> str | None:
        """An error message if the default profile is missing; a single profile always runs."""
        if len(profiles) == 1 or self.default_profile in profiles:
            return None
        return f"there is no profile '{self.default_profile}' for requests without the header; set defaultProfile"

    def run(
        self, view: View, profiles: Mapping[str, Profile], deciders: Mapping[str, PrefillDecider], rng: random.Random
    ) -> Pick:
        """Run the profile; raises BadRequest if the header names none."""
        del deciders
        if len(profiles) == 1:
            (profile,) = profiles.values()
            return profile.pick(view, rng=rng)
        name = view.request.headers.get(self.header_name.lower(), "") or self.default_profile
        if name not in profiles:
            known = ", ".join(sorted(profiles))
            raise BadRequest(f"The header '{self.header_name}' names no profile; there are {known}.")
        return profiles[name].pick(view, rng=rng)


class HeaderPhaseHandler(HeaderProfileHandler, frozen=True):
    """``header-profile-handler`` as it was called first, with the header ``EPP-Phase``."""

    header_name: str = "EPP-Phase"


class PrefixBasedPrefillDecider(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``prefix-based-pd-decider``: remote prefill if the decode endpoint lacks enough of the prompt.

    The condition is ``prompt >= max(n, m)`` and ``prompt - cached >= n`` with n = ``nonCachedTokens`` (0: never) and
    m = ``promptTokens`` (0: no minimum).
    """

    WITHOUT_EFFECT: ClassVar = MappingProxyType({"prefixMatchInfoProducerName": ONE_INDEX})

    non_cached_tokens: Tokens = 0
    prompt_tokens: Tokens = 0

    def wants_prefill(self, view: View, decode_row: int) -> bool:
        """Decide by the prompt's tokens that ``decode_row`` has cached."""
        least, prompt = self.non_cached_tokens, view.request.input_tokens
        if not least or prompt < max(least, self.prompt_tokens):
            return False
        return prompt - float(view.demand.cached_tokens[decode_row]) >= least


class AlwaysRemotePrefillDecider(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``always-disagg-pd-decider``: always remote prefill."""

    def wants_prefill(self, view: View, decode_row: int) -> bool:
        """Always true."""
        del view, decode_row
        return True


class DataParallelProfileHandler(SingleProfileHandler, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``data-parallel-profile-handler``: runs the only profile.

    Each port of a pod is an endpoint of its own, so a data-parallel rank is picked like any other endpoint and is
    itself the destination. llm-d sends to the pod's primary port and names the rank in ``x-data-parallel-host-port``.
    """

    TOLD: ClassVar = (
        "each rank is an endpoint of its own and gets its requests itself; x-data-parallel-host-port is not set"
    )

    WITHOUT_EFFECT: ClassVar = MappingProxyType({"primaryPort": RANKS_ARE_ENDPOINTS, "targetPort": NEVER_READ})


class EncodeDecodeProfileHandler(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``ed-profile-handler``, of releases before ``disagg-profile-handler``: runs the decode profile.

    The encode profile is not run: decode engines encode media themselves.
    """

    TOLD: ClassVar = "there is no encode stage: only the decode profile runs, and its engines encode media themselves"

    WITHOUT_EFFECT: ClassVar = MappingProxyType(dict.fromkeys(("encodeProfile", "deciderPluginName"), NO_ENCODE_STAGE))

    decode_profile: str = "decode"

    def needs(self, profiles: Mapping[str, Profile]) -> str | None:
        """An error message if the decode profile is missing."""
        if self.decode_profile in profiles:
            return None
        return f"there is no profile '{self.decode_profile}'; add it to schedulingProfiles"

    def run(
        self, view: View, profiles: Mapping[str, Profile], deciders: Mapping[str, PrefillDecider], rng: random.Random
    ) -> Pick:
        """Run the decode profile."""
        del deciders
        return profiles[self.decode_profile].pick(view, rng=rng)


class StageNames(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The name of the plugin or profile for each stage."""

    decode: str | None = None
    prefill: str | None = None
    encode: str | None = None


class DisaggregatedProfileHandler(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``disagg-profile-handler`` and, by its older name and parameters, ``pd-profile-handler``.

    ``decode-first``: run the decode profile, then the decider for the endpoint that it picked, then, if that requires a
    prefill, the prefill profile in its group. ``prefill-first``: run the prefill profile in the groups that can decode,
    then the decode profile in the same group. ``groupKey`` is not in llm-d: a label whose value both endpoints of a
    pair share. An encode stage is accepted and never run.
    """

    WITHOUT_EFFECT: ClassVar = MappingProxyType(
        {
            "primaryPort": RANKS_ARE_ENDPOINTS,
            "encodeProfile": NO_ENCODE_STAGE,
            "encodeDeciderPluginName": NO_ENCODE_STAGE,
            "prefixPluginName": NEVER_USED,
            "prefixPluginType": NEVER_USED,
            "prefixMatchInfoProducerName": ONE_INDEX,
            "hashBlockSize": INDEX_SIZE,
            "threshold": "a prefix-based-pd-decider sets from how many tokens another endpoint prefills",
        }
    )

    profiles: StageNames = StageNames()
    deciders: StageNames = StageNames()
    stage_order: Literal["decode-first", "prefill-first"] = "decode-first"
    group_key: str = ""
    decode_profile: str = "decode"
    prefill_profile: str = "prefill"
    decider_plugin_name: str | None = None
    # as decider_plugin_name, by its name in other releases
    prefill_decider_plugin_name: str | None = None

    @property
    def _decode(self) -> str:
        return self.profiles.decode or self.decode_profile

    @property
    def _prefill(self) -> str:
        return self.profiles.prefill or self.prefill_profile

    @property
    def prefill_name(self) -> str:
        """The name of the profile that picks prefill endpoints."""
        return self._prefill

    @property
    def decider_name(self) -> str | None:
        """The name of the decider for remote prefill; None: prefill is never remote."""
        return self.deciders.prefill or self.prefill_decider_plugin_name or self.decider_plugin_name

    def needs(self, profiles: Mapping[str, Profile]) -> str | None:
        """An error message if the decode profile is missing, or, with a decider, the prefill profile."""
        required = [self._decode, *([self._prefill] if self.decider_name else [])]
        missing = [name for name in required if name not in profiles]
        return f"there is no profile '{missing[0]}'; add it to schedulingProfiles" if missing else None

    def run(
        self, view: View, profiles: Mapping[str, Profile], deciders: Mapping[str, PrefillDecider], rng: random.Random
    ) -> Pick:
        """Pick a decode endpoint and, if the decider requires one, a prefill endpoint of its group."""
        decode = profiles[self._decode]
        if self.decider_name is None:
            return decode.pick(view, rng=rng)
        groups = label_groups(view.table, self.group_key)
        pair = _PairPick(view, groups, decode, profiles[self._prefill], deciders[self.decider_name], rng)
        return pair.decode_first() if self.stage_order == "decode-first" else pair.prefill_first()


class _PairPick(msgspec.Struct, frozen=True):
    """The pick of a decode endpoint and, where the decider requires one, of a prefill endpoint. ``groups``: by row, the
    number of its group; both endpoints are of one.
    """

    view: View
    groups: NDArray[np.intp]
    decode: Profile
    prefill: Profile
    decider: PrefillDecider
    rng: random.Random

    def decode_first(self) -> Pick:
        """Pick the decode endpoint, then the prefill endpoint in its group."""
        decoding = self.decode.pick(self.view, rng=self.rng)
        row = decoding.rows[0]
        if not self._wants_prefill(row):
            return _without_prefill(decoding, _NOT_WANTED)
        prefilling = self._try(self.prefill, self._group_of(row), peer_row=row)
        return _without_prefill(decoding, _NO_PREFILL) if prefilling is None else self._join(decoding, prefilling)

    def prefill_first(self) -> Pick:
        """Pick the prefill endpoint in a group that can decode, then the decode endpoint in its group."""
        prefilling = self._try(self.prefill, self._can_decode())
        if prefilling is None:
            return _without_prefill(self.decode.pick(self.view, rng=self.rng), _NO_PREFILL)
        row = prefilling.rows[0]
        decoding = self.decode.pick(self.view.with_candidates(self._group_of(row), peer_row=row), rng=self.rng)
        if not self._wants_prefill(decoding.rows[0]):
            return _without_prefill(decoding, _NOT_WANTED)
        return self._join(decoding, prefilling)

    def _wants_prefill(self, decode_row: int) -> bool:
        """False if the decider fails: a decode endpoint can prefill itself."""
        try:
            return self.decider.wants_prefill(self.view, decode_row)
        except PluginFailed as failed:
            self.view.failed.append(failed)
            return False

    def _join(self, decoding: Pick, prefilling: Pick) -> Pick:
        # a fallback in another group could not fetch the KV cache from the prefill endpoint
        in_group = self._group_of(decoding.rows[0])
        return Pick(
            [row for row in decoding.rows if in_group[row]],
            prefilling.cost_s,
            prefill_row=prefilling.rows[0],
            stage="prefill sent on",
            reasons=(*decoding.reasons, *prefilling.reasons),
        )

    def _group_of(self, row: int) -> Bools:
        in_group: Bools = self.groups == self.groups[row]
        return in_group

    def _can_decode(self) -> Bools:
        """The rows of groups in which the decode profile finds an endpoint."""
        can: Bools = self.groups < 0
        for number in set(self.groups[self.view.candidates()].tolist()):
            in_group: Bools = self.groups == number
            if self._try(self.decode, in_group) is not None:
                can |= in_group
        return can

    def _try(self, profile: Profile, candidates: Bools, *, peer_row: int | None = None) -> Pick | None:
        """The first choice of a profile among ``candidates``; None if it finds none."""
        try:
            return profile.pick(self.view.with_candidates(candidates, choices=1, peer_row=peer_row), rng=self.rng)
        except NoEndpoint:
            return None


def _without_prefill(decoding: Pick, why: str) -> Pick:
    return msgspec.structs.replace(decoding, stage=why)


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


class RolloutScreenerParameters(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """llm-d's ``disaggregatedset-rollout-screener``: endpoints of the revision that a request names, in every profile.

    Pairs of prefill and decode are of one revision, as with ``groupKey`` of ``disagg-profile-handler``; a groupKey of
    the file takes precedence. Without a header, revisions share requests by the load of their endpoints, not by their
    numbers. A header that names no endpoint's label leaves none.
    """

    WITHOUT_EFFECT: ClassVar = MappingProxyType({"scope": "all endpoints of the ModelServer are looked at"})
    TOLD: ClassVar = (
        "revisions share requests by the load of their endpoints, not by their numbers; answers do not carry labels"
    )

    revision_gating: RevisionGating = RevisionGating(mode="disabled")
    header_selectors: tuple[HeaderSelector, ...] = ()

    def with_plugins(self, others: Mapping[str, Any]) -> RolloutScreener:
        """The screener itself, with what each header must equal."""
        del others
        gating = self.revision_gating
        labels = [(one.header_name, one.label_key) for one in self.header_selectors if one.mode == "strict"]
        if gating.revision_header_name:
            labels.insert(0, (gating.revision_header_name, gating.label))
        return RolloutScreener(
            tuple((header.lower(), label) for header, label in labels),
            "" if gating.mode == "disabled" else gating.label,
        )


class RolloutScreener(msgspec.Struct, frozen=True):
    """The screener. ``labels``: by header in lower case, the label that it must equal. ``group_key``: the label that
    both endpoints of a pair share; empty: none.
    """

    labels: tuple[tuple[str, str], ...] = ()
    group_key: str = ""

    def keep(self, view: View, candidates: Bools) -> Bools:
        """Keeps the endpoints whose labels are those that the request's headers name."""
        headers = view.request.headers
        required = {label: value for header, label in self.labels if (value := headers.get(header, ""))}
        return candidates & rows_with_labels(view.table, required) if required else candidates

    def paired(self, handler: ProfileHandler) -> ProfileHandler:
        """``handler`` with pairs of one revision, if it makes pairs and the file has no groupKey."""
        if self.group_key and isinstance(handler, DisaggregatedProfileHandler) and not handler.group_key:
            return msgspec.structs.replace(handler, group_key=self.group_key)
        return handler


class EndpointPinScreener(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
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

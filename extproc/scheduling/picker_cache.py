# SPDX-License-Identifier: Apache-2.0
"""The pickers of all ModelServers, each kept while its configuration stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from extproc.api.config_errors import ConfigInvalid
from extproc.api.model_server import ModelServerSpec, PdGroup
from extproc.api.picker_config import EndpointPickerConfig, PickerFile
from extproc.scheduling.builtin_pickers import (
    LeastWork,
    PairParameters,
    PrefillDecodePairs,
    PrefixAware,
    PrefixAwareParameters,
    RoundRobin,
)
from extproc.scheduling.disaggregation import ExpectedSeconds, UncachedTokens
from extproc.scheduling.picker import Picker

if TYPE_CHECKING:
    from extproc.api.config_errors import Mistake
    from extproc.api.config_snapshot import Snapshot

# The picker that a ModelServer names, with the EndpointPickerConfigs by the names of their files; raises ConfigInvalid.
MakePicker = Callable[[ModelServerSpec, Mapping[str, PickerFile]], Picker]


class PickerBasis(msgspec.Struct, frozen=True):
    """The inputs from which a picker is made; an equal basis makes an equal picker."""

    name: str
    config: EndpointPickerConfig | None
    pd_group: PdGroup | None
    engine: str = "vLLM"
    protocol: str = "OpenAI"


class CachedPicker(msgspec.Struct, frozen=True):
    """A picker, which may have state, and the settings from which it was made."""

    basis: PickerBasis
    picker: Picker


def pickers_for(snapshot: Snapshot, previous: Mapping[str, CachedPicker], make: MakePicker) -> dict[str, CachedPicker]:
    """The picker of every ModelServer by its key: the one in ``previous`` where its basis is the same, else a new one.

    Raises ConfigInvalid with the mistakes of all pickers, and then nothing has changed.
    """
    made: dict[str, CachedPicker] = {}
    mistakes: dict[Mistake, None] = {}
    for server in snapshot.servers:
        key, basis = server.metadata.key, _basis(server.spec, snapshot.picker_files)
        known = previous.get(key)
        if known is not None and known.basis == basis:
            made[key] = known
            continue
        try:
            made[key] = CachedPicker(basis, make(server.spec, snapshot.picker_files))
        except ConfigInvalid as error:
            # several servers may name the same file
            mistakes.update(dict.fromkeys(error.mistakes))
    if mistakes:
        raise ConfigInvalid(list(mistakes))
    return made


def make_picker_without_files(spec: ModelServerSpec, files: Mapping[str, PickerFile]) -> Picker:
    """A ``MakePicker`` that reads no files."""
    if spec.picker_config is not None:
        raise ConfigInvalid(
            files[spec.picker_config].document.locate_mistakes([((), "this process reads no such files")])
        )
    return default_picker(spec)


def default_picker(spec: ModelServerSpec) -> Picker:
    """Of a ModelServer that names no file."""
    if spec.picker == "RoundRobin":
        return RoundRobin()
    if spec.protocol != "OpenAI":
        return LeastWork()
    costs = PrefixAware(PrefixAwareParameters())
    if spec.pd_group is None:
        return costs
    group = spec.pd_group
    # SGLang's decode engines cannot compute a prompt
    alone = spec.engine != "SGLang"
    parameters = PairParameters(group.group_key, group.prefill_labels, group.decode_labels, alone)
    if not alone:
        return PrefillDecodePairs(parameters, costs, UncachedTokens(0))
    minimum, by_seconds = float(group.min_uncached_tokens), group.decide_by == "ExpectedSeconds"
    rule = ExpectedSeconds(minimum, group.stall_weight) if by_seconds else UncachedTokens(minimum)
    return PrefillDecodePairs(parameters, costs, rule)


def _basis(spec: ModelServerSpec, files: Mapping[str, PickerFile]) -> PickerBasis:
    config = None if spec.picker_config is None else files[spec.picker_config].config
    return PickerBasis(spec.picker, config, spec.pd_group, spec.engine, spec.protocol)

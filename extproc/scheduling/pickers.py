"""From a ModelServer's specification to its picker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.config.errors import ConfigInvalid, Mistake
from extproc.scheduling.pairs import PairParameters, PrefillDecodePairs
from extproc.scheduling.picker_config import read_picker
from extproc.scheduling.prefix_aware import PrefixAware, PrefixAwareParameters
from extproc.scheduling.registry import installed
from extproc.scheduling.round_robin import RoundRobin

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from extproc.config.documents import Document
    from extproc.config.types import ModelServerSpec, Snapshot
    from extproc.scheduling.picker import Picker

    MakePicker = Callable[[ModelServerSpec, Mapping[str, Document]], Picker]


def make_picker(spec: ModelServerSpec, files: Mapping[str, Document]) -> Picker:
    """The picker that a ModelServer names; ``files`` hold EndpointPickerConfigs. Raises ConfigInvalid."""
    if spec.picker_config is not None:
        return read_picker(files[spec.picker_config], installed()).picker
    if spec.picker == "RoundRobin":
        return RoundRobin()
    costs = PrefixAware(PrefixAwareParameters())
    if spec.pd_group is None:
        return costs
    group = spec.pd_group
    parameters = PairParameters(
        group.group_key, group.prefill_labels, group.decode_labels, float(group.min_uncached_tokens)
    )
    return PrefillDecodePairs(parameters, costs)


def picker_notes(snapshot: Snapshot) -> list[str]:
    """What of the EndpointPickerConfigs has no effect here; raises ConfigInvalid with every mistake in any of them."""
    notes: list[str] = []
    mistakes: list[Mistake] = []
    for file, document in snapshot.picker_files.items():
        try:
            notes.extend(f"{file}: {note}" for note in read_picker(document, installed()).notes)
        except ConfigInvalid as error:
            mistakes.extend(error.mistakes)
    if mistakes:
        raise ConfigInvalid(mistakes)
    return notes

# SPDX-License-Identifier: Apache-2.0
"""The pickers of all ModelServers, each kept while its configuration stays."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.api.errors import ConfigInvalid, Mistake
from extproc.api.model_server import ModelServerSpec, PdGroup
from extproc.api.picker_config import EndpointPickerConfig
from extproc.llmd.notes import server_notes
from extproc.llmd.profiles import BuiltPicker, build_picker, failures
from extproc.llmd.registry import installed_plugins
from extproc.scheduling.disaggregation import ExpectedSeconds, UncachedTokens
from extproc.scheduling.external_plugins import try_out
from extproc.scheduling.picker import Picker
from extproc.scheduling.pickers import (
    LeastWork,
    PairParameters,
    PrefillDecodePairs,
    PrefixAware,
    PrefixAwareParameters,
    RoundRobin,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from extproc.api.picker_config import PickerFile
    from extproc.api.snapshot import Snapshot
    from extproc.llmd.registry import PluginType

    MakePicker = Callable[[ModelServerSpec, Mapping[str, PickerFile]], Picker]


# Sets of labels with which plugins are tried.
_MOST_TRIED: Final = 16


class PickerBasis(msgspec.Struct, frozen=True):
    """The inputs from which a picker is made; an equal basis makes an equal picker."""

    name: str
    config: EndpointPickerConfig | None
    pd_group: PdGroup | None
    engine: str = "vLLM"
    protocol: str = "OpenAI"


class MadePicker(msgspec.Struct, frozen=True):
    """A picker, which may have state, and the settings from which it was made."""

    basis: PickerBasis
    picker: Picker


def pickers_for(
    snapshot: Snapshot, previous: Mapping[str, MadePicker], make: MakePicker | None = None
) -> dict[str, MadePicker]:
    """The picker of every ModelServer by its key: the one in ``previous`` where its basis is the same, else a new one.

    Raises ConfigInvalid with the mistakes of all pickers, and then nothing has changed.
    """
    made: dict[str, MadePicker] = {}
    mistakes: dict[Mistake, None] = {}
    make = make or PickerFactory()
    for server in snapshot.servers:
        key, basis = server.metadata.key, _basis(server.spec, snapshot.picker_files)
        known = previous.get(key)
        if known is not None and known.basis == basis:
            made[key] = known
            continue
        try:
            made[key] = MadePicker(basis, make(server.spec, snapshot.picker_files))
        except ConfigInvalid as error:
            # several servers may name the same file
            mistakes.update(dict.fromkeys(error.mistakes))
    if mistakes:
        raise ConfigInvalid(list(mistakes))
    return made


class PickerFactory:
    """Makes the picker that a ModelServer names, of the installed plugins, which are loaded once."""

    def __init__(self) -> None:
        self._known: Mapping[str, PluginType] | None = None

    def __call__(self, spec: ModelServerSpec, files: Mapping[str, PickerFile]) -> Picker:
        """``files``: EndpointPickerConfigs by the names of their files. Raises ConfigInvalid."""
        if spec.picker_config is not None:
            if self._known is None:
                self._known = installed_plugins()
            return build_picker(files[spec.picker_config], self._known).picker
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


def make_picker(spec: ModelServerSpec, files: Mapping[str, PickerFile]) -> Picker:
    """One picker by itself. Raises ConfigInvalid."""
    return PickerFactory()(spec, files)


class InstalledPlugins:
    """Checks EndpointPickerConfigs (a ``PickerCheck``) with the installed plugins, which are loaded once."""

    def __init__(self) -> None:
        self._known: Mapping[str, PluginType] | None = None

    def __call__(self, file: PickerFile) -> Sequence[str]:
        """Notes on the parts without effect here; raises ConfigInvalid with every mistake."""
        return self._built(file).notes

    def try_out(self, file: PickerFile, labels: Sequence[Mapping[str, str]]) -> Sequence[str]:
        """The same, and run its plugins on made-up requests; ``labels``: of endpoints that they will meet."""
        built = self._built(file)
        failed = try_out(built.picker, labels)
        if failed:
            raise ConfigInvalid(failures(file, failed.values()))
        return built.notes

    def _built(self, file: PickerFile) -> BuiltPicker:
        if self._known is None:
            self._known = installed_plugins()
        return build_picker(file, self._known)


def picker_notes(snapshot: Snapshot, *, tries_plugins: bool = False) -> list[str]:
    """Notes on parts of the EndpointPickerConfigs without effect here; raises ConfigInvalid with every mistake in them.

    ``tries_plugins``: a plugin that fails when it is tried is a mistake, too.
    """
    notes: list[str] = []
    mistakes: list[Mistake] = []
    plugins = InstalledPlugins()
    for server in snapshot.servers:
        named = server.spec.picker_config
        if named is not None and named in snapshot.picker_files:
            config = snapshot.picker_files[named].config
            notes.extend(
                f"{named}: ModelServer {server.metadata.key}: {one}" for one in server_notes(config, server.spec)
            )
    for name, file in snapshot.picker_files.items():
        try:
            found = plugins.try_out(file, _labels_met(snapshot, name)) if tries_plugins else plugins(file)
            notes.extend(f"{name}: {note}" for note in found)
        except ConfigInvalid as error:
            mistakes.extend(error.mistakes)
    if mistakes:
        raise ConfigInvalid(mistakes)
    return notes


def _labels_met(snapshot: Snapshot, file: str) -> list[Mapping[str, str]]:
    """The different labels of the endpoints that pickers of ``file`` choose from."""
    specs = [server.spec for server in snapshot.servers if server.spec.picker_config == file]
    different = {tuple(sorted(one.labels.items())): one.labels for spec in specs for one in spec.endpoints}
    return list(islice(different.values(), _MOST_TRIED))


def _basis(spec: ModelServerSpec, files: Mapping[str, PickerFile]) -> PickerBasis:
    config = None if spec.picker_config is None else files[spec.picker_config].config
    return PickerBasis(spec.picker, config, spec.pd_group, spec.engine, spec.protocol)

# SPDX-License-Identifier: Apache-2.0
"""An EndpointPickerConfig to the picker that it describes, or to every mistake in it.

Without settings in the file, llm-d's defaults hold: weight 1, ``max-score-picker``, ``single-profile-handler``. Source:
llm-d-router ``pkg/epp/config``.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.api.config_errors import ConfigInvalid
from extproc.api.document_decoder import read_picker_file
from extproc.llmd.compatibility_notes import config_notes, effective_parameters, server_notes
from extproc.llmd.picker_config_checks import config_mistakes
from extproc.llmd.plugin_types import cache_tier_capacities, installed_plugins
from extproc.scheduling.external_plugin_guards import try_out
from extproc.scheduling.framework import ConfiguredPicker
from extproc.scheduling.picker import PluginFailed
from extproc.scheduling.picker_cache import default_picker
from extproc.scheduling.picker_spec import ConfiguredPlugin, PickerSpec, ProfileSpec, build_configured_picker

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from extproc.api.config_errors import Finding, Mistake
    from extproc.api.config_snapshot import Snapshot
    from extproc.api.model_server import ModelServerSpec
    from extproc.api.picker_config import EndpointPickerConfig, PickerFile
    from extproc.scheduling.picker import Picker
    from extproc.scheduling.registry import PluginType

# Sets of labels with which plugins are tried.
_MOST_TRIED: Final = 16


class BuiltPicker(msgspec.Struct, frozen=True):
    """The picker that a file describes, and notes on the parts without effect here."""

    picker: ConfiguredPicker
    notes: tuple[str, ...]


def build_picker(file: PickerFile, known: Mapping[str, PluginType]) -> BuiltPicker:
    """The picker of ``file`` with plugins of ``known`` types; raises ConfigInvalid with all mistakes."""
    config = file.config
    _refuse(file, config_mistakes(config, known))
    handlers = [index for index, spec in enumerate(config.plugins) if known[spec.type].kind == "profile handler"]
    try:
        picker = build_configured_picker(to_picker_spec(config, known))
        problem = picker.handler.needs(picker.profiles)
    except PluginFailed as failed:
        raise ConfigInvalid(plugin_failure_mistakes(file, [failed])) from None
    if problem:
        _refuse(file, [(("plugins", handlers[0]) if handlers else ("schedulingProfiles",), problem)])
    return BuiltPicker(picker, tuple(config_notes(config, known)))


def plugin_failure_mistakes(file: PickerFile, failed: Iterable[PluginFailed]) -> list[Mistake]:
    """Of plugins of ``file`` that failed, each on the line that names it."""
    places = {spec.effective_name: index for index, spec in enumerate(file.config.plugins)}
    return file.document.locate_mistakes(
        [(("plugins", places[one.plugin]), f"the plugin '{one.plugin}' fails: {one}") for one in failed]
    )


def picker_from_text(name: str, text: str, known: Mapping[str, PluginType]) -> BuiltPicker:
    """The same of the file called ``name`` with this content."""
    return build_picker(read_picker_file(name, text), known)


def to_picker_spec(config: EndpointPickerConfig, known: Mapping[str, PluginType]) -> PickerSpec:
    """Of a file without mistakes. One without profiles runs all its plugins in one, as llm-d does."""
    profiles = {
        spec.name: tuple((ref.plugin_ref, 1.0 if ref.weight is None else ref.weight) for ref in spec.plugins)
        for spec in config.scheduling_profiles
    } or {"default": tuple((spec.effective_name, 1.0) for spec in config.plugins)}
    return PickerSpec(
        plugins=tuple(
            ConfiguredPlugin(spec.effective_name, known[spec.type], effective_parameters(spec, known[spec.type].cls))
            for spec in config.plugins
        ),
        profiles=tuple(ProfileSpec(name, plugins) for name, plugins in profiles.items()),
        tiers=cache_tier_capacities(config),
    )


class _Installed:
    """The installed plugins, loaded once, when a file is read."""

    def __init__(self) -> None:
        self._known: Mapping[str, PluginType] | None = None

    def picker(self, file: PickerFile) -> BuiltPicker:
        """Raises ConfigInvalid with every mistake."""
        if self._known is None:
            self._known = installed_plugins()
        return build_picker(file, self._known)


class PickerFactory:
    """Makes the picker that a ModelServer names, of the installed plugins (a ``MakePicker``)."""

    def __init__(self) -> None:
        self._installed = _Installed()

    def __call__(self, spec: ModelServerSpec, files: Mapping[str, PickerFile]) -> Picker:
        """``files``: EndpointPickerConfigs by the names of their files. Raises ConfigInvalid."""
        if spec.picker_config is None:
            return default_picker(spec)
        return self._installed.picker(files[spec.picker_config]).picker


class InstalledPluginChecker:
    """Checks EndpointPickerConfigs with the installed plugins (a ``PickerCheck``)."""

    def __init__(self) -> None:
        self._installed = _Installed()

    def __call__(self, file: PickerFile) -> Sequence[str]:
        """Notes on the parts without effect here; raises ConfigInvalid with every mistake."""
        return self._installed.picker(file).notes

    def try_out(self, file: PickerFile, labels: Sequence[Mapping[str, str]]) -> Sequence[str]:
        """The same, and run its plugins on made-up requests; ``labels``: of endpoints that they will meet."""
        built = self._installed.picker(file)
        failed = try_out(built.picker, labels)
        if failed:
            raise ConfigInvalid(plugin_failure_mistakes(file, failed.values()))
        return built.notes


def picker_notes(snapshot: Snapshot, *, tries_plugins: bool = False) -> list[str]:
    """Notes on parts of the EndpointPickerConfigs without effect here; raises ConfigInvalid with every mistake in them.

    ``tries_plugins``: a plugin that fails when it is tried is a mistake, too.
    """
    notes: list[str] = []
    mistakes: list[Mistake] = []
    plugins = InstalledPluginChecker()
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


def _refuse(file: PickerFile, findings: list[Finding]) -> None:
    if findings:
        raise ConfigInvalid(file.document.locate_mistakes(findings))

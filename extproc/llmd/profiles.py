# SPDX-License-Identifier: Apache-2.0
"""An EndpointPickerConfig to the picker that it describes, or to every mistake in it.

Where the file says nothing, llm-d's defaults hold: weight 1, ``max-score-picker``, ``single-profile-handler``.
Source: llm-d-router ``pkg/epp/config``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from extproc.api.decode import read_picker_file
from extproc.api.errors import ConfigInvalid
from extproc.api.picker_config import PluginRef, ProfileSpec
from extproc.api.quantities import decode_quantity
from extproc.api.schema import check_shape, suggest
from extproc.llmd.not_built import NOT_BUILT
from extproc.llmd.notes import notes_of, without_effect
from extproc.llmd.references import References
from extproc.llmd.registry import BUILT_IN
from extproc.scheduling.cache_tiers import tier_capacities
from extproc.scheduling.external_plugins import Guard, failure, guarded
from extproc.scheduling.framework import (
    ConfiguredPicker,
    NamedFilter,
    NamedScorer,
    NeedsPlugins,
    Profile,
    SessionKeeper,
)
from extproc.scheduling.picker import PluginFailed
from extproc.scheduling.plugins.attributes import MetricsExtractor
from extproc.scheduling.plugins.handlers import SingleProfile
from extproc.scheduling.plugins.selectors import MaxScore
from extproc.scheduling.prefix_aware import PrefixAware, PrefixAwareParameters

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from extproc.api.errors import Finding, Mistake
    from extproc.api.picker_config import EndpointPickerConfig, PickerFile, PluginSpec
    from extproc.llmd.registry import Kind, PluginType
    from extproc.scheduling.framework import Selector
    from extproc.scheduling.picker import Picker
    from extproc.scheduling.plugins.rollouts import EndpointPin, Rollout


class BuiltPicker(msgspec.Struct, frozen=True):
    """What a file describes, and what of it has no effect here, in sentences."""

    picker: ConfiguredPicker
    notes: tuple[str, ...]


def build_picker(file: PickerFile, known: Mapping[str, PluginType]) -> BuiltPicker:
    """The picker of ``file`` with plugins of ``known`` types; raises ConfigInvalid with all mistakes."""
    config = file.config
    _refuse(file, [*_check_plugins(config, known), *References(config, known).check(), *_check_profiles(config, known)])
    handlers = [index for index, spec in enumerate(config.plugins) if known[spec.type].kind == "profile handler"]
    try:
        picker = _build(config, known)
        problem = picker.handler.needs(picker.profiles)
    except PluginFailed as failed:
        raise ConfigInvalid(failures(file, [failed])) from None
    if problem:
        _refuse(file, [(("plugins", handlers[0]) if handlers else ("schedulingProfiles",), problem)])
    return BuiltPicker(picker, tuple(notes_of(config, known)))


def failures(file: PickerFile, failed: Iterable[PluginFailed]) -> list[Mistake]:
    """Of plugins of ``file`` that failed, each on the line that names it."""
    places = {spec.called: index for index, spec in enumerate(file.config.plugins)}
    return file.document.mistakes(
        [(("plugins", places[one.plugin]), f"the plugin '{one.plugin}' fails: {one}") for one in failed]
    )


def picker_from_text(name: str, text: str, known: Mapping[str, PluginType]) -> BuiltPicker:
    """The same of the file called ``name`` with this content."""
    return build_picker(read_picker_file(name, text), known)


def _check_plugins(config: EndpointPickerConfig, known: Mapping[str, PluginType]) -> Iterator[Finding]:
    names: set[str] = set()
    handlers = 0
    for index, spec in enumerate(config.plugins):
        path = ("plugins", index)
        if spec.called in names:
            yield path, f"a second plugin called '{spec.called}'; give each a name of its own"
        names.add(spec.called)
        if spec.type not in known:
            yield (*path, "type"), _unknown(spec.type, known)
            continue
        if known[spec.type].problem:
            yield (*path, "type"), known[spec.type].problem
            continue
        handlers += known[spec.type].kind == "profile handler"
        if known[spec.type].kind == "profile handler" and handlers > 1:
            yield (*path, "type"), "a second profile handler; a file has one"
        for place, message in _check_parameters(spec, known[spec.type].cls):
            yield (*path, "parameters", *place), message


def _check_parameters(spec: PluginSpec, cls: type) -> list[Finding]:
    try:
        return check_shape(_taken(spec, cls), cls)
    except (Exception, SystemExit) as error:
        if spec.type in BUILT_IN:
            raise
        return [((), f"'{spec.type}' cannot be made: {failure(spec.called, cls, error)}")]


def _unknown(type_name: str, known: Mapping[str, PluginType]) -> str:
    if type_name in NOT_BUILT:
        return f"there is no plugin type '{type_name}' here; in its place, {NOT_BUILT[type_name]}"
    return f"there is no plugin type '{type_name}'; {suggest(type_name, known)}"


def _check_profiles(config: EndpointPickerConfig, known: Mapping[str, PluginType]) -> Iterator[Finding]:
    types = {spec.called: spec.type for spec in config.plugins}
    names: set[str] = set()
    for index, profile in enumerate(config.scheduling_profiles):
        if profile.name in names:
            yield ("schedulingProfiles", index, "name"), f"a second profile called '{profile.name}'; use another name"
        names.add(profile.name)
        pickers = 0
        for number, ref in enumerate(profile.plugins):
            path = ("schedulingProfiles", index, "plugins", number)
            if ref.plugin_ref not in types:
                advice = suggest(ref.plugin_ref, types)
                yield (*path, "pluginRef"), f"no plugin is called '{ref.plugin_ref}'; {advice}"
                continue
            kind = known[types[ref.plugin_ref]].kind if types[ref.plugin_ref] in known else "scorer"
            pickers += kind == "picker"
            if pickers > 1:
                yield (*path, "pluginRef"), "a second picker; a profile has one"


def _build(config: EndpointPickerConfig, known: Mapping[str, PluginType]) -> ConfiguredPicker:
    external = {spec.called for spec in config.plugins if spec.type not in BUILT_IN}
    parameters = {spec.called: _parameters(spec, known[spec.type].cls) for spec in config.plugins}
    # plugins of ours may run filters of others
    others = {
        name: Guard(name, one) if name in external and hasattr(one, "keep") else one for name, one in parameters.items()
    }
    plugins: dict[str, tuple[Kind, Any]] = {}
    for spec in config.plugins:
        name, kind, plugin = spec.called, known[spec.type].kind, parameters[spec.called]
        if name in external:
            plugin = guarded(name, kind, plugin, parameters)
        elif isinstance(plugin, NeedsPlugins):
            plugin = plugin.with_plugins(others)
        plugins[name] = kind, plugin
    # a file without profiles runs all its plugins in one, as llm-d does
    specs = config.scheduling_profiles or (ProfileSpec("default", tuple(PluginRef(name) for name in plugins)),)
    handler = next((plugin for kind, plugin in plugins.values() if kind == "profile handler"), SingleProfile())
    screeners = [(name, plugin) for name, (kind, plugin) in plugins.items() if kind == "screener"]
    for _, screener in screeners:
        handler = screener.paired(handler)
    usual = next((plugin for kind, plugin in plugins.values() if kind == "picker"), MaxScore())
    keepers = [plugin.keeper() if isinstance(plugin, Guard) else plugin for _, plugin in plugins.values()]
    default = PrefixAware(PrefixAwareParameters()) if external else None
    return ConfiguredPicker(
        handler=handler,
        profiles={spec.name: _screened(_profile(spec, plugins, usual, default), screeners) for spec in specs},
        deciders={name: plugin for name, (kind, plugin) in plugins.items() if kind == "decider"},
        sessions=tuple(one for one in keepers if isinstance(one, SessionKeeper)),
        reporters=tuple(plugin.reporter() for kind, plugin in plugins.values() if kind == "reporter"),
        prefill_profile=getattr(handler, "prefill_name", ""),
        admitters=tuple(plugin for kind, plugin in plugins.values() if kind == "admitter"),
        metrics=tuple(
            (metric.attribute_key, metric.metric_spec)
            for plugin in parameters.values()
            if isinstance(plugin, MetricsExtractor)
            for metric in plugin.custom_metrics
        ),
        tiers=tier_capacities(config),
        default=default,
    )


def _parameters(spec: PluginSpec, cls: type) -> Any:  # noqa: ANN401 - plugins have no type in common
    """Read as ``check_shape`` reads them. A plugin may refuse values that fit its fields one by one."""
    return msgspec.convert(_taken(spec, cls), cls, dec_hook=decode_quantity, str_keys=True)


def _taken(spec: PluginSpec, cls: type) -> dict[str, Any]:
    """The parameters without those that have no effect here, which notes tell."""
    others = without_effect(cls)
    return {key: value for key, value in (spec.parameters or {}).items() if key not in others}


def _profile(
    spec: ProfileSpec, plugins: Mapping[str, tuple[Kind, Any]], usual: Selector, default: Picker | None
) -> Profile:
    """``usual``: the picker of a profile that names none: one that the file declares, as in llm-d, else the best
    score.
    """
    filters: list[NamedFilter] = []
    scorers: list[NamedScorer] = []
    choice = usual
    for ref in spec.plugins:
        kind, plugin = plugins[ref.plugin_ref]
        if kind in {"filter", "filter and scorer"}:
            filters.append(NamedFilter(ref.plugin_ref, plugin))
        if kind in {"scorer", "filter and scorer"}:
            scorers.append(NamedScorer(ref.plugin_ref, plugin, 1.0 if ref.weight is None else ref.weight))
        if kind == "picker":
            choice = plugin
    return Profile(tuple(filters), tuple(scorers), choice, spec.name, default)


def _screened(profile: Profile, screeners: Sequence[tuple[str, Rollout | EndpointPin]]) -> Profile:
    """``profile`` after the screeners, which a file does not name in its profiles."""
    before = tuple(NamedFilter(name, screener) for name, screener in screeners)
    return msgspec.structs.replace(profile, filters=(*before, *profile.filters)) if before else profile


def _refuse(file: PickerFile, findings: list[Finding]) -> None:
    if findings:
        raise ConfigInvalid(file.document.mistakes(findings))

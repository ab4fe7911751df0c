# SPDX-License-Identifier: Apache-2.0
"""An EndpointPickerConfig to the picker that it describes, or to every mistake in it.

Where the file says nothing, llm-d's defaults hold: weight 1, ``max-score-picker``, ``single-profile-handler``.
Source: llm-d-router ``pkg/epp/config``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from extproc.config.decode import read_picker_file
from extproc.config.errors import ConfigInvalid
from extproc.config.picker_config import PluginRef, ProfileSpec
from extproc.config.picker_flow_control import FEATURE_GATE
from extproc.config.quantities import decode_quantity
from extproc.config.schema import check_shape, suggest
from extproc.scheduling.framework import (
    ConfiguredPicker,
    NamedFilter,
    NamedScorer,
    NeedsPlugins,
    Profile,
    SessionKeeper,
)
from extproc.scheduling.plugins.accepted import ACCEPTED, REFUSED
from extproc.scheduling.plugins.attributes import MetricsExtractor
from extproc.scheduling.plugins.handlers import SingleProfile
from extproc.scheduling.plugins.selectors import MaxScore

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from extproc.config.errors import Finding
    from extproc.config.picker_config import EndpointPickerConfig, PickerFile, PluginSpec
    from extproc.scheduling.framework import Selector
    from extproc.scheduling.registry import Kind, PluginType


_NOT_USED: Final = frozenset({"data_layer", "data", "request_handler", "saturation_detector", "parser"})


class BuiltPicker(msgspec.Struct, frozen=True):
    """What a file describes, and what of it has no effect here, in sentences."""

    picker: ConfiguredPicker
    notes: tuple[str, ...]


def build_picker(file: PickerFile, known: Mapping[str, PluginType]) -> BuiltPicker:
    """The picker of ``file`` with plugins of ``known`` types; raises ConfigInvalid with all mistakes."""
    config = file.config
    _refuse(file, [*_check_plugins(config, known), *_check_references(config), *_check_profiles(config, known)])
    picker = _build(config, known)
    handlers = [index for index, spec in enumerate(config.plugins) if known[spec.type].kind == "profile handler"]
    problem = picker.handler.needs(picker.profiles)
    if problem:
        _refuse(file, [(("plugins", handlers[0]) if handlers else ("schedulingProfiles",), problem)])
    return BuiltPicker(picker, tuple(_notes(config, known)))


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
        if spec.type in REFUSED:
            yield (*path, "type"), REFUSED[spec.type]
            continue
        if spec.type not in known:
            yield (*path, "type"), f"there is no plugin type '{spec.type}'; {suggest(spec.type, known)}"
            continue
        handlers += known[spec.type].kind == "profile handler"
        if known[spec.type].kind == "profile handler" and handlers > 1:
            yield (*path, "type"), "a second profile handler; a file has one"
        for place, message in check_shape(spec.parameters or {}, known[spec.type].cls):
            yield (*path, "parameters", *place), message


def _check_references(config: EndpointPickerConfig) -> Iterator[Finding]:
    """Plugins that parameters name exist, and do not refer to each other in a circle."""
    names = {spec.called for spec in config.plugins}
    edges: dict[str, list[str]] = {}
    places = {spec.called: ("plugins", index) for index, spec in enumerate(config.plugins)}
    for spec in config.plugins:
        for path, target in _references(spec.parameters or {}):
            edges.setdefault(spec.called, []).append(target)
            # a producer that is not written down is made by itself, as in llm-d
            if target not in names and target not in ACCEPTED:
                advice = suggest(target, names)
                yield (*places[spec.called], "parameters", *path), f"no plugin is called '{target}'; {advice}"
    for name in edges:
        circle = _circle(name, edges)
        if circle:
            yield places[name], f"refers to itself: {' -> '.join(circle)}; break the circle"


def _references(parameters: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    for key, value in parameters.items():
        if isinstance(value, str) and value and key.endswith(("PluginName", "ProducerName", "pluginRef", "PluginRef")):
            yield (key,), value
        elif key == "deciders" and isinstance(value, dict):
            yield from (((key, stage), str(name)) for stage, name in value.items() if name)


def _circle(start: str, edges: Mapping[str, list[str]]) -> list[str]:
    """A way from ``start`` back to it, or nothing."""
    ways = [[start]]
    seen = set()
    while ways:
        way = ways.pop()
        for target in edges.get(way[-1], []):
            if target == start:
                return [*way, target]
            if target not in seen:
                seen.add(target)
                ways.append([*way, target])
    return []


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
            if ref.weight and kind in {"filter", "picker"}:
                yield (*path, "weight"), f"'{ref.plugin_ref}' is a {kind}; only scorers have weights"
            pickers += kind == "picker"
            if pickers > 1:
                yield (*path, "pluginRef"), "a second picker; a profile has one"


def _build(config: EndpointPickerConfig, known: Mapping[str, PluginType]) -> ConfiguredPicker:
    plugins: dict[str, tuple[Kind, Any]] = {
        spec.called: (known[spec.type].kind, _parameters(spec, known[spec.type].cls)) for spec in config.plugins
    }
    parameters = {name: plugin for name, (_, plugin) in plugins.items()}
    plugins = {
        name: (kind, plugin.with_plugins(parameters) if isinstance(plugin, NeedsPlugins) else plugin)
        for name, (kind, plugin) in plugins.items()
    }
    # a file without profiles runs all its plugins in one, as llm-d does
    specs = config.scheduling_profiles or (ProfileSpec("default", tuple(PluginRef(name) for name in plugins)),)
    handler = next((plugin for kind, plugin in plugins.values() if kind == "profile handler"), SingleProfile())
    return ConfiguredPicker(
        handler=handler,
        profiles={spec.name: _profile(spec, plugins) for spec in specs},
        deciders={name: plugin for name, (kind, plugin) in plugins.items() if kind == "decider"},
        sessions=tuple(plugin for _, plugin in plugins.values() if isinstance(plugin, SessionKeeper)),
        reporters=tuple(plugin.reporter() for kind, plugin in plugins.values() if kind == "reporter"),
        prefill_profile=getattr(handler, "prefill_name", ""),
        admitters=tuple(plugin for kind, plugin in plugins.values() if kind == "admitter"),
        metrics=tuple(
            (metric.attribute_key, metric.metric_spec)
            for plugin in parameters.values()
            if isinstance(plugin, MetricsExtractor)
            for metric in plugin.custom_metrics
        ),
    )


def _parameters(spec: PluginSpec, cls: type) -> Any:  # noqa: ANN401 - plugins have no type in common
    """Read as ``check_shape`` reads them. A plugin may refuse values that fit its fields one by one."""
    return msgspec.convert(spec.parameters or {}, cls, dec_hook=decode_quantity)


def _profile(spec: ProfileSpec, plugins: Mapping[str, tuple[Kind, Any]]) -> Profile:
    filters: list[NamedFilter] = []
    scorers: list[NamedScorer] = []
    choice: Selector = MaxScore()
    for ref in spec.plugins:
        kind, plugin = plugins[ref.plugin_ref]
        if kind in {"filter", "filter and scorer"}:
            filters.append(NamedFilter(ref.plugin_ref, plugin))
        if kind in {"scorer", "filter and scorer"}:
            scorers.append(NamedScorer(ref.plugin_ref, plugin, 1.0 if ref.weight is None else ref.weight))
        if kind == "picker":
            choice = plugin
    return Profile(tuple(filters), tuple(scorers), choice, spec.name)


def _notes(config: EndpointPickerConfig, known: Mapping[str, PluginType]) -> Iterator[str]:
    for spec in config.plugins:
        if known[spec.type].kind == "accepted":
            yield f"{spec.type}: in its place, {ACCEPTED.get(spec.type, 'nothing')}"
        told = getattr(known[spec.type].cls, "TOLD", "")
        if told:
            yield f"{spec.called}: {told}"
    for field in msgspec.structs.fields(config):
        if field.name in _NOT_USED and getattr(config, field.name):
            yield f"{field.encode_name}: read, and not used"
    yield from _flow_control_notes(config)


def _flow_control_notes(config: EndpointPickerConfig) -> Iterator[str]:
    others = [gate for gate in config.feature_gates if gate != FEATURE_GATE]
    if others:
        yield f"featureGates: {', '.join(others)}: read, and not used"
    section = config.flow_control
    if section is not None and FEATURE_GATE not in config.feature_gates:
        yield f"flowControl: not used without the feature gate {FEATURE_GATE}"
    if section is not None and section.enable_eviction:
        yield "enableEviction: read, and not used; what has gone to an engine is not taken back"


def _refuse(file: PickerFile, findings: list[Finding]) -> None:
    if findings:
        raise ConfigInvalid(file.document.mistakes(findings))

# SPDX-License-Identifier: Apache-2.0
"""Mistakes in an EndpointPickerConfig: of its plugins, of their parameters, and of its references.

Each name must refer to a plugin or profile of the required kind. Producers, parsers, sources and policies with their
defaults need not be written down: their type names them. Source: llm-d-router ``pkg/epp/config``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec

from extproc.api.picker_flow_control import FAIRNESS, ORDERS
from extproc.api.schema_validation import check_shape, suggest_similar
from extproc.llmd.compatibility_notes import effective_parameters
from extproc.llmd.plugin_types import NOT_BUILT
from extproc.scheduling.external_plugin_guards import plugin_failure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.api.config_errors import Finding, Path
    from extproc.api.picker_config import BandSection, EndpointPickerConfig, PluginSpec
    from extproc.scheduling.registry import PluginType

# Plugins that were named, and never used, by these parameters: llm-d does not resolve them either.
_NEVER_READ: Final = frozenset({"prefixPluginName"})
# Steps of a decision tree.
_STEPS: Final = frozenset({"current", "nextOnSuccess", "nextOnFailure", "nextOnSuccessOrFailure"})
# Most notes of one file, and most names in each.
_MOST_CIRCLES: Final = 10
_MOST_SHOWN: Final = 10
_PROFILE_NAMES: Final = frozenset({"profileName", "prefillProfileName"})
_SCHEDULING: Final = frozenset({"filter", "scorer", "filter and scorer", "picker", "profile handler", "decider"})


class _Use(msgspec.Struct, frozen=True):
    """What a reference requires of a plugin: ``serves`` is true for the types and kinds that do it."""

    what: str
    serves: Callable[[str, str], bool]


def _has_word(*words: str) -> Callable[[str, str], bool]:
    """Types of this sort, however new, have one of these words in their name; thunder-agent is several sorts in one."""

    def serves(type_name: str, kind: str) -> bool:
        del kind
        return type_name == "thunder-agent" or any(word in type_name for word in words)

    return serves


_ANY: Final = _Use("plugin", lambda _, __: True)
_PARSER: Final = _Use("parser", _has_word("parser"))
_DETECTOR: Final = _Use("saturation detector", _has_word("detector"))
_FAIRNESS: Final = _Use("fairness policy", lambda name, kind: name in FAIRNESS or _has_word("fairness")(name, kind))
_ORDERING: Final = _Use("ordering policy", lambda name, kind: name in ORDERS or _has_word("ordering")(name, kind))
_USAGE: Final = _Use("usage limit policy", _has_word("usage-limit", "holdback", "ceiling"))
_PREFILL_DECIDER: Final = _Use("decider of prefill", lambda _, kind: kind == "decider")
_DECIDER: Final = _Use("decider", _has_word("decider"))
_FILTER: Final = _Use("filter", lambda _, kind: kind in {"filter", "filter and scorer"})
_PRODUCER: Final = _Use("producer", lambda _, kind: kind not in {"picker", "profile handler", "decider"})


def config_mistakes(config: EndpointPickerConfig, known: Mapping[str, PluginType]) -> list[Finding]:
    """All of them, with plugins of ``known`` types."""
    return [*_check_plugins(config, known), *_References(config, known).check(), *_check_profiles(config, known)]


class _References:
    """The references of one file. ``edges``: from plugins to those that their parameters name."""

    def __init__(self, config: EndpointPickerConfig, known: Mapping[str, PluginType]) -> None:
        self._config = config
        self._known = known
        self._types = {spec.effective_name: spec.type for spec in config.plugins}
        self._places = {spec.effective_name: ("plugins", index) for index, spec in enumerate(config.plugins)}
        self._profiles = {profile.name for profile in config.scheduling_profiles} or {"default"}

    def check(self) -> Iterator[Finding]:
        """Every name that names nothing, or nothing that could serve."""
        edges: dict[str, list[str]] = {}
        for index, spec in enumerate(self._config.plugins):
            for path, target, use in _plugin_parameters(spec.parameters or {}):
                edges.setdefault(spec.effective_name, []).append(target)
                yield from self._resolve(("plugins", index, "parameters", *path), target, use)
            yield from self._profile_names(index, spec.parameters or {})
        for name in islice(_endless(edges), _MOST_CIRCLES):
            circle = _circle(name, edges)
            if circle:
                shown = circle if len(circle) <= _MOST_SHOWN else [*circle[:_MOST_SHOWN], "...", name]
                yield self._places[name], f"refers to itself: {' -> '.join(shown)}; break the circle"
        yield from self._check_sections()

    def _check_sections(self) -> Iterator[Finding]:
        config = self._config
        for key, given, use in (
            ("dataLayer", config.data_layer, _ANY),
            ("data", config.data, _ANY),
            ("requestHandler", config.request_handler, _PARSER),
            ("parser", config.parser, _PARSER),
        ):
            for path, target in _plugin_refs(given, (key,)):
                yield from self._resolve(path, target, use)
        if config.saturation_detector is not None:
            yield from self._resolve(
                ("saturationDetector", "pluginRef"), config.saturation_detector.plugin_ref, _DETECTOR
            )
        section = config.flow_control
        if section is None:
            return
        if section.saturation_detector is not None:
            place = ("flowControl", "saturationDetector", "pluginRef")
            yield from self._resolve(place, section.saturation_detector.plugin_ref, _DETECTOR)
        usage = section.usage_limit_policy_plugin_ref
        yield from self._resolve(("flowControl", "usageLimitPolicyPluginRef"), usage, _USAGE)
        for key, band in (
            ("defaultPriorityBand", section.default_priority_band),
            ("defaultNegativePriorityBand", section.default_negative_priority_band),
        ):
            yield from self._band(("flowControl", key), band)
        for index, band in enumerate(section.priority_bands):
            yield from self._band(("flowControl", "priorityBands", index), band)

    def _band(self, path: Path, band: BandSection | None) -> Iterator[Finding]:
        if band is not None:
            yield from self._resolve((*path, "fairnessPolicyRef"), band.fairness_policy_ref, _FAIRNESS)
            yield from self._resolve((*path, "orderingPolicyRef"), band.ordering_policy_ref, _ORDERING)

    def _resolve(self, path: Path, target: str | None, use: _Use) -> Iterator[Finding]:
        """A plugin of the file that serves, or the type of one that needs no parameters."""
        if not target:
            return
        type_name = self._types.get(target, target)
        plugin = self._known.get(type_name)
        if target not in self._types and (plugin is None or plugin.kind in _SCHEDULING - {"filter"}):
            yield path, f"no plugin is called '{target}'; {suggest_similar(target, self._types)}"
        elif plugin is not None and not use.serves(type_name, plugin.kind):
            yield path, f"'{target}' is a {type_name}, and no {use.what}; name another plugin"

    def _profile_names(self, index: int, parameters: Mapping[str, Any]) -> Iterator[Finding]:
        for key in _PROFILE_NAMES & parameters.keys():
            name = str(parameters[key] or "")
            if name and name not in self._profiles:
                place = ("plugins", index, "parameters", key)
                yield place, f"there is no profile '{name}'; {suggest_similar(name, self._profiles)}"


def _plugin_parameters(parameters: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str, _Use]]:
    for key, value in parameters.items():
        if key == "deciders" and isinstance(value, dict):
            for stage, name in value.items():
                if name:
                    yield (key, stage), str(name), _PREFILL_DECIDER if stage == "prefill" else _DECIDER
        elif key in _STEPS:
            for path, name in _plugin_refs(value, (key,)):
                yield tuple(str(part) for part in path), name, _FILTER
        elif isinstance(value, str) and value and key not in _NEVER_READ:
            use = _use_of(key, value)
            if use is not None:
                yield (key,), value, use


def _use_of(key: str, name: str) -> _Use | None:
    """The kind of plugin that the parameter ``key`` of the plugin called ``name`` takes; None: it names no plugin."""
    if key in {"deciderPluginName", "prefillDeciderPluginName"}:
        # of ed-profile-handler, the former is the decider of the encode stage
        return _DECIDER if "encode" in name else _PREFILL_DECIDER
    if key == "encodeDeciderPluginName":
        return _DECIDER
    if key.endswith("ProducerName"):
        return _PRODUCER
    return _ANY if key.endswith(("PluginName", "pluginRef", "PluginRef")) else None


def _plugin_refs(value: object, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _plugin_refs(item, (*path, index))
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, str) and str(key).endswith(("pluginRef", "PluginRef")):
                yield (*path, str(key)), item
            else:
                yield from _plugin_refs(item, (*path, str(key)))


def _endless(edges: Mapping[str, list[str]]) -> list[str]:
    """The names from which references never come to an end: of circles, and of what leads to them."""
    referrers: dict[str, list[str]] = {}
    for name, targets in edges.items():
        for target in targets:
            referrers.setdefault(target, []).append(name)
    left = {name: len(targets) for name, targets in edges.items()}
    ending = [name for name in referrers if name not in edges]
    while ending:
        for name in referrers.get(ending.pop(), ()):
            left[name] -= 1
            if not left[name]:
                ending.append(name)
    return [name for name in edges if left[name]]


def _circle(start: str, edges: Mapping[str, list[str]]) -> list[str]:
    """A way from ``start`` back to it, or nothing."""
    came_from = dict[str, str]()
    pending = [start]
    while pending:
        name = pending.pop()
        for target in edges.get(name, []):
            if target == start:
                way = [start]
                while name != start:
                    way.append(name)
                    name = came_from[name]
                return [start, *reversed(way)]
            if target not in came_from:
                came_from[target] = name
                pending.append(target)
    return []


def _check_plugins(config: EndpointPickerConfig, known: Mapping[str, PluginType]) -> Iterator[Finding]:
    names: set[str] = set()
    handlers = 0
    for index, spec in enumerate(config.plugins):
        path = ("plugins", index)
        if spec.effective_name in names:
            yield path, f"a second plugin called '{spec.effective_name}'; give each a name of its own"
        names.add(spec.effective_name)
        if spec.type not in known:
            yield (*path, "type"), _unknown(spec.type, known)
            continue
        if known[spec.type].problem:
            yield (*path, "type"), known[spec.type].problem
            continue
        handlers += known[spec.type].kind == "profile handler"
        if known[spec.type].kind == "profile handler" and handlers > 1:
            yield (*path, "type"), "a second profile handler; a file has one"
        for place, message in _check_parameters(spec, known[spec.type]):
            yield (*path, "parameters", *place), message


def _check_parameters(spec: PluginSpec, plugin: PluginType) -> list[Finding]:
    try:
        return check_shape(effective_parameters(spec, plugin.cls), plugin.cls)
    except (Exception, SystemExit) as error:
        if not plugin.is_external:
            raise
        return [((), f"'{spec.type}' cannot be made: {plugin_failure(spec.effective_name, plugin.cls, error)}")]


def _unknown(type_name: str, known: Mapping[str, PluginType]) -> str:
    if type_name in NOT_BUILT:
        return f"there is no plugin type '{type_name}' here; in its place, {NOT_BUILT[type_name]}"
    return f"there is no plugin type '{type_name}'; {suggest_similar(type_name, known)}"


def _check_profiles(config: EndpointPickerConfig, known: Mapping[str, PluginType]) -> Iterator[Finding]:
    types = {spec.effective_name: spec.type for spec in config.plugins}
    names: set[str] = set()
    for index, profile in enumerate(config.scheduling_profiles):
        if profile.name in names:
            yield ("schedulingProfiles", index, "name"), f"a second profile called '{profile.name}'; use another name"
        names.add(profile.name)
        pickers = 0
        for number, ref in enumerate(profile.plugins):
            path = ("schedulingProfiles", index, "plugins", number)
            if ref.plugin_ref not in types:
                advice = suggest_similar(ref.plugin_ref, types)
                yield (*path, "pluginRef"), f"no plugin is called '{ref.plugin_ref}'; {advice}"
                continue
            kind = known[types[ref.plugin_ref]].kind if types[ref.plugin_ref] in known else "scorer"
            pickers += kind == "picker"
            if pickers > 1:
                yield (*path, "pluginRef"), "a second picker; a profile has one"

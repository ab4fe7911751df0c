# SPDX-License-Identifier: Apache-2.0
"""A picker of plugins as data: which plugins with which parameters, and which profiles run them. And the picker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from extproc.api.quantities import decode_quantity
from extproc.scheduling.builtin_pickers import PrefixAware, PrefixAwareParameters
from extproc.scheduling.engine_metrics_config import MetricsExtractor, MetricsSource, merge_extractors
from extproc.scheduling.external_plugin_guards import GuardedPlugin, guard_plugin
from extproc.scheduling.framework import (
    ConfiguredPicker,
    NamedFilter,
    NamedScorer,
    NeedsPlugins,
    Profile,
    SessionPlugin,
)
from extproc.scheduling.plugins.profile_handlers import SingleProfileHandler
from extproc.scheduling.plugins.score_selectors import MaxScoreSelector
from extproc.scheduling.registry import PluginType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.scheduling.framework import Selector
    from extproc.scheduling.picker import Picker
    from extproc.scheduling.plugins.profile_handlers import EndpointPinScreener, RolloutScreener
    from extproc.scheduling.registry import Kind


class ConfiguredPlugin(msgspec.Struct, frozen=True):
    """One plugin. ``name``: how profiles and other plugins refer to it. ``parameters``: of the type's struct."""

    name: str
    type: PluginType
    parameters: Mapping[str, Any] = {}


class ProfileSpec(msgspec.Struct, frozen=True):
    """``plugins``: names and weights, in the order in which they run; a weight is a scorer's."""

    name: str
    plugins: tuple[tuple[str, float], ...]


class PickerSpec(msgspec.Struct, frozen=True):
    """Every name in it is that of a plugin in it. A picker among the plugins selects where a profile names none; else
    the best score does. ``tiers``: tokens at each endpoint, by the name of a cache tier.
    """

    plugins: tuple[ConfiguredPlugin, ...]
    profiles: tuple[ProfileSpec, ...]
    tiers: Mapping[str, float] = {}


def build_configured_picker(spec: PickerSpec) -> ConfiguredPicker:
    """Raises PluginFailed if a plugin of another package cannot be made."""
    external = {one.name for one in spec.plugins if one.type.is_external}
    parameters = {one.name: _parameters(one) for one in spec.plugins}
    # plugins of ours may run filters of others
    others = {
        name: GuardedPlugin(name, one) if name in external and hasattr(one, "keep") else one
        for name, one in parameters.items()
    }
    plugins: dict[str, tuple[Kind, Any]] = {}
    for one in spec.plugins:
        name, kind, plugin = one.name, one.type.kind, parameters[one.name]
        if name in external:
            plugin = guard_plugin(name, kind, plugin, parameters)
        elif isinstance(plugin, NeedsPlugins):
            plugin = plugin.with_plugins(others)
        plugins[name] = kind, plugin
    handler = next((plugin for kind, plugin in plugins.values() if kind == "profile handler"), SingleProfileHandler())
    screeners = [(name, plugin) for name, (kind, plugin) in plugins.items() if kind == "screener"]
    for _, screener in screeners:
        handler = screener.paired(handler)
    usual = next((plugin for kind, plugin in plugins.values() if kind == "picker"), MaxScoreSelector())
    keepers = [
        plugin.session_plugin() if isinstance(plugin, GuardedPlugin) else plugin for _, plugin in plugins.values()
    ]
    default = PrefixAware(PrefixAwareParameters()) if external else None
    return ConfiguredPicker(
        handler=handler,
        profiles={one.name: _screened(_profile(one, plugins, usual, default), screeners) for one in spec.profiles},
        deciders={name: plugin for name, (kind, plugin) in plugins.items() if kind == "decider"},
        sessions=tuple(one for one in keepers if isinstance(one, SessionPlugin)),
        reporters=tuple(plugin.reporter() for kind, plugin in plugins.values() if kind == "reporter"),
        prefill_profile=getattr(handler, "prefill_name", ""),
        admitters=tuple(plugin for kind, plugin in plugins.values() if kind == "admitter"),
        metrics=tuple(
            (metric.attribute_key, metric.metric_spec)
            for plugin in parameters.values()
            if isinstance(plugin, MetricsExtractor)
            for metric in plugin.custom_metrics
        ),
        tiers=spec.tiers,
        default=default,
        source=next((one for one in parameters.values() if isinstance(one, MetricsSource)), None),
        names=merge_extractors(one for one in parameters.values() if isinstance(one, MetricsExtractor)),
    )


def _parameters(one: ConfiguredPlugin) -> Any:  # noqa: ANN401 - plugins have no type in common
    """Read as ``check_shape`` reads them. A plugin may refuse values that fit its fields one by one."""
    return msgspec.convert(one.parameters, one.type.cls, dec_hook=decode_quantity, str_keys=True)


def _profile(
    spec: ProfileSpec, plugins: Mapping[str, tuple[Kind, Any]], usual: Selector, default: Picker | None
) -> Profile:
    """``usual``: the picker of a profile that names none."""
    filters: list[NamedFilter] = []
    scorers: list[NamedScorer] = []
    choice = usual
    for name, weight in spec.plugins:
        kind, plugin = plugins[name]
        if kind in {"filter", "filter and scorer"}:
            filters.append(NamedFilter(name, plugin))
        if kind in {"scorer", "filter and scorer"}:
            scorers.append(NamedScorer(name, plugin, weight))
        if kind == "picker":
            choice = plugin
    return Profile(tuple(filters), tuple(scorers), choice, spec.name, default)


def _screened(profile: Profile, screeners: Sequence[tuple[str, RolloutScreener | EndpointPinScreener]]) -> Profile:
    """``profile`` after the screeners, which no profile names."""
    before = tuple(NamedFilter(name, screener) for name, screener in screeners)
    return msgspec.structs.replace(profile, filters=(*before, *profile.filters)) if before else profile

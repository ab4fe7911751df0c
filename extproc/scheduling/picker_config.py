"""EndpointPickerConfig, as llm-d and the Gateway API Inference Extension write it, to a profile; or every mistake in it.

Source: llm-d-router ``pkg/epp/config``. ``plugins`` name types and parameters; ``schedulingProfiles`` refer to them with
weights. Where the file says nothing, llm-d's defaults hold: weight 1, ``max-score-picker``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from extproc.config.documents import read_documents
from extproc.config.mistakes import ConfigInvalid, Mistake
from extproc.config.shape import find_mistakes, suggest
from extproc.scheduling.framework import NamedFilter, NamedScorer, Profile
from extproc.scheduling.plugins.choices import MaxScore

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from extproc.config.documents import Document
    from extproc.config.shape import Finding
    from extproc.scheduling.framework import Choice
    from extproc.scheduling.registry import Kind, PluginType


class PluginSpec(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """One plugin; its name is its type's where it has none of its own."""

    type: str
    name: str | None = None
    parameters: dict[str, Any] = {}


class PluginRef(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """A plugin in a profile; the weight is a scorer's."""

    plugin_ref: str
    weight: Annotated[float, msgspec.Meta(ge=0)] | None = None


class ProfileSpec(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """A profile: plugins in the order in which they run."""

    name: str
    plugins: Annotated[list[PluginRef], msgspec.Meta(min_length=1)]


class EndpointPickerConfig(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The document."""

    api_version: Literal["llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1"]
    kind: Literal["EndpointPickerConfig"]
    plugins: list[PluginSpec] = []
    scheduling_profiles: Annotated[list[ProfileSpec], msgspec.Meta(min_length=1, max_length=1)] = []
    feature_gates: list[str] = []


def read_profile(file: str, text: str, known: Mapping[str, PluginType]) -> Profile:
    """The profile that ``text`` describes with plugins of ``known`` types; raises ConfigInvalid with all mistakes."""
    found = list(read_documents(file, text))
    mistakes = [one for one in found if isinstance(one, Mistake)]
    documents = [one for one in found if not isinstance(one, Mistake)]
    if not mistakes and len(documents) != 1:
        mistakes = [Mistake(file, 0, "", f"has {len(documents)} documents; write one EndpointPickerConfig")]
    if mistakes:
        raise ConfigInvalid(mistakes)
    (document,) = documents
    _refuse(document, find_mistakes(document.value, EndpointPickerConfig))
    config = msgspec.convert(document.value, EndpointPickerConfig)
    _refuse(document, [*_check_plugins(config, known), *_check_profiles(config, known)])
    return _build(config, known)


def _check_plugins(config: EndpointPickerConfig, known: Mapping[str, PluginType]) -> Iterator[Finding]:
    names: set[str] = set()
    for index, spec in enumerate(config.plugins):
        path = ("plugins", index)
        name = spec.name or spec.type
        if name in names:
            yield path, f"a second plugin called '{name}'; give each a name of its own"
        names.add(name)
        if spec.type not in known:
            yield (*path, "type"), f"there is no plugin type '{spec.type}'; {suggest(spec.type, known)}"
            continue
        for place, message in find_mistakes(spec.parameters, known[spec.type].cls):
            yield (*path, "parameters", *place), message


def _check_profiles(config: EndpointPickerConfig, known: Mapping[str, PluginType]) -> Iterator[Finding]:
    types = {spec.name or spec.type: spec.type for spec in config.plugins}
    for index, profile in enumerate(config.scheduling_profiles):
        pickers = 0
        for number, ref in enumerate(profile.plugins):
            path = ("schedulingProfiles", index, "plugins", number)
            if ref.plugin_ref not in types:
                advice = suggest(ref.plugin_ref, types)
                yield (*path, "pluginRef"), f"no plugin is called '{ref.plugin_ref}'; {advice}"
                continue
            kind = known[types[ref.plugin_ref]].kind if types[ref.plugin_ref] in known else "scorer"
            if ref.weight is not None and kind != "scorer":
                yield (*path, "weight"), f"'{ref.plugin_ref}' is a {kind}; only scorers have weights"
            pickers += kind == "picker"
            if pickers > 1:
                yield (*path, "pluginRef"), "a second picker; a profile has one"


def _build(config: EndpointPickerConfig, known: Mapping[str, PluginType]) -> Profile:
    plugins: dict[str, tuple[Kind, Any]] = {
        spec.name or spec.type: (known[spec.type].kind, msgspec.convert(spec.parameters, known[spec.type].cls))
        for spec in config.plugins
    }
    # a file without profiles runs all its plugins in one, as llm-d does
    refs = (
        config.scheduling_profiles[0].plugins if config.scheduling_profiles else [PluginRef(name) for name in plugins]
    )
    filters: list[NamedFilter] = []
    scorers: list[NamedScorer] = []
    choice: Choice = MaxScore()
    for ref in refs:
        kind, plugin = plugins[ref.plugin_ref]
        if kind == "filter":
            filters.append(NamedFilter(ref.plugin_ref, plugin))
        elif kind == "scorer":
            weight = 1.0 if ref.weight is None else ref.weight
            scorers.append(NamedScorer(ref.plugin_ref, plugin, weight))
        elif kind == "picker":
            choice = plugin
    return Profile(tuple(filters), tuple(scorers), choice)


def _refuse(document: Document, findings: list[Finding]) -> None:
    if findings:
        raise ConfigInvalid([document.mistake(path, message) for path, message in findings])

# SPDX-License-Identifier: Apache-2.0
"""Which preset a backend gets: the one that it names, or by format, engine, scope and priority; never by chance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controller.api.model import Backend, ModelFormat
    from controller.models.runtimes.presets import Preset

Reason = Literal["NoSupportingRuntime", "RuntimeDisabled", "RuntimeNotRecognized", "AmbiguousRuntime"]


class NotChosen(msgspec.Struct, frozen=True):
    """``reason``: in KServe's words, and AmbiguousRuntime. ``message``: for people, and what to do."""

    reason: Reason
    message: str


class _Candidate(msgspec.Struct, frozen=True, order=True):
    """Compared in this order. ``is_exact``: the version was named, and is the same."""

    scope: int
    is_exact: bool
    priority: int


def choose(backend: Backend, wanted: ModelFormat, presets: Mapping[str, Preset]) -> Preset | NotChosen:
    """``presets``: all that the namespace has, by name."""
    if backend.runtime is not None:
        return _named(backend.runtime, presets)
    matching = {name: rank for name, one in presets.items() if (rank := _rank(one, backend, wanted)) is not None}
    usable = {name: rank for name, rank in matching.items() if not presets[name].spec.disabled}
    if not usable:
        return _none(backend, wanted, [presets[name] for name in matching])
    best = max(usable.values())
    found = sorted(name for name, rank in usable.items() if rank == best)
    if len(found) > 1:
        names = ", ".join(str(presets[name]) for name in found)
        message = f"{names} fit equally well; name one as 'runtime', or give them different priorities"
        return NotChosen("AmbiguousRuntime", message)
    return presets[found[0]]


def _named(name: str, presets: Mapping[str, Preset]) -> Preset | NotChosen:
    preset = presets.get(name)
    if preset is None:
        return NotChosen(
            "RuntimeNotRecognized", f"there is no runtime '{name}'; there are: {', '.join(sorted(presets))}"
        )
    if preset.problem:
        return NotChosen("RuntimeNotRecognized", f"{preset} cannot be used: {preset.problem}")
    if preset.spec.disabled:
        return NotChosen("RuntimeDisabled", f"{preset} is disabled; name another, or set its 'disabled' to false")
    return preset


def _rank(preset: Preset, backend: Backend, wanted: ModelFormat) -> _Candidate | None:
    """None if the preset does not fit."""
    if preset.problem or (backend.engine is not None and preset.spec.engine != backend.engine):
        return None
    ranks = [
        _Candidate(preset.scope, one.version is not None, one.priority)
        for one in preset.spec.supports
        if one.name == wanted.name
        and (one.version is None or one.version == wanted.version)
        # whoever names an engine has chosen
        and (one.auto_select or backend.engine is not None)
    ]
    return max(ranks, default=None)


def _none(backend: Backend, wanted: ModelFormat, disabled: list[Preset]) -> NotChosen:
    if disabled:
        names = ", ".join(str(one) for one in disabled)
        return NotChosen("RuntimeDisabled", f"{names} would fit, but is disabled; name another as 'runtime'")
    what = f"format '{wanted.name}'" + (f" version '{wanted.version}'" if wanted.version else "")
    engine = f" with engine {backend.engine}" if backend.engine else ""
    return NotChosen("NoSupportingRuntime", f"no runtime supports {what}{engine}; name one as 'runtime'")

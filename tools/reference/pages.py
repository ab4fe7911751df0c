# SPDX-License-Identifier: Apache-2.0
"""The reference pages under docs/reference, from the code."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from msgspec import inspect

from attache.commands import GROUPS
from controller.api.crds import field_docs
from controller.api.crds.field_docs import wrap_paragraphs
from controller.models.runtimes.presets import built_in_presets
from extproc.llmd.compatibility_notes import ineffective_parameters
from extproc.llmd.plugin_types import ACCEPTED, BUILT_IN, NOT_BUILT
from extproc.wire_names import BODY_APIS, MODELS_PATH, Api, ApiSpec
from tools.reference import kinds, llm_d, translation
from tools.reference.kinds import MARK, field_table, structs_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attache.commands import Command
    from controller.api.serving_runtime import ServingRuntimeSpec

_APIS_HEAD: Final = f"""\
# Inference APIs

The calls that the gateway passes to engines, each under its path and its aliases; nothing else of the engines can be
reached through it. Clients send them with POST; `{MODELS_PATH}` is answered by the gateway itself. The last five are
of [classical model servers](../protocols.md): the path names the model, and what may stand behind it follows; or they
are calls of gRPC, whose message names it.
[Operations](../operations.md#what-clients-see) says what clients see.

| API of | paths | engines | queue | usage |
|---|---|---|---|---|
"""
_COUNTED: Final = """\

**queue**: whether a request waits for its turn under `flowControl`. **usage**: what limits are settled by; without it
they keep what they reserved.

## What counts

Limits reserve the input and the output of a request before an engine gets it. Requests of classical model servers have
neither.

| path | input | output |
|---|---|---|
"""
_RUNTIMES_HEAD: Final = """\
# Built-in runtimes

What a Model gets that names no runtime of its own: by its format and, if it names one, its protocol.
[Runtimes](../models.md#runtimes) says how one is chosen, and what weights of each look like.

| runtime | engine | formats | protocols | port | image |
|---|---|---|---|---|---|
"""
_RUNTIMES_FOOT: Final = """\

**formats**: a name, its versions, and the priority; without a priority, only for Models that name the runtime or its
engine. **protocols**: the first is the default. Models are served over REST. **image**: none where the Model names it.
Engines of runtimes in bold list, load and unload models by V2's repository calls (`multiModel`).
"""
_COMMANDS_HEAD: Final = """\
# Commands

`attache COMMAND --help` prints the same. Every command exits with 0 if it succeeded and with 2 for a mistake in its
options or its configuration; where another status has a meaning, its section explains it.
"""
_TITLES: Final = {
    "filter": "Filters",
    "filter and scorer": "Filters that also score",
    "scorer": "Scorers",
    "picker": "Pickers",
    "profile handler": "Profile handlers",
    "decider": "Deciders",
    "reporter": "Reporters",
    "admitter": "Admitters",
    "screener": "Screeners",
    "flow control": "Flow control",
    "data source": "Sources of data",
}
_PLUGINS_HEAD: Final = """\
# Plugins

The types that an EndpointPickerConfig may name, by kind, with their parameters. Types on one line are names of the same
plugin. [The plugins page](../picking.md#plugins) explains how they work together and how to write one.
"""
_ACCEPTED: Final = """\
## Accepted without effect

These types of llm-d configure what is built in here, or what is configured elsewhere. Files that name them are read
unchanged.

| type | what does its work here |
|---|---|
"""
_REFUSED: Final = """\
## Refused

A file that names one of these types would mean something else without it. Most are of published drafts, or of llm-d's
own tests.

| type | what to write in its place |
|---|---|
"""


def apis_page() -> str:
    """The Markdown page."""
    rows = [_row(api.spec) for api in Api]
    counted = [f"| `{api.spec.paths[0]}` | {api.spec.input} | {api.spec.output} |" for api in BODY_APIS]
    return f"{MARK}\n\n{_APIS_HEAD}" + "\n".join(rows) + "\n" + _COUNTED + "\n".join(counted) + "\n"


def _row(spec: ApiSpec) -> str:
    paths = ", ".join(f"`{path}`" for path in _paths(spec))
    waits = "waits" if spec.waits_in_queue else "passes by"
    return f"| {spec.owner} | {paths} | {spec.engines} | {waits} | {_usage(spec)} |"


def _paths(spec: ApiSpec) -> Iterator[str]:
    yield from spec.paths
    if spec.model_paths is not None:
        versions = " or ".join(f"/{selector}/{selector[0].upper()}" for selector in spec.model_paths.selectors)
        yield f"{spec.model_paths.root}NAME[{versions}]"
        yield from filter(None, spec.model_paths.verbs)
    if spec.calls is not None:
        yield from spec.calls.paths


def _usage(spec: ApiSpec) -> str:
    if not spec.reports_usage:
        return "none"
    return "in plain answers; in streams, as the gateway asks for it" if spec.usage_if_asked else "in every answer"


def runtimes_page() -> str:
    """The Markdown page."""
    rows = [_runtime_row(name, one.spec) for name, one in sorted(built_in_presets().items())]
    return f"{MARK}\n\n{_RUNTIMES_HEAD}" + "\n".join(rows) + "\n" + _RUNTIMES_FOOT


def _runtime_row(name: str, spec: ServingRuntimeSpec) -> str:
    shown = f"**`{name}`**" if spec.multi_model else f"`{name}`"
    under = f" under `{spec.openai_path_prefix}`" if spec.openai_path_prefix else ""
    protocols = ", ".join(one + under * (one == "OpenAI") for one in spec.protocols)
    image = f"`{spec.config.image}`" if spec.config.image else ""
    return f"| {shown} | {spec.engine} | {'; '.join(_formats(spec))} | {protocols} | {spec.port} | {image} |"


def _formats(spec: ServingRuntimeSpec) -> Iterator[str]:
    """By name and priority, in their order."""
    versions: dict[tuple[str, int | None], list[str]] = {}
    for one in spec.supports:
        key = one.name, one.priority if one.auto_select else None
        versions.setdefault(key, []).extend([one.version] if one.version else [])
    for (name, priority), known in versions.items():
        text = f"`{name}`" + (f" {', '.join(known)}" if known else "")
        yield text if priority is None else f"{text}: {priority}"


def commands_page() -> str:
    """The Markdown page."""
    lines = [MARK, "", _COMMANDS_HEAD]
    for title, commands in GROUPS.items():
        lines += [f"## {title}", ""]
        for command in commands:
            lines += _section(command)
    return "\n".join(lines)


def _section(command: Command) -> Iterator[str]:
    parser = command.load().parser(f"attache {command.name}")
    yield from (f"### attache {command.name}", "", wrap_paragraphs(_text(parser.description or "")), "")
    if command.extra:
        yield from (f"It needs `pip install 'attache[{command.extra}]'`.", "")
    yield from ("| argument | meaning |", "|---|---|")
    for action in parser._actions:  # noqa: SLF001 - argparse has no public way to list arguments
        if action.help is not argparse.SUPPRESS and action.dest != "help":
            yield f"| {_name(action)} | {_text(_expanded(action, parser.prog))} |"
    yield ""
    if (parser.epilog or "").startswith("Exit status"):
        yield from (wrap_paragraphs(_text(parser.epilog or "")), "")


def _name(action: argparse.Action) -> str:
    """``--listen ADDRESS``, or the choices in place of the metavar."""
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if not action.option_strings:
        return f"`{metavar}`"
    option = action.option_strings[-1]
    return f"`{option}`" if action.nargs == 0 else f"`{option} {metavar}`"


def _expanded(action: argparse.Action, prog: str) -> str:
    """The help with its defaults; choices are added, because the table has no usage line."""
    said = (action.help or "") % {**vars(action), "prog": prog}
    choices = f"; one of {', '.join(map(str, action.choices))}" if action.choices else ""
    return said + choices


def _text(text: str) -> str:
    """Words that Markdown or HTML would read as markup are escaped."""
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;").replace("{}", "`{}`")


def plugins_page() -> str:
    """The Markdown page."""
    lines = [MARK, "", _PLUGINS_HEAD]
    for kind, title in _TITLES.items():
        lines += [f"## {title}", ""]
        classes: dict[type, list[str]] = {}
        for name, plugin in BUILT_IN.items():
            if plugin.kind == kind:
                classes.setdefault(plugin.cls, []).append(name)
        for cls, names in classes.items():
            lines += _plugin(cls, names)
    rows = [f"| `{name}` | {place} |" for name, place in sorted(ACCEPTED.items())]
    refused = [f"| `{name}` | {message} |" for name, message in sorted(NOT_BUILT.items())]
    return "\n".join((*lines, _ACCEPTED + "\n".join(rows), "", _REFUSED + "\n".join(refused), ""))


def _plugin(cls: type, names: list[str]) -> list[str]:
    docs = field_docs.read_field_docs(cls)
    head = ", ".join(f"`{name}`" for name in names)
    lines = [f"### {head}", "", docs.text, ""]
    struct = inspect.type_info(cls)
    assert isinstance(struct, inspect.StructType)  # noqa: S101 - a plugin is a struct
    if not struct.fields:
        return lines + _without_effect(cls)
    inner = list(_inner(struct, names[0]))
    lines += field_table(struct, docs, {one.cls: path for path, one in inner})
    lines += _without_effect(cls)
    for path, one in inner:
        said = field_docs.read_field_docs(one.cls)
        lines += [f"#### `{path}`", "", said.text, ""]
        lines += field_table(one, said, {other.cls: place for place, other in inner})
    return lines


def _without_effect(cls: type) -> list[str]:
    reasons = ineffective_parameters(cls)
    if not reasons:
        return []
    rows = [f"| `{name}` | {reason} |" for name, reason in reasons.items()]
    return ["| accepted, without effect | because |", "|---|---|", *rows, ""]


def _inner(struct: inspect.StructType, path: str) -> Iterator[tuple[str, inspect.StructType]]:
    for field in struct.fields:
        for rest, found in structs_in(field.type):
            yield f"{path}.{field.encode_name}{rest}", found
            yield from _inner(found, f"{path}.{field.encode_name}{rest}")


def pages() -> Mapping[str, str]:
    """Every page by the name of its file. Each ends with one line break."""
    found = {f"{name}.md": kinds.page(cls) for name, cls in kinds.KINDS.items()}
    others = {
        "apis.md": apis_page(),
        "plugins.md": plugins_page(),
        "commands.md": commands_page(),
        "runtimes.md": runtimes_page(),
        "llm-d-flags.md": llm_d.flags_page(),
        "translation.md": translation.page(),
    }
    files = {"llm-d-plugins.md": llm_d.parameters_page(), "llm-d-files.md": llm_d.files_page()}
    return {name: text.rstrip("\n") + "\n" for name, text in {**found, **others, **files}.items()}

# SPDX-License-Identifier: Apache-2.0
"""The reference pages are those of the code, and say what the source says."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import inspect

from controller.api.crds import field_docs
from extproc.llmd.plugin_types import BUILT_IN, NOT_BUILT
from tools.reference.kinds import KINDS, anchor, default_text, page, type_text
from tools.reference.llm_d import LLM_D, parameter_verdicts, unknown_parameters
from tools.reference.llm_d import verdicts as file_verdicts
from tools.reference.pages import commands_page, pages


class Part(msgspec.Struct, frozen=True, rename="camel"):
    """One part. ``both_ends`` and ``middle``: where it begins. Their sum is ``total``.

    A second paragraph about ``both_ends``.
    """

    both_ends: int
    middle: int = 2
    # how long it may be,
    # in metres
    length: Annotated[float, msgspec.Meta(gt=0, le=10)] = 1.5
    colour: Annotated[Literal["red", "blue"], msgspec.Meta(description="of its **outside**")] = "red"
    tags: tuple[str, ...] = ()
    names: Annotated[dict[str, int], msgspec.Meta(max_length=3)] | None = None


def fields() -> dict[str, inspect.Field]:
    kind = inspect.type_info(Part)
    assert isinstance(kind, inspect.StructType)
    return {field.name: field for field in kind.fields}


def test_no_meaning_is_cut_off() -> None:
    meanings = [line for page in pages().values() for line in page.splitlines() if line.startswith("| `")]
    assert [one for one in meanings if re.search(r"([,;:]| (No|and|or|of|the)) \|$", one)] == []


def test_a_clause_about_a_field_begins_a_sentence_or_follows_another() -> None:
    class Cut(msgspec.Struct):
        """A cut, ``one``: the first, ``two``: the second; no ``three``: none. ``three``: the third."""

        one: int
        two: int
        three: int

    assert field_docs.read_field_docs(Cut).fields == {
        "one": "The first",
        "two": "The second; no `three`: none",
        "three": "The third",
    }


def test_every_parameter_of_llm_ds_plugins_is_taken_or_told() -> None:
    assert unknown_parameters() == []
    assert {name for name, _, here in parameter_verdicts() if here.startswith("not built")} == {"reserve-endpoint"}
    assert NOT_BUILT.keys() & LLM_D.keys() == {"reserve-endpoint"}
    by_parameter = {(name, parameter): here for name, parameter, here in parameter_verdicts()}
    assert by_parameter["prefix-cache-affinity-filter", "maxTTFTPenaltyMs"] == "taken"
    assert by_parameter["no-hit-lru-scorer", "lruSize"].startswith("without effect: every endpoint")
    assert by_parameter["token-producer", "estimate"].startswith("without effect; in its place, the ModelServer's")


def test_published_files_load_but_for_the_types_that_the_page_names() -> None:
    assert sum(not refused for *_, refused in file_verdicts()) >= 145
    found = {path: refused for repo, path, refused in file_verdicts() if repo == "llm-d/llm-d"}
    assert found["guides/flow-control/router/flow-control.values.yaml"] == ""
    assert found["guides/multi-cluster-routing/router/hub-load.values.yaml"] == ""
    (refused,) = (refused for _, path, refused in file_verdicts() if path.endswith("testdata/datalayer-config.yaml"))
    assert refused == "`mock-metrics-source` (nothing: it is of llm-d's own tests)"


def test_meanings_come_from_descriptions_comments_and_docstrings() -> None:
    docs = field_docs.read_field_docs(Part)
    assert docs.text == "One part.\n\nA second paragraph about `bothEnds`."
    assert docs.fields == {
        "both_ends": "Where it begins. Their sum is `total`",
        "middle": "Where it begins. Their sum is `total`",
        "length": "How long it may be, in metres",
        "colour": "of its **outside**",
    }


@pytest.mark.parametrize(
    ("name", "expected", "default"),
    [
        ("both_ends", "integer", "required"),
        ("middle", "integer", "`2`"),
        ("length", "number, at most 10, above 0", "`1.5`"),
        ("colour", "`blue`, `red`", "`red`"),
        ("tags", "list of string", ""),
        ("names", "map of string to integer, at most 3", ""),
    ],
)
def test_types_and_defaults_in_words(name: str, expected: str, default: str) -> None:
    field = fields()[name]
    assert type_text(field.type, lambda kind: kind.cls.__name__) == expected
    assert default_text(field) == default


@pytest.mark.parametrize("kind", KINDS.values())
def test_links_lead_to_sections(kind: type) -> None:
    text = page(kind)
    linked = {line.partition(")")[0] for line in text.split("](#")[1:]}
    sections = {anchor(line.removeprefix("## ")) for line in text.splitlines() if line.startswith("## ")}
    assert linked <= sections


def test_every_plugin_and_command_has_its_section() -> None:
    text = pages()["plugins.md"]
    assert [name for name in BUILT_IN if f"`{name}`" not in text] == []
    assert "### attache explain" in commands_page()


@pytest.mark.parametrize("kind", KINDS.values())
def test_every_field_of_a_kind_has_a_meaning(kind: type) -> None:
    rows = [line for line in page(kind).splitlines() if line.startswith("| `")]
    advice = "say it in the struct's docstring, as ``field``: meaning"
    assert [row for row in rows if row.endswith("|  |")] == [], advice

# SPDX-License-Identifier: Apache-2.0
"""Files come apart where YAML and JSON say, and every line is found again."""

from __future__ import annotations

import pytest
import yaml

from extproc.api.config_errors import ConfigInvalid
from extproc.api.yaml_documents import Document, parse_document, split_documents


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\n",
        "a: 1",
        "---\na: 1\n---\nb: 2\n",
        "# only a comment\n---\na: 1\n--- # another\nb: 2",
        "a: 1\r\n---\r\nb: 2\r\n",
        "a: |\n  text\n  ---\n  more\n---\nb: 2\n",
        "a: '--- not a mark'\n----: 1\n---x: 2\n",
        "--- {a: 1}\n--- [1, 2]\n---\t{b: 2}\n",
        "%YAML 1.1\n---\na: 1\n...\n%YAML 1.1\n---\nb: 2\n",
        "a: 1\n...\n---\nb: 2\n",
        "a: 1\r---\rb: 2\r",
        "\ufeff---\na: 1\n---\nb: 2\n",
        "---\n---\na: 1\n---\n",
        "a: é\u2028---\nb: 2\n",
    ],
)
def test_documents_are_those_that_yaml_sees(text: str) -> None:
    expected = [value for value in yaml.load_all(text, yaml.CSafeLoader) if value is not None]
    values = [parse_document(document)[0] for document in split_documents("a.yaml", text)]
    assert [value for value in values if value is not None] == expected


@pytest.mark.parametrize(
    "text", ["[]", "{}", ' {"a": [1]} ', '[{"a": 1}, {"a": 1}, {"b": "}, {"}]', '[\n{"é": 1},\n\n{"b": 2}]']
)
def test_json_is_an_object_or_an_array_of_them(text: str) -> None:
    value = yaml.safe_load(text)
    assert [parse_document(one)[0] for one in split_documents("a.json", text)] == (
        value if isinstance(value, list) else [value]
    )


def test_on_is_text_where_it_is_the_name_of_a_field() -> None:
    (document,) = split_documents("a.yaml", "on: [x]\nb: {on: on, y: yes}\n")
    value, _ = parse_document(document)
    assert value == {"on": ["x"], "b": {"on": True, "y": True}}


def test_a_mistake_is_on_its_line_in_the_file() -> None:
    text = "# comment\na: 1\n---\nb:\n  - c: 1\n  - d: 2\n"
    _, second = split_documents("x.yaml", text)
    found = second.locate_mistakes([(("b", 1, "d"), "wrong"), (("b", 0, "missing", "deep"), "gone"), ((), "whole")])
    assert [one.line for one in found] == [6, 5, 4]
    items = split_documents("x.json", '[\n  {"a": 1},\n  {\n    "b": {\n      "c": 2}}]')
    assert [one.line for one in items[1].locate_mistakes([(("b", "c"), "wrong"), ((), "whole")])] == [5, 3]


def test_where_json_is_not_yaml_the_line_is_that_of_the_document() -> None:
    # libyaml takes no surrogate pairs
    document = Document("x.json", '{"a":\n"\\ud83d\\ude00"}', line=7, is_json=True)
    assert [one.line for one in document.locate_mistakes([(("a",), "wrong")])] == [7]


@pytest.mark.parametrize(
    ("file", "text", "line", "message"),
    [
        ("x.yaml", "a: 1\n---\nb: [\n", 4, "not YAML"),
        ("x.yaml", "a: &a [*a]\n", 1, "refers to itself"),
        ("x.json", '{"a": 1,\n "b": }', 2, "not JSON"),
        ("x.json", '[{"a": 1},\n {"b": \n]', 3, "not JSON"),
    ],
)
def test_broken_syntax_is_placed(file: str, text: str, line: int, message: str) -> None:
    with pytest.raises(ConfigInvalid, match=message) as caught:
        [parse_document(document) for document in split_documents(file, text)]
    assert caught.value.mistakes[0].line == line


@pytest.mark.parametrize(
    ("file", "text"), [("x.yaml", "a:\n  b: 1\n  b: 2\n"), ("x.json", '{"a": {\n"b": 1,\n"b": 2}}')]
)
def test_a_repeated_key_is_found(file: str, text: str) -> None:
    (document,) = split_documents(file, text)
    (mistake,) = document.locate_mistakes(parse_document(document)[1])
    assert (mistake.line, mistake.path) == (3, "a.b")
    assert "is written twice" in mistake.message

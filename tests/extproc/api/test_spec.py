# SPDX-License-Identifier: Apache-2.0
"""Objects are namespace and name, in one spelling."""

from __future__ import annotations

import msgspec.inspect
import pytest

from extproc.api.document_decoder import decode
from extproc.api.document_kinds import DOCUMENT_KINDS
from extproc.api.spec import ADVICE, Metadata, namespace_of, qualified_key
from extproc.api.yaml_documents import Document


def test_a_key_is_namespace_and_name() -> None:
    assert Metadata(name="llama").key == "default/llama"
    assert Metadata(name="llama", namespace="models").key == "models/llama"
    assert namespace_of("models/llama") == "models"


@pytest.mark.parametrize(("text", "key"), [("llama", "default/llama"), ("models/llama", "models/llama")])
def test_a_name_alone_is_in_the_default_namespace(text: str, key: str) -> None:
    assert qualified_key(text) == key


@pytest.mark.parametrize("value", ["a b", "-a", "a\\n", "a/b", "\\0", "é"])
def test_what_is_no_label_is_told(value: str) -> None:
    text = f"""apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {{name: s}}
spec: {{model: m, workloadSelector: {{matchLabels: {{app: "{value}"}}}}, workloadPort: {{port: 1}}}}
"""
    _, mistakes = decode(Document("a.yaml", text))
    (mistake,) = mistakes
    assert "is no value of a label; write letters" in mistake.message


def test_there_is_advice_for_each_pattern_of_the_directorys_kinds() -> None:
    found: set[str] = set()
    seen: set[str] = set()

    def walk(kind: object) -> None:
        if repr(kind) in seen:
            return
        seen.add(repr(kind))
        if isinstance(kind, msgspec.inspect.StrType) and kind.pattern is not None:
            found.add(kind.pattern)
        if isinstance(kind, msgspec.Struct):
            for field in kind.__struct_fields__:
                value = getattr(kind, field)
                for one in value if isinstance(value, tuple) else (value,):
                    walk(one)

    for one in msgspec.inspect.multi_type_info([kind.document for kind in DOCUMENT_KINDS]):
        walk(one)
    assert len(found) > 9
    assert found <= ADVICE.keys()

# SPDX-License-Identifier: Apache-2.0
"""Objects are namespace and name, in one spelling."""

from __future__ import annotations

import pytest

from extproc.api.spec import Metadata, full_key, namespace_of


def test_a_key_is_namespace_and_name() -> None:
    assert Metadata(name="llama").key == "default/llama"
    assert Metadata(name="llama", namespace="models").key == "models/llama"
    assert namespace_of("models/llama") == "models"


@pytest.mark.parametrize(("text", "key"), [("llama", "default/llama"), ("models/llama", "models/llama")])
def test_a_name_alone_is_in_the_default_namespace(text: str, key: str) -> None:
    assert full_key(text) == key

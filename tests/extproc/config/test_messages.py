# SPDX-License-Identifier: Apache-2.0
"""Plausible mistakes: each is told of once, by its name, with what to write instead."""

from __future__ import annotations

import pytest

from extproc.config.errors import ConfigInvalid
from extproc.config.load import load

TEXT = """apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata:
  name: llama
spec:
  model: llama-8b
  engine: vLLM
  endpoints:
  - address: 127.0.0.1:8000
  trafficPolicy:
    timeout: 30s
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata:
  name: llama
spec:
  modelName: llama-8b
  rules:
  - targetModels:
    - modelServerName: llama
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  model:", "\tmodel:", "a.yaml:6: not YAML: a tab in the indentation"),
        ("  - address", "\t- address", "a.yaml:9: not YAML: a tab in the indentation"),
        ("- address", "-\taddress", "a.yaml:9: not YAML: a tab in the indentation"),
        (" 30s", " 30", "30 has no unit; write 30s if it is seconds"),
        (" 30s", " 5 minutes", "'5 minutes' is not a duration; write 5m"),
        (" 30s", "", "has no value; write a duration, such as 30s"),
        ("model: llama-8b", "model: 8", "8 is a number; put it in quotes"),
        ("model: llama-8b", "model: @llama", "must not begin with @"),
        ("model: llama-8b", 'model: "llama', "a.yaml:6: not YAML: a quote is opened here and never closed"),
        ("modelName: llama-8b", "modelName: *", "must not begin with *"),
        ("  - address", "    address", "write a list, each item on a line that begins with '- '"),
        ("- address: ", "- ", "is text; write fields, indented, such as address:"),
        ("address", "adress", "did you mean 'address'?"),
        ("engine: vLLM", "engine: vllm", "did you mean 'vLLM'?"),
        ("---\n", "", "a.yaml:12: apiVersion: a second document begins here"),
        ("kind: ModelServer\n", "", "the field 'kind' is missing"),
    ],
)
def test_one_mistake_is_one_message(old: str, new: str, said: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        load({"a.yaml": TEXT.replace(old, new, 1).encode()})
    (mistake,) = caught.value.mistakes
    assert said in str(mistake)

# SPDX-License-Identifier: Apache-2.0
"""Objects on the pages about autoscaling are read as the controller and extproc read them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from controller.resources.autoscaling import AutoscalingPolicySpec
from controller.resources.autoscaling_binding import AutoscalingPolicyBindingSpec
from controller.resources.model import ModelSpec
from extproc.config.load import load
from extproc.config.quantities import decode_quantity

DOCS = Path(__file__).parent.parent / "docs"
# A part of an object without its kind is of a policy.
SPECS: dict[str | None, type[msgspec.Struct]] = {
    None: AutoscalingPolicySpec,
    "AutoscalingPolicy": AutoscalingPolicySpec,
    "AutoscalingPolicyBinding": AutoscalingPolicyBindingSpec,
    "Model": ModelSpec,
}


def documents(page: str) -> list[dict[str, Any]]:
    blocks = re.findall(r"```yaml\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return [document for block in blocks for document in yaml.safe_load_all(block)]


@pytest.mark.parametrize("page", ["autoscaling.md", "autoscaling-export.md"])
def test_policies_bindings_and_models_are_valid(page: str) -> None:
    ours = [one for one in documents(page) if one.get("kind") in SPECS and "spec" in one]
    assert ours
    for document in ours:
        msgspec.convert(document["spec"], SPECS[document.get("kind")], dec_hook=decode_quantity)


def test_models_without_engines_are_a_valid_directory() -> None:
    snapshot = load({"zero.yaml": yaml.safe_dump_all(documents("zero.md")).encode()})
    assert snapshot.servers[0].spec.activation is not None

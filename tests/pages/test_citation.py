# SPDX-License-Identifier: Apache-2.0
"""CITATION.cff has what its format (Citation File Format 1.2.0) requires, and says what the package says."""

from __future__ import annotations

import tomllib
from pathlib import Path

import yaml

import attache

ROOT = Path(__file__).parents[2]
# Of the format's schema: these and no others that we would write.
REQUIRED = {"cff-version", "message", "title", "authors"}
KNOWN = {*REQUIRED, "type", "version", "license", "abstract", "keywords"}


def test_the_citation_is_that_of_this_version() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert found.keys() >= REQUIRED
    assert found.keys() <= KNOWN
    assert found["cff-version"] == "1.2.0"
    assert found["type"] == "software"
    assert found["version"] == attache.__version__
    assert found["license"] == project["license"]
    # an entity, as no person is named
    assert found["authors"] == [{"name": "Attaché contributors"}]
    assert all(isinstance(found[name], str) and found[name] for name in ("message", "title", "abstract"))
    assert len(set(found["keywords"])) == len(found["keywords"])

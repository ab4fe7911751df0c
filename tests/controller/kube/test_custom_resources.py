# SPDX-License-Identifier: Apache-2.0
"""The definitions under manifests/crds are those of the types, and their rules say what the directory's checks say."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from controller.kube.crd_files import crd_yaml_files
from controller.kube.custom_resources import GATEWAY_KINDS, KINDS, CustomResourceKind, crd_object
from extproc.api.document_decoder import decode
from extproc.api.yaml_documents import split_documents
from tests.rule_cases import CASES, Case

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).parents[3] / "manifests" / "crds"
files_once = cache(crd_yaml_files)


def schemas(node: object) -> Iterator[dict[str, Any]]:
    """Every schema within a schema."""
    if isinstance(node, dict):
        yield node
        for one in node.values():
            yield from schemas(one)
    elif isinstance(node, list):
        for one in node:
            yield from schemas(one)


def rules(kind: str) -> set[str]:
    (found,) = (one for one in KINDS if one.name == kind)
    return {
        rule["rule"]
        for schema in schemas(crd_object(found))
        for rule in schema.get("x-kubernetes-validations", ())
        # of a type, wherever it is used
        if "message" in rule
    }


@pytest.mark.parametrize(
    ("name", "conditions"),
    [
        ("ModelRoute", ["Accepted", "ResolvedRefs", "Programmed", "Reason"]),
        ("ModelServer", ["Programmed", "Reason"]),
        ("GatewayConfig", ["Accepted", "Programmed", "Reason"]),
        ("ModelAccessPolicy", ["Accepted", "ResolvedRefs", "Programmed", "Reason"]),
        ("AutoscalingPolicy", ["Accepted", "Reason"]),
        ("AutoscalingPolicyBinding", ["ScalingActive", "Reason"]),
    ],
)
def test_get_shows_the_condition_that_says_why_an_object_is_not_served(name: str, conditions: list[str]) -> None:
    (kind,) = (one for one in KINDS if one.name == name)
    assert [column.name for column in kind.columns if ".conditions[" in column.path] == conditions


@pytest.mark.parametrize("kind", [one for one in KINDS if one not in GATEWAY_KINDS], ids=lambda kind: kind.name)
def test_a_directory_says_of_a_kind_that_only_a_cluster_has_that_it_is_one(kind: CustomResourceKind) -> None:
    document = f"apiVersion: attache.dev/v1alpha1\nkind: {kind.name}\nmetadata: {{name: a}}\nspec: {{}}\n"
    (found,) = split_documents("a.yaml", document)
    _, (mistake,) = decode(found)
    assert mistake.message.startswith(f"{kind.name} is read in a cluster only; ")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_list_that_a_rule_walks_is_bounded(kind: CustomResourceKind) -> None:
    """Kubernetes refuses rules whose cost it cannot bound."""
    for schema in schemas(crd_object(kind)["spec"]["versions"][0]["schema"]):
        if schema.get("type") == "array":
            assert "maxItems" in schema


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}: {case.rule}")
def test_each_case_breaks_what_it_is_for(case: Case) -> None:
    assert case.accepted() != case.refused()


def test_the_cases_are_of_every_kind_that_has_rules() -> None:
    assert {case.kind for case in CASES} == {kind.name for kind in KINDS if rules(kind.name)}


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.in_directory], ids=lambda case: f"{case.kind}: {case.rule}"
)
def test_the_directory_takes_and_refuses_the_same(case: Case) -> None:
    for document, is_accepted in ((case.accepted(), True), (case.refused(), False)):
        (found,) = split_documents("example.json", json.dumps(document))
        _, mistakes = decode(found)
        assert (not mistakes) == is_accepted, mistakes

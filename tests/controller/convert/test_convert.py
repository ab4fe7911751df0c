# SPDX-License-Identifier: Apache-2.0
"""Objects of llm-d's and Kthena's autoscalers, as their users write them, and what becomes of them.

``REWRITE_GOLDEN=1`` writes what becomes of them now; look at the difference before it is committed.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from controller.commands.convert import convert, main, validate_objects
from controller.convert.foreign_fields import ConversionFailed, parse_quantity, unique_target_names

if TYPE_CHECKING:
    from collections.abc import Mapping

GOLDEN = Path(__file__).parent / "golden"
FILES = sorted(one.stem for one in GOLDEN.glob("*.yaml"))

POLICY: dict[str, Any] = {
    "apiVersion": "workload.serving.volcano.sh/v1alpha1",
    "kind": "AutoscalingPolicy",
    "metadata": {"name": "chat", "namespace": "shop"},
    "spec": {"metrics": [{"name": "waiting", "targetValue": 4}]},
}
BINDING: dict[str, Any] = {
    "apiVersion": "workload.serving.volcano.sh/v1alpha1",
    "kind": "AutoscalingPolicyBinding",
    "metadata": {"name": "chat", "namespace": "shop"},
    "spec": {
        "policyRef": {"name": "chat"},
        "homogeneousTarget": {"minReplicas": 1, "maxReplicas": 4, "target": {"targetRef": {"name": "chat"}}},
    },
}
VARIANT: dict[str, Any] = {
    "apiVersion": "llmd.ai/v1alpha1",
    "kind": "VariantAutoscaling",
    "metadata": {"name": "one", "namespace": "shop"},
    "spec": {
        "modelID": "m",
        "scaleTargetRef": {"kind": "Deployment", "name": "one"},
        "variantCost": "5",
        "minReplicas": 1,
        "maxReplicas": 3,
    },
}


def changed(thing: dict[str, Any], **spec: object) -> dict[str, Any]:
    found = copy.deepcopy(thing)
    found["spec"].update(spec)
    return found


@pytest.mark.parametrize("name", FILES)
def test_files_of_users_become_what_is_committed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(GOLDEN / f"{name}.yaml")], "attache convert") == 0
    said = capsys.readouterr()
    both = f"{said.out}---\n# standard error\n" + "".join(f"# {line}\n" for line in said.err.splitlines())
    committed = GOLDEN / f"{name}.converted"
    if os.environ.get("REWRITE_GOLDEN"):
        committed.write_text(both)
    assert both == committed.read_text()
    for thing in yaml.safe_load_all(said.out):
        validate_objects(thing)


def test_nothing_is_left_out_in_silence() -> None:
    """Every field that nobody knows is told, however deep it is."""

    def with_unknown(value: object) -> int:
        if isinstance(value, dict):
            count = sum(with_unknown(one) for one in list(value.values()))
            value["unheardOf"] = 1
            return count + 1
        return sum(with_unknown(one) for one in value) if isinstance(value, list) else 0

    binding = copy.deepcopy(BINDING)
    # what selects pods is told as a whole
    binding["spec"]["homogeneousTarget"]["target"]["metricSources"] = {"waiting": {"pod": {"port": 8000}}}
    for things in ([changed(VARIANT)], [changed(POLICY), binding]):
        last = things[-1]["spec"]
        added = with_unknown(last)
        sources = last.get("homogeneousTarget", {}).get("target", {}).get("metricSources")
        if sources:
            # here keys are names of metrics, not fields
            del sources["unheardOf"]
            added -= 1
        told = [one for one in convert(things).warnings if "unheardOf" in one]
        assert len(told) == added


def test_a_kind_that_is_not_known_is_named() -> None:
    found = convert([{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "wva"}}])
    assert found.objects == ()
    assert found.warnings == ("ConfigMap default/wva: left out; it is not a kind that can be converted",)


def test_variants_of_one_model_are_one_binding_and_of_another_namespace_another() -> None:
    second, foreign = copy.deepcopy(VARIANT), copy.deepcopy(VARIANT)
    second["metadata"]["name"] = "two"
    foreign["metadata"]["namespace"] = "bank"
    made = convert([VARIANT, second, foreign]).objects
    bindings = [one for one in made if one["kind"] == "AutoscalingPolicyBinding"]
    assert [(one["metadata"]["namespace"], [t["name"] for t in one["spec"]["targets"]]) for one in bindings] == [
        ("shop", ["one", "two"]),
        ("bank", ["one"]),
    ]


def test_models_whose_names_differ_little_do_not_meet() -> None:
    second = changed(VARIANT, modelID="other/M")
    names = [one["metadata"]["name"] for one in convert([VARIANT, second]).objects]
    assert names == ["m", "m", "m-2", "m-2"]


def test_bindings_that_read_the_same_share_a_policy() -> None:
    second = copy.deepcopy(BINDING)
    second["metadata"]["name"] = "other"
    made = convert([BINDING, POLICY, second]).objects
    assert [(one["kind"], one["metadata"]["name"]) for one in made] == [
        ("AutoscalingPolicy", "chat"),
        ("AutoscalingPolicyBinding", "chat"),
        ("AutoscalingPolicyBinding", "other"),
    ]


def test_the_first_versions_names_of_targets_mean_the_same() -> None:
    target = {"targetRef": {"kind": "ModelServing", "name": "chat"}, "metricEndpoint": {"uri": "/m", "port": 8000}}
    one = {"target": target, "minReplicas": 2, "maxReplicas": 6}
    several = {"params": [{**one, "cost": 3}], "costExpansionRatePercent": 150}
    for newer, older, block in (
        ("homogeneousTarget", "scalingConfiguration", one),
        ("heterogeneousTarget", "optimizerConfiguration", several),
    ):
        made = [convert([POLICY, with_target(name, block)]) for name in (newer, older)]
        assert made[0].objects == made[1].objects
        policy, binding = made[1].objects
        assert policy["spec"]["metrics"][0]["engine"] == {"port": 8000, "path": "/m"}
        assert (binding["spec"]["targets"][0]["minReplicas"], binding["spec"]["targets"][0]["maxReplicas"]) == (2, 6)


def test_labels_that_chose_pods_in_the_first_versions_are_told() -> None:
    labels = {"additionalMatchLabels": {"tier": "gold"}, "targetRef": {"name": "chat"}}
    made = convert([POLICY, with_target("scalingConfiguration", {"target": labels, "maxReplicas": 6})])
    assert [one for one in made.warnings if "additionalMatchLabels: not carried over" in one]


def with_target(name: str, block: Mapping[str, object]) -> dict[str, Any]:
    """The binding with another target."""
    made = copy.deepcopy(BINDING)
    made["spec"] = {"policyRef": made["spec"]["policyRef"], name: block}
    return made


def test_a_policy_that_nobody_uses_is_converted_too() -> None:
    (made,) = convert([POLICY]).objects
    assert made["spec"]["metrics"] == [
        {"name": "waiting", "value": 4.0, "source": "Engine", "engine": {"port": 8100, "path": "/metrics"}}
    ]


def test_roles_with_the_same_metrics_keep_them() -> None:
    roles = {name: {"minReplicas": 1, "maxReplicas": 4} for name in ("prefill", "decode")}
    target = {"targetRef": {"name": "pd"}, "roles": roles}
    policy, binding = convert([changed(POLICY, disaggregatedTarget=target)]).objects
    assert policy["spec"]["strategies"] == [{"name": "Target"}]
    assert [one["stage"] for one in binding["spec"]["targets"]] == ["Prefill", "Decode"]


def test_a_role_of_fixed_size_needs_no_metrics() -> None:
    roles = {"prefill": {"minReplicas": 2, "maxReplicas": 2}, "decode": {"minReplicas": 1, "maxReplicas": 4}}
    roles["decode"]["metrics"] = [{"name": "waiting", "targetValue": 1}]  # type: ignore[assignment]
    target = {"targetRef": {"name": "pd"}, "roles": roles}
    policy, _ = convert([changed(POLICY, metrics=[], disaggregatedTarget=target)]).objects
    assert [one["name"] for one in policy["spec"]["metrics"]] == ["waiting"]


@pytest.mark.parametrize(
    ("things", "said"),
    [
        ([BINDING], "convert it together with the AutoscalingPolicy chat"),
        ([POLICY, changed(BINDING, heterogeneousTarget={"params": []})], "exactly one of"),
        ([changed(VARIANT, modelID=None)], "spec.modelID: is missing"),
        ([changed(VARIANT, variantCost="much")], "'much' is not a quantity"),
        ([changed(VARIANT, variantCost="0")], "must be more than 0"),
        ([changed(VARIANT, maxReplicas="3")], "'3' is not a whole number"),
        ([changed(VARIANT, minReplicas=4)], ""),
        ([changed(POLICY, metrics={})], "metrics: not a list"),
        ([changed(POLICY, behavior={"scaleDown": {"period": "soon"}})], "'soon' is not a duration"),
    ],
)
def test_what_cannot_be_understood_is_told(things: list[dict[str, Any]], said: str) -> None:
    if not said:
        # bounds that contradict each other are for the API server's rules
        assert convert(things).objects
        return
    with pytest.raises(ConversionFailed, match=said):
        convert(things)


def test_quantities_are_read_as_kubernetes_does() -> None:
    texts = ("10", "0.5", "500m", "2k", "1Ki", "1e2", 4)
    assert [parse_quantity(one, "x") for one in texts] == [10, 0.5, 0.5, 2000, 1024, 100, 4]


def test_names_of_targets_are_short_and_differ() -> None:
    names = ["llama", "llama", "3b", "a-model-with-a-long-name-h100", "A.Model.With.A.Long.Name.h100", "x" * 30]
    found = unique_target_names(names)
    assert found == ["llama", "llama-2", "t-3b", "a-long-name-h100", "a-long-name-h100-2", "x" * 20]


def test_the_command_tells_files_that_it_cannot_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([str(tmp_path / "none.yaml")], "attache convert") == 2
    (tmp_path / "bad.yaml").write_text("just text\n")
    assert main([str(tmp_path / "bad.yaml")], "attache convert") == 2
    (tmp_path / "lone.yaml").write_text(yaml.safe_dump(BINDING))
    assert main([str(tmp_path / "lone.yaml")], "attache convert") == 2
    said = capsys.readouterr().err
    assert "none.yaml" in said
    assert "is no object" in said
    assert "convert it together" in said


def test_lists_are_opened(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": [VARIANT]}))
    assert main([str(tmp_path / "list.yaml")], "attache convert") == 0
    assert len(list(yaml.safe_load_all(capsys.readouterr().out))) == 2

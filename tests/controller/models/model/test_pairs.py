# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode of a Model: who requests the prefill, and which engines form pairs, also during a rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from controller.api.serving_runtime import Connector, Engine
from controller.commands.render import model_as_yaml, render, render_models
from controller.kube.api_resources import PODS
from controller.models.model.model_state import ModelState
from controller.models.model.reconcile import reconcile
from controller.models.model_infer import names
from controller.models.runtimes.prefill_connectors import OWN_LEGS
from extproc.api.config_loader import load_snapshot
from extproc.api.model_server import Connector as OwnConnector
from extproc.llmd.picker_builder import InstalledPluginChecker
from tests.kube_objects import resource
from tests.model_infer_cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Iterator

Plain = dict[str, Any]
BOTH = ("prefill", "decode")


def model(disaggregation: Plain | None = None, **backend: object) -> Plain:
    apart = {"prefill": 2, "decode": 2, **(disaggregation or {})}
    spec = {"uri": "hf://org/llama", "backends": [{"name": "apart", "disaggregation": apart, **backend}]}
    metadata = {"name": "llama", "namespace": "default", "uid": "uid-of-llama"}
    return {"apiVersion": "attache.dev/v1alpha1", "kind": "Model", "metadata": metadata, "spec": spec}


def whole() -> Plain:
    """Without prefill and decode apart."""
    return {**model(), "spec": {"uri": "hf://org/llama"}}


def child(thing: Plain, kind: str) -> Plain:
    (made,) = render_models([thing])
    assert made.problem == ""
    (found,) = (one for one in made.children if one["kind"] == kind)
    return dict(found)


def pd_group(disaggregation: Plain | None = None, **backend: object) -> Plain:
    found: Plain = child(model(disaggregation, **backend), "ModelServer")["spec"]["pdGroup"]
    return found


def test_the_gateway_requests_prefills_of_a_model_that_says_nothing_of_it() -> None:
    assert pd_group() == {
        "prefillLabels": {"attache.dev/role": "prefill"},
        "decodeLabels": {"attache.dev/role": "decode"},
        "groupKey": "attache.dev/group-revision",
        "leg": "Gateway",
        "connector": "NixlConnector",
    }


@pytest.mark.parametrize(
    ("engine", "connector", "expected"),
    [
        ("vLLM", "NIXL", ("Gateway", "NixlConnector")),
        ("vLLM", "LMCache", ("Gateway", "LMCacheConnectorV1")),
        ("vLLM", "Mooncake", ("Gateway", "MooncakeConnector")),
        ("SGLang", "NIXL", ("Gateway", "bootstrap_room")),
        ("SGLang", "Mooncake", ("Gateway", "bootstrap_room")),
        ("TensorRT-LLM", "NIXL", ("Sidecar", None)),
    ],
)
def test_the_leg_is_the_gateways_where_it_has_engine_and_connector(
    engine: str, connector: str, expected: tuple[str, str | None]
) -> None:
    found = pd_group({"connector": connector}, engine=engine)
    assert (found["leg"], found.get("connector")) == expected


def test_the_table_of_legs_has_names_that_models_and_extproc_know() -> None:
    engines, connectors, own = (set(one.__args__) for one in (Engine, Connector, OwnConnector))
    assert {engine for engine, _ in OWN_LEGS} <= engines
    assert {connector for _, connector in OWN_LEGS} <= connectors
    assert set(OWN_LEGS.values()) <= own


def test_a_sidecar_and_what_happens_after_a_failure_can_be_chosen() -> None:
    assert pd_group({"onPrefillFailure": "Fail"})["onPrefillFailure"] == "Fail"
    assert pd_group({"onPrefillFailure": "Local"})["onPrefillFailure"] == "Local"
    assert "onPrefillFailure" not in pd_group(engine="SGLang")
    assert pd_group({"leg": "Gateway"}) == pd_group()
    found = pd_group({"leg": "Sidecar"})
    assert found["leg"] == "Sidecar"
    assert not {"connector", "onPrefillFailure"} & set(found)


@pytest.mark.parametrize(
    ("engine", "disaggregation", "words"),
    [
        (
            "TensorRT-LLM",
            {"leg": "Gateway"},
            "leg: extproc requests no prefills of TensorRT-LLM with NIXL yet; leave it",
        ),
        ("TensorRT-LLM", {"onPrefillFailure": "Fail"}, "onPrefillFailure has no effect where a sidecar requests"),
        (
            "SGLang",
            {"onPrefillFailure": "Local"},
            "onPrefillFailure: decode engines of SGLang compute no prompts;",
        ),
        ("SGLang", {"connector": "LMCache"}, "runtime sglang has NIXL, Mooncake, but disaggregation asks for LMCache;"),
    ],
)
def test_what_engine_and_connector_cannot_do_is_refused(engine: str, disaggregation: Plain, words: str) -> None:
    (made,) = render_models([model(disaggregation, engine=engine)])
    assert made.problem.startswith("InvalidSpec: backend 'apart': ")
    assert words in made.problem


@pytest.mark.parametrize(
    ("prefill", "decode", "words"),
    [
        (["--block-size=32"], ["--block-size", "32"], ""),
        ([], [], ""),
        (["--block-size=32"], ["--block-size=16"], "prefill and decode have different --block-size, 32 and 16;"),
        (["--block-size=32"], [], "different --block-size, 32 and none; write it once, into the backend's config.args"),
    ],
)
def test_both_engines_have_blocks_of_one_size(prefill: list[str], decode: list[str], words: str) -> None:
    (made,) = render_models([model({"prefillConfig": {"args": prefill}, "decodeConfig": {"args": decode}})])
    assert words in made.problem
    assert bool(words) == bool(made.problem)


def test_a_prefill_engine_has_time_to_hand_its_kv_caches_over() -> None:
    roles = child(model(), "ModelInfer")["spec"]["template"]["roles"]
    grace_s = {one["name"]: one["entryTemplate"]["spec"]["terminationGracePeriodSeconds"] for one in roles}
    assert grace_s == {"prefill": 300 + 60 + 30, "decode": 300 + 30}


def test_agents_of_both_roles_ask_their_engine_alone() -> None:
    for thing, expected in ((model(engine="SGLang"), [True, True]), (whole(), [False])):
        roles = child(thing, "ModelInfer")["spec"]["template"]["roles"]
        agents = [one["entryTemplate"]["spec"]["initContainers"][-1] for one in roles]
        assert ["--disaggregated" in one["args"] for one in agents] == expected


def test_the_status_says_where_a_sidecar_is_needed() -> None:
    words_of = {"TensorRT-LLM": " (extproc requests no prefills of TensorRT-LLM with NIXL yet; run a"}
    for engine in ("vLLM", "SGLang", "TensorRT-LLM"):
        words = words_of.get(engine, "")
        status = reconcile(ModelState(thing=model(engine=engine)), 0.0).status
        assert status is not None
        (resolved,) = (one for one in status["conditions"] if one["type"] == "Resolved")
        assert resolved["status"] == "True"
        assert words in resolved["message"]
        assert bool(words) == ("sidecar" in resolved["message"])


@pytest.mark.parametrize("engine", ["vLLM", "SGLang", "TensorRT-LLM"])
def test_render_shows_both_roles_and_whether_a_sidecar_is_needed(engine: str) -> None:
    (made,) = render_models([model(engine=engine)])
    text = model_as_yaml(made)
    assert {name: one["settings"]["role"] for name, one in made.engines.items()} == {
        "apart/prefill": "prefill",
        "apart/decode": "decode",
    }
    assert ("# apart/prefill:" in text, "# apart/decode:" in text) == (True, True)
    assert ("#   sidecar: extproc requests no prefills of" in text) == (engine == "TensorRT-LLM")


class Pairs:
    """A Model's ModelInfer as it is rolled out, and the pairs that a gateway makes of its pods."""

    def __init__(self, *, unit: str = "Group", **rollout: object) -> None:
        thing = model(replicas=2, rollout={"unit": unit, **rollout})
        infer = child(thing, "ModelInfer")
        infer["metadata"] |= {"uid": "uid-of-infer", "generation": 1}
        # no node here has room for a gang
        infer["spec"]["template"] = {**infer["spec"]["template"], "drainTimeout": "0s", "gang": None}
        self.cluster = Cluster(infer)
        self.server = child(thing, "ModelServer")

    def update(self, *roles: str) -> None:
        """These roles get another image."""
        for one in self.cluster.thing["spec"]["template"]["roles"]:
            if one["name"] in roles:
                one["entryTemplate"]["spec"]["containers"][0]["image"] = "vllm:2"
        self.cluster.thing["metadata"]["generation"] += 1

    def found(self) -> list[tuple[str, str]]:
        """The images of each pair, of prefill and decode."""
        pods, images = [], {}
        for number, one in enumerate(sorted(self.cluster.of(PODS).values(), key=lambda one: one["metadata"]["name"])):
            status = {**one.get("status", {}), "podIP": f"10.0.0.{number + 1}"}
            pods.append({**one, "status": status})
            images[f"10.0.0.{number + 1}:8000"] = one["spec"]["containers"][0]["image"]
        objects = [resource("GatewayConfig", "main", {}), self.server, *pods]
        rendered = render(objects, "default/main", InstalledPluginChecker())
        assert not rendered.refused
        (server,) = load_snapshot(rendered.files).servers
        group = server.spec.pd_group
        assert group is not None
        ready = [one for one in server.spec.endpoints if not one.draining]
        return [
            (images[one.address], images[other.address])
            for one in ready
            for other in ready
            if group.prefill_labels.items() <= one.labels.items()
            and group.decode_labels.items() <= other.labels.items()
            and one.labels[group.group_key] == other.labels[group.group_key]
        ]

    def rollout(self) -> Iterator[list[tuple[str, str]]]:
        """The pairs after each step: pods become ready one after the other."""
        for _ in range(100):
            self.cluster.look(after_s=1)
            yield self.found()
            waiting = [name for name in self.cluster.names() if not name.endswith("-") and not self.is_ready(name)]
            self.cluster.gone()
            if waiting:
                self.cluster.ready(waiting[0])
            elif not self.cluster.plan.actions:
                return
        pytest.fail("it never ends")

    def is_ready(self, name: str) -> bool:
        conditions = self.cluster.pod(name).get("status", {}).get("conditions", ())
        return any(one["status"] == "True" for one in conditions)


@pytest.mark.parametrize("unit", ["Group", "Role"])
def test_no_prefill_engine_of_one_version_is_paired_with_a_decode_engine_of_another(unit: str) -> None:
    pairs = Pairs(unit=unit)
    pairs.cluster.settle()
    (old,) = {image for pair in pairs.found() for image in pair}
    assert len(pairs.found()) == 2 * 2 * 2
    pairs.update(*BOTH)
    steps = list(pairs.rollout())
    assert {image for found in steps for pair in found for image in pair} == {old, "vllm:2"}
    assert [pair for found in steps for pair in found if pair[0] != pair[1]] == []
    assert len(steps[-1]) == 2 * 2 * 2


def test_decode_engines_that_stay_keep_pairs_while_prefill_engines_change() -> None:
    pairs = Pairs(unit="Role")
    pairs.cluster.settle()
    (old,) = {image for pair in pairs.found() for image in pair}
    pairs.update("prefill")
    steps = list(pairs.rollout())
    # both groups have some, always
    assert min(len(one) for one in steps) > 2 * 2
    assert steps[-1] == [("vllm:2", old)] * (2 * 2 * 2)


def test_pods_of_an_earlier_release_get_the_label_by_which_pairs_are_formed() -> None:
    pairs = Pairs()
    pairs.cluster.settle()
    for one in pairs.cluster.of(PODS).values():
        del one["metadata"]["labels"][names.GROUP_REVISION]
    pairs.cluster.settle()
    assert len(pairs.found()) == 2 * 2 * 2


@pytest.mark.parametrize("field", ["encode", "maxEncode"])
def test_an_encode_stage_is_refused_with_what_to_do(field: str) -> None:
    (made,) = render_models([model({field: 1})])
    assert f"spec.backends[0].disaggregation.{field}: there is no encode stage" in made.problem

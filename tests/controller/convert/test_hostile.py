# SPDX-License-Identifier: Apache-2.0
"""Objects that nobody sane writes: they are converted or refused in words, in bounded time, and nothing else
happens.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.commands.convert import convert, main, validate_objects
from controller.convert.foreign_fields import ConversionFailed, unique_target_names
from tests.examples import examples

if TYPE_CHECKING:
    from collections.abc import Iterator

GOLDEN = Path(__file__).parent / "golden"
OBJECTS: list[dict[str, Any]] = [
    thing for file in sorted(GOLDEN.glob("*.yaml")) for thing in yaml.safe_load_all(file.read_text()) if thing
]
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**400, -(10**400), 2**63, -1, 0, 10**30]),
    st.floats(),
    st.sampled_from(
        ["1e400", "-1e400", "NaN", "sNaN", "Infinity", "1e-400", "9" * 900 + "E", "1_0", "١٢", "0x10", "-0", ""]
    ),
    st.sampled_from(["10m", "-5s", "1e9h", "9999999999999999h", "1h1h", "1.s", "\uff15m"]),
    st.text(max_size=20),
    st.sampled_from(["a" * 300, "../../x", "a\x1b]0;b\x07", "\ud800", "\u202e", "ß" * 64, "x\nwarning: y"]),
    st.lists(st.none() | st.integers() | st.text(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.none() | st.text(max_size=3), max_size=2),
    st.dates(),
)


def paths(value: object, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """To everything in an object."""
    if at:
        yield at
    if isinstance(value, dict):
        for key, one in value.items():
            yield from paths(one, (*at, key))
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from paths(one, (*at, index))


@st.composite
def hostile(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Objects of users with up to three things in them replaced, and some there twice."""
    things = copy.deepcopy(draw(st.lists(st.sampled_from(OBJECTS), min_size=1, max_size=3)))
    for _ in range(draw(st.integers(1, 3))):
        thing = draw(st.sampled_from(things))
        at = draw(st.sampled_from(sorted(paths(thing), key=str)))
        inner = thing
        for key in at[:-1]:
            inner = inner[key]
        inner[at[-1]] = draw(ODD)
    return [one for one in things if one.get("kind") and one.get("apiVersion")]


@settings(max_examples=examples(1000), deadline=None)
@given(hostile())
def test_whatever_is_written_is_converted_or_refused_in_words(things: list[dict[str, Any]]) -> None:
    try:
        found = convert(things)
    except ConversionFailed:
        return
    for thing in found.objects:
        validate_objects(thing)
        for at in paths(thing["spec"]):
            value: Any = thing["spec"]
            for key in at:
                value = value[key]
            assert not isinstance(value, float) or math.isfinite(value)


@pytest.mark.parametrize("count", [20_000])
def test_many_equal_names_are_told_apart_without_trying_all(count: int) -> None:
    found = unique_target_names(["llama-70b"] * count)
    assert len(set(found)) == count
    variants = [
        {
            "apiVersion": "llmd.ai/v1alpha1",
            "kind": "VariantAutoscaling",
            "metadata": {"name": f"v{number}", "namespace": "shop"},
            "spec": {"modelID": f"org-{number}/llama", "scaleTargetRef": {"name": "x"}},
        }
        for number in range(count // 20)
    ]
    assert len(convert(variants).objects) == 2 * len(variants)


def test_two_objects_of_one_name_are_refused() -> None:
    """The second one would replace the first when they are applied."""
    policy = {
        "apiVersion": "workload.serving.volcano.sh/v1alpha1",
        "kind": "AutoscalingPolicy",
        "metadata": {"name": "chat", "namespace": "shop"},
        "spec": {
            "metrics": [{"name": "waiting", "targetValue": 4}],
            "homogeneousTarget": {"target": {"targetRef": {"name": "chat"}}},
        },
    }
    binding = {
        "apiVersion": policy["apiVersion"],
        "kind": "AutoscalingPolicyBinding",
        "metadata": {"name": "chat", "namespace": "shop"},
        "spec": {"policyRef": {"name": "chat"}, "homogeneousTarget": {"target": {"targetRef": {"name": "other"}}}},
    }
    with pytest.raises(ConversionFailed, match="AutoscalingPolicyBinding shop/chat: two of these would be written"):
        convert([policy, binding])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: &a [1, 2]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: [*c, *c]", "apiVersion"),
        ("a: &a [*a]", "alias"),
        ("[" * 500, "nested"),
        ("{a: " * 500, "nested"),
        ("a: !!python/object/apply:os.system [true]", "a tag"),
        ("&a " + "x" * 10, "no object"),
        ("a: " + "9" * 5000, "number"),
        ("\ufeff\x00", "control character U+0000"),
    ],
)
def test_files_that_are_traps_are_refused(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trap.yaml").write_text(text)
    assert main([str(tmp_path / "trap.yaml")], "attache convert") == 2
    assert says in capsys.readouterr().err


def test_what_is_said_of_a_file_cannot_command_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    escapes = "x\\e]0;title\\a\\nwarning: all is well\\u202e"
    text = f"""apiVersion: llmd.ai/v1alpha1
kind: VariantAutoscaling
metadata: {{name: one, namespace: shop}}
spec: {{modelID: m, scaleTargetRef: {{name: one}}, "{escapes}": 1}}
---
apiVersion: llmd.ai/v1alpha1
kind: "{escapes}"
"""
    (tmp_path / "file.yaml").write_text(text.replace("\\\\", "\\"))
    assert main([str(tmp_path / "file.yaml")], "attache convert") == 0
    said = capsys.readouterr().err
    assert "title" in said
    assert all(line.isprintable() for line in said.splitlines())
    assert not any(line.startswith("warning: all is well") for line in said.splitlines())

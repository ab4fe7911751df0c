# SPDX-License-Identifier: Apache-2.0
"""Every example on our pages, as a reader pastes it into an empty directory.

Objects come to their real decoders, Python runs, and what is typed exists. Scripts run in
``tests/with_envoy/test_docs_scripts.py``.
"""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import shlex
import subprocess
import tomllib
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml

from attache.__main__ import misspelt_option
from attache.commands import COMMANDS
from controller.webhooks.admission.checks import read_review, review_object
from extproc.api.config_loader import load_directory
from extproc.api.document_kinds import DOCUMENT_KINDS
from extproc.llmd.picker_builder import InstalledPluginChecker
from tests.docs_examples import EXAMPLES, Example

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT: Final = Path(__file__).parents[2]
_TEST: Final = re.compile(r"tests/[\w/]+\.py")


def of(*languages: str) -> pytest.MarkDecorator:
    """Parametrize by the examples in these languages that are checked here."""
    found = [one for one in EXAMPLES if one.language in languages and not one.reason]
    return pytest.mark.parametrize("example", found, ids=[f"{one.page}-{one.number}" for one in found])


def test_every_example_has_a_language_that_is_checked() -> None:
    languages = {"bash", "json", "python", "text", "toml", "yaml"}
    assert [one for one in EXAMPLES if one.language not in languages] == []


def test_what_is_not_checked_here_is_run_by_a_test_or_has_a_reason() -> None:
    left_out = [one for one in EXAMPLES if one.reason]
    assert len(left_out) <= 10
    for one in left_out:
        for name in _TEST.findall(one.reason):
            assert one.page in (ROOT / name).read_text(), f"{name} does not name {one.page}"


# Of Kubernetes and other projects: what they are called there.
FOREIGN: Final[Mapping[str, str]] = {
    "ClusterRole": "rbac.authorization.k8s.io/v1",
    "Gateway": "gateway.networking.k8s.io/v1",
    "GatewayClass": "gateway.networking.k8s.io/v1",
    "HTTPRoute": "gateway.networking.k8s.io/v1",
    "HorizontalPodAutoscaler": "autoscaling/v2",
    "InferencePool": "inference.networking.k8s.io/v1",
    "Pod": "v1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "Role": "rbac.authorization.k8s.io/v1",
    "RoleBinding": "rbac.authorization.k8s.io/v1",
    "ScaledObject": "keda.sh/v1alpha1",
    "Secret": "v1",
}
# Their objects are applied to a cluster. On other pages those are that have a namespace.
OF_CLUSTERS: Final = {"autoscaling.md", "autoscaling-export.md", "kubernetes.md", "migrating.md", "models.md"}


DIRECTORY_KINDS: Final = {kind.name for kind in DOCUMENT_KINDS}


def objects_of(text: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(text) if one]


def yaml_of(example: Example) -> str:
    """The example, or what a script writes as a here-document."""
    written = re.findall(r"<<'?END'?\n(.*?)^END$", example.text, re.DOTALL | re.MULTILINE)
    return "---\n".join(written).replace("$PWD", "/srv") if example.language == "bash" else example.text


WITH_OBJECTS: Final = [
    one for one in EXAMPLES if one.language in {"bash", "yaml"} and not one.reason and yaml_of(one).strip()
]
by_objects = pytest.mark.parametrize("example", WITH_OBJECTS, ids=[f"{one.page}-{one.number}" for one in WITH_OBJECTS])


@by_objects
def test_objects_are_complete(example: Example) -> None:
    for one in objects_of(yaml_of(example)):
        assert one.get("apiVersion"), one
        assert one.get("kind"), one
        # a file of llm-d's that no cluster reads
        assert one["kind"] == "EndpointPickerConfig" or one.get("metadata", {}).get("name"), one


def is_of_a_cluster(page: str, one: Mapping[str, Any]) -> bool:
    if one["kind"] == "EndpointPickerConfig":
        return False
    return page in OF_CLUSTERS or one["kind"] not in DIRECTORY_KINDS or "namespace" in one["metadata"]


@by_objects
def test_objects_for_a_cluster_are_admitted_there(example: Example) -> None:
    for one in objects_of(yaml_of(example)):
        if not is_of_a_cluster(example.page, one):
            continue
        if one["kind"] in FOREIGN:
            assert one["apiVersion"] == FOREIGN[one["kind"]]
            continue
        request = {
            "uid": "1",
            "kind": {"kind": one["kind"]},
            "operation": "CREATE",
            "name": one["metadata"]["name"],
            "namespace": one["metadata"].get("namespace", "default"),
            "object": one,
        }
        assert one["apiVersion"] == "attache.dev/v1alpha1"
        review = read_review(json.dumps({"request": request}).encode())
        assert review_object(review, {}, InstalledPluginChecker()).refused == ""


@by_objects
def test_objects_for_a_directory_are_valid_beside_those_of_the_readme(example: Example, tmp_path: Path) -> None:
    theirs = objects_of(yaml_of(example))
    if any(is_of_a_cluster(example.page, one) for one in theirs):
        return
    kinds = {one["kind"] for one in theirs}
    # the README's ModelRoute needs its ModelServer, unless there is another one of that name
    named = {one["metadata"]["name"] for one in theirs if one["kind"] == "ModelServer"}
    readme = next(one for one in WITH_OBJECTS if one.page == "README.md")
    for one in objects_of(yaml_of(readme)):
        if one["kind"] not in kinds or (one["kind"] == "ModelServer" and one["metadata"]["name"] not in named):
            (tmp_path / f"{one['kind']}.yaml").write_text(yaml.safe_dump(one))
    (tmp_path / "example.yaml").write_text(yaml_of(example))
    for one in EXAMPLES:
        file = re.match(r"# ([\w-]+\.yaml)", one.text)
        if one.page == example.page and file is not None and one is not example:
            (tmp_path / file[1]).write_text(one.text)
    load_directory(tmp_path, InstalledPluginChecker())


@of("python")
def test_python_runs_as_it_stands(example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "example.py").write_text(example.text)
    runpy.run_path("example.py", run_name="__main__")


@of("json")
def test_json_is_json(example: Example) -> None:
    assert all(json.loads(line) for line in example.text.splitlines())


@of("toml")
def test_toml_is_toml(example: Example) -> None:
    assert tomllib.loads(example.text)


# What readers have, beside our own commands.
PROGRAMS: Final = {
    *("cat", "cd", "cp", "curl", "docker", "echo", "envoy", "export", "go", "grep", "gzip", "head", "helm", "install"),
    *(
        "jobs",
        "kill",
        "kubectl",
        "kustomize",
        "mkdir",
        "openssl",
        "pip",
        "pytest",
        "python",
        "python3",
        "skopeo",
        "sleep",
        "systemctl",
        "systemd-sysusers",
    ),
    *("tail", "tar", "vllm"),
}
_SEPARATORS: Final = frozenset({"&&", "||", "|", ";", "&", "(", ")", "|&"})
_KEYWORDS: Final = frozenset({"do", "then", "else", "if", "while", "until", "!"})


def script_of(example: Example) -> str:
    """What is typed: of a dialogue the lines after its prompt."""
    if example.language == "bash":
        return example.text
    return "\n".join(line[2:] for line in example.text.splitlines() if line.startswith("$ "))


def commands_of(script: str) -> Iterator[list[str]]:
    """Each simple command with its words, without assignments before it, and without calls of the page's functions."""
    script = re.sub(r"<<'?(\w+)'?\n.*?^\1$", "", script, flags=re.DOTALL | re.MULTILINE)
    script = re.sub(r"^\w+\(\) \{", "", script, flags=re.MULTILINE)
    pending = ""
    for line in re.sub(r"\\\n| >\S+", " ", script).splitlines():
        pending += f"{line}\n"
        try:
            words = list(_lexer(pending))
        except ValueError:  # a text in quotation marks goes on in the next line
            continue
        pending = ""
        yield from _simple_commands(words)
    assert not pending.strip(), pending


def _lexer(text: str) -> shlex.shlex:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|()")
    lexer.whitespace_split = True
    return lexer


def _simple_commands(words: list[str]) -> Iterator[list[str]]:
    for is_separator, group in groupby(words, lambda word: word in _SEPARATORS):
        command = [] if is_separator else list(group)
        while command and (command[0] in _KEYWORDS or re.match(r"\w+=", command[0])):
            command = command[1:]
        if command and command[0] not in {"for", "done", "fi", "}"}:
            yield command


FUNCTIONS: Final = {name for one in EXAMPLES for name in re.findall(r"^(\w+)\(\) \{", one.text, re.MULTILINE)}
TYPED: Final = sorted(
    {
        tuple(words)
        for one in EXAMPLES
        if one.language in {"bash", "text"} and not one.reason
        for words in commands_of(script_of(one))
        if words[0] not in FUNCTIONS
    }
)


@of("bash")
def test_a_script_has_no_mistake_of_syntax(example: Example) -> None:
    done = subprocess.run(["/bin/bash", "-n"], input=example.text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", [one for one in TYPED if one[0] == "attache"], ids=" ".join)
def test_a_command_of_ours_has_these_options(words: tuple[str, ...]) -> None:
    name, *options = words[1:]
    parser = COMMANDS[name].load().parser("attache")
    if COMMANDS[name].passes_options:
        parser.parse_known_args(options)
    else:
        assert COMMANDS[name].has_modes or misspelt_option(parser, options) == ""
        parser.parse_args(options)


def test_pages_tell_people_to_type_commands() -> None:
    named = {words[1] for words in TYPED if words[0] == "attache"}
    assert named >= {"check", "extproc", "bundle", "engine", "envoy", "explain"}


def test_targets_of_make_and_modules_of_python_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {word for words in TYPED if words[0] == "make" for word in words[1:] if "=" not in word} <= targets
    modules = {words[2] for words in TYPED if words[0].startswith("python") and words[1] == "-m"}
    assert [one for one in sorted(modules) if importlib.util.find_spec(one) is None] == []


def test_everything_else_that_is_typed_is_a_program_that_readers_have() -> None:
    assert {Path(words[0]).name for words in TYPED} - {"attache", "make"} == PROGRAMS

# SPDX-License-Identifier: Apache-2.0
"""Mistakes of an EndpointPickerConfig are told at once, whatever else is wrong in the directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.cli.check import main

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

SERVER = """\
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec: {model: m, pickerConfig: epp.yml, endpoints: [{address: "127.0.0.1:8001"}]}
"""
PICKER = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
featureGates: [flowControll]
plugins:
- type: queue-scorer
- {type: max-score-picker, parameters: {maxNumOfEndpoint: 1}}
schedulingProfiles:
- {name: default, plugins: [{pluginRef: queue-scorr}, {pluginRef: max-score-picker}]}
flowControl: {defaultRequestTTL: 60}
"""
OF_PLUGINS = [
    "epp.yaml:6: plugins[1].parameters.maxNumOfEndpoint: there is no such field; did you mean 'maxNumOfEndpoints'?",
    "epp.yaml:8: schedulingProfiles[0].plugins[0].pluginRef: no plugin is called 'queue-scorr'; "
    "did you mean 'queue-scorer'?",
]


def check(directory: Path, capsys: pytest.CaptureFixture[str], **files: str) -> list[str]:
    for name, text in files.items():
        (directory / f"{name}.yaml").write_text(text)
    assert main([str(directory)]) == 2
    return capsys.readouterr().err.splitlines()[:-1]


def test_gates_durations_references_and_plugins_are_told_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = check(tmp_path, capsys, server=SERVER, epp=PICKER)
    assert set(OF_PLUGINS) < set(said)
    assert len(said) == 5
    assert any("no file 'epp.yml' holds an EndpointPickerConfig" in one for one in said)
    assert any("there is no gate 'flowControll'" in one for one in said)
    assert any("60 has no unit" in one for one in said)


def test_a_misspelt_section_does_not_hide_the_plugins_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = check(tmp_path, capsys, epp=PICKER.replace("flowControl:", "flowcontrol:").replace("flowControll", "x"))
    assert set(OF_PLUGINS) < set(said)
    assert any("there is no such field; did you mean 'flowControl'?" in one for one in said)


def test_mistakes_of_plugins_are_told_where_another_file_has_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = PICKER.replace("flowControll", "flowControl").replace("60}", "60s}")
    said = check(tmp_path, capsys, server=SERVER.replace("epp.yml", "epp.yaml").replace("model:", "modle:"), epp=good)
    assert set(OF_PLUGINS) < set(said)
    assert any("modle" in one for one in said)


def test_plugins_that_cannot_be_read_are_not_missed_where_profiles_name_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faulty = "plugins:\n- {type: queue-scorer, parameter: {}}\nschedulingProfiles:\n- {name: default, plugins: ["
    text = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n" + faulty + "{pluginRef: queue-scorer}]}\n"
    (said,) = check(tmp_path, capsys, epp=text)
    assert "there is no such field; did you mean 'parameters'?" in said
    (said,) = check(tmp_path, capsys, epp=text.replace("parameter:", "parameters:").replace("name: d", "nam: d"))
    assert "nam: there is no such field; did you mean 'name'?" in said


def test_an_endpoint_picker_config_is_checked_as_a_file_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "epp.yaml"
    file.write_text(GOOD)
    assert main([str(file)]) == 0
    assert capsys.readouterr().out == f"{file} is a valid EndpointPickerConfig\n"
    file.write_text(PICKER)
    assert main([str(file)]) == 2
    assert set(OF_PLUGINS) < set(capsys.readouterr().err.splitlines())
    file.write_text(SERVER)
    assert main([str(file)]) == 2
    assert "name the directory that it is in" in capsys.readouterr().err
    file.write_bytes(GOOD.encode() + b"\xff")
    assert main([str(file)]) == 2
    assert "not UTF-8" in capsys.readouterr().err


GOOD = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
- type: max-score-picker
schedulingProfiles:
- {name: default, plugins: [{pluginRef: queue-scorer}, {pluginRef: max-score-picker}]}
"""

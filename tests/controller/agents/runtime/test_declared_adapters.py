# SPDX-License-Identifier: Apache-2.0
"""The agent's smaller decisions: names, links, answers of engines, requests to models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.agents.runtime.adapter_loader import AdapterUsage
from controller.agents.runtime.declared_adapters import (
    AdapterNameInvalid,
    DeclaredAdapter,
    SourcePolicy,
    adapter_link_name,
    allowed_local_path,
    check_name,
    is_uri,
    parse_declared_adapters,
)
from controller.agents.runtime.engine_client import is_model_output, parse_prompts, warm_up_prompts
from controller.agents.runtime.metrics import parse_engine_metrics
from extproc.engines.dialects import DIALECTS
from extproc.engines.engine_responses import parse_adapters, parse_base_model, parse_repository_index

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", ["sql", "acme/sql-v1.2", "a:b", "_x", "a@b+c"])
def test_names_that_are_accepted(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize("name", ["", ".", "..", "a/..", "/a", "a/", "-a", "a b", "a\n", "a" * 300, "ä", "a%2e"])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(AdapterNameInvalid):
        check_name(name)


def test_a_model_of_a_repository_is_one_directory() -> None:
    with pytest.raises(AdapterNameInvalid):
        check_name("a/b", is_directory=True)


@given(st.text(max_size=20), st.text(max_size=20))
def test_links_stay_in_their_directory(name: str, uri: str) -> None:
    made = adapter_link_name(name, uri)
    assert "/" not in made
    assert made not in {".", ".."}


def test_another_uri_or_name_has_another_link() -> None:
    assert len({adapter_link_name("a/b", "x"), adapter_link_name("a-b", "x"), adapter_link_name("a/b", "y")}) == 3


def test_a_link_out_of_an_allowed_directory_is_refused(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    (inside / "link").symlink_to(outside)
    policy = SourcePolicy((inside,))
    assert allowed_local_path(str(inside / "a"), policy) == str(inside / "a")
    for source in (str(inside / "link"), str(inside), str(inside / ".." / "out"), f"file://{outside}", "/", "in/a"):
        with pytest.raises(AdapterNameInvalid):
            allowed_local_path(source, policy)
    with pytest.raises(AdapterNameInvalid):
        allowed_local_path(str(inside / "a"), SourcePolicy())


def test_what_is_a_uri() -> None:
    assert is_uri("hf://a/b")
    assert not is_uri("file:///a")
    assert not is_uri("/a")


def test_the_file_of_adapters() -> None:
    found = parse_declared_adapters(b'{"a": {"uri": "hf://acme/a", "pinned": true}}', SourcePolicy())
    assert found == ({"a": DeclaredAdapter("hf://acme/a", pinned=True)}, {})
    # the prefixes that bind callers do not bind whoever writes the file
    assert parse_declared_adapters(b'{"a": {"uri": "s3://x/a"}}', SourcePolicy((), ("hf://",)))[1] == {}
    assert parse_declared_adapters(b'{"resnet": {}}', SourcePolicy(), is_directory=True) == (
        {"resnet": DeclaredAdapter()},
        {},
    )


@pytest.mark.parametrize("content", [b"", b"[]", b'{"a"', b"\xff"])
def test_a_broken_file_of_adapters(content: bytes) -> None:
    with pytest.raises(ValueError, match="no JSON object"):
        parse_declared_adapters(content, SourcePolicy())


@pytest.mark.parametrize(
    "wrong", [b'"a": 1', b'"a": {}', b'"a": {"uri": "/etc"}', b'"a": {"uri": "x://"}', b'"../a": {"uri": "hf://a/b"}']
)
def test_an_adapter_with_a_mistake_harms_no_other(wrong: bytes) -> None:
    found, mistakes = parse_declared_adapters(b'{"b": {"uri": "hf://acme/b"}, %s}' % wrong, SourcePolicy())
    assert list(found) == ["b"]
    assert len(mistakes) == 1


@pytest.mark.parametrize(
    "body", [b'{"data":' + b"[" * 100_000, b'{"error":' * 100_000, b'{"data":[{"id":"\xff"}]}', b""]
)
def test_answers_that_nobody_can_read_are_answers_all_the_same(body: bytes) -> None:
    assert not is_model_output(body, "data")
    for read in (parse_base_model, parse_adapters, parse_repository_index):
        with pytest.raises(ValueError, match=r"the list of models|the index of a repository"):
            read(body)


def test_what_is_an_answer_of_a_model() -> None:
    assert is_model_output(b'{"choices": [{}]}', "choices")
    for wrong in (b'{"choices": []}', b'{"error": 1}', b"<html>", b"[]", b'{"choices": 1}'):
        assert not is_model_output(wrong, "choices")
    assert is_model_output(b"anything", "")


def test_lists_of_models() -> None:
    listed = b'{"data": [{"id": "sql", "parent": "llama", "root": "/sql"}, {"id": "llama", "parent": null}]}'
    assert parse_base_model(listed) == "llama"
    assert parse_adapters(listed) == {"sql": "/sql"}
    assert parse_repository_index(b'[{"name": "a", "state": "READY"}, {"name": "b", "state": "UNAVAILABLE"}]') == {
        "a": ""
    }
    for wrong in (b"<html>", b'{"data": []}', b'{"data": [{}]}'):
        with pytest.raises(ValueError, match=r"."):
            parse_base_model(wrong)


def test_warm_up_prompts_have_their_lengths_and_share_no_beginning() -> None:
    prompts = list(warm_up_prompts(2, (4, 100), ("Hi",)))
    assert [len(prompt.split()) for prompt in prompts] == [2, 98, 1, 2, 98, 1]
    assert len({prompt[:3] for prompt in prompts if prompt != "Hi"}) == 4
    assert parse_prompts("a b\n\n c \n") == ("a b", "c")


def test_the_last_use_of_a_repositorys_model_is_when_its_count_rose() -> None:
    uses = AdapterUsage(DIALECTS["Triton"])

    def seen(finished: int, now_s: float, pending: int = 0) -> tuple[float, bool]:
        text = (
            f'nv_inference_request_success{{model="a",version="1"}} {finished}\n'
            f'nv_inference_pending_request_count{{model="a",version="1"}} {pending}\n'
        )
        page = parse_engine_metrics(text.encode(), DIALECTS["Triton"], unix_s=0.0)
        one = uses.loaded_adapters({"a": ""}, page, now_s)["a"]
        return one.used_at_s, one.is_in_use

    assert seen(5, 1.0) == (1.0, False)
    assert seen(5, 2.0) == (1.0, False)
    assert seen(6, 3.0) == (3.0, False)
    assert seen(6, 4.0, pending=1) == (3.0, True)


def test_an_idle_engine_has_no_adapter_in_use_whatever_its_last_series_says() -> None:
    uses = AdapterUsage(DIALECTS["vLLM"])
    info = 'vllm:lora_requests_info{max_lora="2",running_lora_adapters="a",waiting_lora_adapters=""} 90\n'
    for running, is_in_use in ((1, True), (0, False)):
        load = f"vllm:num_requests_running {running}\nvllm:num_requests_waiting 0\n"
        page = parse_engine_metrics((load + info).encode(), DIALECTS["vLLM"], unix_s=100.0)
        assert uses.loaded_adapters({"a": "/a"}, page, 1000.0)["a"].is_in_use is is_in_use
    assert uses.is_usage_known(page)
    assert not uses.is_usage_known(None)
    assert AdapterUsage(DIALECTS["SGLang"]).is_usage_known(None)

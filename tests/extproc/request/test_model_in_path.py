# SPDX-License-Identifier: Apache-2.0
"""Paths that name the model: what is read of them, and that nothing of a hostile one is left."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.refusals import BadRequest, MethodNotAllowed, Refusal
from extproc.request.model_in_path import api_of_model_path, check_method, read_model_path, request_by_path
from extproc.wire_names import Api

NAMES = st.text(min_size=1, max_size=40).filter(lambda one: one not in {".", ".."} and "/" not in one)


@pytest.mark.parametrize(
    ("path", "model", "version", "verb", "apis"),
    [
        ("/v1/models/iris", "iris", "", "", {Api.V1, Api.TENSORFLOW}),
        ("/v1/models/iris:predict", "iris", "", ":predict", {Api.V1, Api.TENSORFLOW}),
        ("/v1/models/iris/versions/3:predict", "iris", "/versions/3", ":predict", {Api.V1, Api.TENSORFLOW}),
        ("/v1/models/iris:explain", "iris", "", ":explain", {Api.V1}),
        ("/v1/models/iris/labels/stable:classify", "iris", "/labels/stable", ":classify", {Api.TENSORFLOW}),
        ("/v1/models/iris/versions/3:regress", "iris", "/versions/3", ":regress", {Api.TENSORFLOW}),
        ("/v1/models/iris/metadata", "iris", "", "/metadata", {Api.TENSORFLOW}),
        ("/v1/models/iris/labels/stable:predict", "iris", "/labels/stable", ":predict", {Api.TENSORFLOW}),
        ("/v2/models/iris", "iris", "", "", {Api.V2}),
        ("/v2/models/iris/ready", "iris", "", "/ready", {Api.V2}),
        ("/v2/models/iris/infer", "iris", "", "/infer", {Api.V2}),
        ("/v2/models/iris/versions/a.1/infer", "iris", "/versions/a.1", "/infer", {Api.V2}),
        ("/v2/models/llm/generate_stream", "llm", "", "/generate_stream", {Api.V2}),
        # names may have colons, and what looks like a version or a verb
        ("/v2/models/llama3:8b/infer", "llama3:8b", "", "/infer", {Api.V2}),
        ("/v1/models/a:b:predict", "a:b", "", ":predict", {Api.V1, Api.TENSORFLOW}),
        ("/v2/models/versions/infer", "versions", "", "/infer", {Api.V2}),
        ("/v2/models/a%20b%C3%A9/infer", "a b\u00e9", "", "/infer", {Api.V2}),
    ],
)
def test_the_parts_of_a_path_are_read(path: str, model: str, version: str, verb: str, apis: set[Api]) -> None:
    found = read_model_path(path)
    assert found is not None
    assert (found.model, found.version, found.verb, set(found.apis)) == (model, version, verb, apis)
    assert found.for_model("other") == path.replace(quote(model, safe=":"), "other", 1)
    assert api_of_model_path(path) in apis


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/v2/models",
        "/v1/chat/completions",
        "/v1/models/org/model",
        "/v2/models/iris/infer/",
        "/v2/models/iris/unload",
        "/v2/models/iris/versions/3/generate_more",
        "/v2/models/iris/labels/stable/infer",
        "/v1/models/iris/labels/stable:explain",
        "/team/v2/models/iris/infer",
    ],
)
def test_other_paths_name_no_model(path: str) -> None:
    assert read_model_path(path) is None


@pytest.mark.parametrize(
    "path",
    [
        "/v2/models//infer",
        "/v2/models/%2e%2e/infer",
        "/v2/models/../infer",
        "/v2/models/./infer",
        "/v2/models/a%2Fb/infer",
        "/v2/models/a%00/infer",
        "/v2/models/a%0d%0ahost:%20x/infer",
        "/v2/models/%ff/infer",
        "/v2/models/caf\u00e9/infer",
        "/v2/models/a%e2%80%ae/infer",
        "/v2/models/a/versions//infer",
        "/v2/models/a/versions/../infer",
        "/v2/models/a/versions/%31/infer",
        f"/v2/models/a/versions/{'1' * 129}/infer",
        "/v1/models/:predict",
    ],
)
def test_names_and_versions_that_no_model_has_are_refused(path: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read_model_path(path)
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 400


@given(NAMES.filter(str.isprintable), st.sampled_from(["/infer", "/ready", ""]), st.sampled_from(["", "/versions/7"]))
def test_a_name_that_is_percent_encoded_is_read_and_written_again(name: str, verb: str, version: str) -> None:
    path = f"/v2/models/{quote(name, safe='')}{version}{verb}"
    found = read_model_path(path)
    assert found is not None
    assert (found.model, found.verb, found.version) == (name, verb, version)
    again = found.for_model(name)
    assert read_model_path(again) == found
    assert again.isascii()
    assert not set(again) & set(" ?#%\\") - {"%"}


@given(st.text(st.characters(max_codepoint=255), max_size=60), st.sampled_from(["/v1/models/", "/v2/models/", "/"]))
def test_no_path_raises_anything_but_a_refusal(rest: str, root: str) -> None:
    try:
        found = read_model_path(root + rest)
    except Refusal:
        return
    # what goes to an engine is plain, and means the same
    assert found is None or read_model_path(found.for_model(found.model)) == found
    assert found is None or found.for_model("m").isascii()


def test_a_long_name_costs_little_and_is_shown_short() -> None:
    found = read_model_path(f"/v2/models/{'%41' * 20_000}/infer")
    assert found is not None
    assert found.model == "A" * 20_000


def test_each_verb_has_its_method_and_needs_its_body() -> None:
    infer, ready = read_model_path("/v2/models/m/infer"), read_model_path("/v2/models/m")
    assert infer is not None
    assert ready is not None
    check_method(infer, "POST", "/v2/models/m/infer", has_body=True)
    check_method(ready, "GET", "/v2/models/m", has_body=False)
    with pytest.raises(MethodNotAllowed, match="takes POST, not GET"):
        check_method(infer, "GET", "/v2/models/m/infer", has_body=False)
    with pytest.raises(MethodNotAllowed, match="takes GET, not POST"):
        check_method(ready, "POST", "/v2/models/m", has_body=True)
    with pytest.raises(BadRequest, match="no body"):
        check_method(infer, "POST", "/v2/models/m/infer", has_body=False)


def test_a_request_by_path_has_no_prompt_and_the_api_of_its_engines() -> None:
    path = read_model_path("/v1/models/m:predict")
    assert path is not None
    for protocol, api in (("V1", Api.V1), ("TensorFlow", Api.TENSORFLOW)):
        request = request_by_path(path, protocol)
        assert request.api is api
        assert (request.prompt, request.answers, request.is_streamed) == (b"", 0, False)

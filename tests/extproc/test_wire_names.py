# SPDX-License-Identifier: Apache-2.0
"""The table of APIs: every row has what its readers need, and is read alike by all of them."""

from __future__ import annotations

from typing import get_args, get_type_hints

import msgspec
import pytest

from extproc.api.model_server import ModelServerSpec
from extproc.core.request_record import RequestHead
from extproc.refusals import BadRequest, ErrorForm
from extproc.request.body_parser import api_by_body, parse_body
from extproc.request.inference_request import STEERING_FIELDS, InferenceRequest
from extproc.streams.headers import error_form
from extproc.wire_names import ANTHROPIC_PATHS, APIS_BY_PATH, BODY_APIS, PATH_APIS, Api, api_of_path
from tests.fuzz.mutants import content_of

EVERY_API = pytest.mark.parametrize("api", BODY_APIS, ids=lambda api: api.name)


def request_of(api: Api, **fields: object) -> InferenceRequest:
    content, content_type = content_of(api, {"model": "m", **api.spec.example, **fields})
    return parse_body(api, content, {"content-type": content_type})


@EVERY_API
def test_the_example_of_an_api_is_read(api: Api) -> None:
    request = request_of(api)
    assert request.api is api
    assert request.model == "m"
    assert not request.is_streamed
    assert request.internal_fields == ()
    # what computes nothing has no prompt, and nothing else looks like it
    assert bool(request.prompt) == api.spec.waits_in_queue


@EVERY_API
def test_a_model_that_is_no_name_is_refused(api: Api) -> None:
    for wrong in (1, None, [], {"a": "b"}) if api.spec.body == "json" else (b"a file", b"\xff"):
        with pytest.raises(BadRequest) as caught:
            request_of(api, model=wrong)
        assert caught.value.param == "model"


@EVERY_API
def test_a_model_is_needed_where_engines_need_it(api: Api) -> None:
    content, content_type = content_of(api, api.spec.example)
    if not api.spec.needs_model:
        assert parse_body(api, content).model == ""
        return
    empty, _ = content_of(api, {**api.spec.example, "model": ""})
    for one in (content, empty):
        with pytest.raises(BadRequest) as caught:
            parse_body(api, one, {"content-type": content_type})
        assert caught.value.param == "model"


@EVERY_API
def test_a_request_without_a_body_is_refused(api: Api) -> None:
    with pytest.raises(BadRequest, match="has no body"):
        parse_body(api, b"")


@EVERY_API
@pytest.mark.parametrize("name", STEERING_FIELDS)
def test_fields_that_steer_engines_are_found(api: Api, name: str) -> None:
    assert request_of(api, **{name: 1}).internal_fields == (name,)


@EVERY_API
def test_a_stream_lacks_usage_only_where_it_must_be_asked_for(api: Api) -> None:
    request = request_of(api, stream="true" if api.spec.body == "form" else True)
    assert request.is_streamed
    assert request.lacks_stream_usage == api.spec.usage_if_asked
    assert request.reports_usage_unchanged == (api.spec.reports_usage and not api.spec.usage_if_asked)


@EVERY_API
def test_an_example_is_recognised_without_its_path(api: Api) -> None:
    content, content_type = content_of(api, {"model": "m", **api.spec.example})
    version = {"anthropic-version": "1"} if api.spec.errors == "anthropic" else {}
    found = api_by_body(content, {"content-type": content_type, **version})
    if api.spec.fields_of:
        assert found is api
    else:
        # it looks like another, that costs at least as much
        assert found is None or found.spec.waits_in_queue


@pytest.mark.parametrize(("path", "api"), APIS_BY_PATH.items())
def test_paths_are_known_whatever_stands_before_them(path: str, api: Api) -> None:
    assert api_of_path(path) is api
    assert api_of_path("/team" + path) is api
    form = ErrorForm.ANTHROPIC if api.spec.errors == "anthropic" else ErrorForm.OPENAI
    assert error_form(RequestHead("POST", "/team" + path, {}, has_body=True)) is form


def test_every_protocol_of_a_model_server_has_an_api() -> None:
    (of_servers,) = [one for one in msgspec.structs.fields(ModelServerSpec) if one.name == "protocol"]
    assert {api.spec.protocol for api in Api} == set(get_args(get_type_hints(ModelServerSpec)[of_servers.name]))


@pytest.mark.parametrize("api", [api for api, _ in PATH_APIS], ids=lambda api: api.name)
def test_an_api_whose_paths_name_the_model_reads_nothing_else(api: Api) -> None:
    spec = api.spec
    assert (spec.body, spec.paths, spec.parser, spec.errors) == ("unread", (), "", "text")
    assert not spec.reports_usage
    assert spec.waits_in_queue
    for path in ("/v2/models/m/infer", "/v1/models/m:predict"):
        assert error_form(RequestHead("POST", path, {}, has_body=True)) is ErrorForm.TEXT


def test_no_path_belongs_to_two_apis() -> None:
    paths = [path for api in Api for path in api.spec.paths]
    assert len(paths) == len(set(paths)) == len(APIS_BY_PATH)
    assert ANTHROPIC_PATHS == ("/v1/messages",)

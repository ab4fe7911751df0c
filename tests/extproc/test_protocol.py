# SPDX-License-Identifier: Apache-2.0
"""The table of APIs: every row has what its readers need, and is read alike by all of them."""

from __future__ import annotations

import msgspec
import pytest

from extproc.core.record import Head
from extproc.errors import BadRequest, ErrorForm
from extproc.protocol import ANTHROPIC_PATHS, APIS_BY_PATH, Api, api_of_path
from extproc.request.model import STEERING_FIELDS
from extproc.request.parsing import api_by_body, parse
from extproc.streams.headers import error_form

EVERY_API = pytest.mark.parametrize("api", Api, ids=lambda api: api.name)


def body_of(api: Api, **fields: object) -> bytes:
    return msgspec.json.encode({"model": "m", **api.spec.example, **fields})


@EVERY_API
def test_the_example_of_an_api_is_read(api: Api) -> None:
    request = parse(api, body_of(api))
    assert request.api is api
    assert request.model == "m"
    assert not request.is_streamed
    assert request.internal_fields == ()
    # what computes nothing has no prompt, and nothing else looks like it
    assert bool(request.prompt) == api.spec.waits_in_queue


@EVERY_API
def test_a_model_that_is_no_name_is_refused(api: Api) -> None:
    for wrong in (1, None, [], {"a": "b"}):
        with pytest.raises(BadRequest) as caught:
            parse(api, body_of(api, model=wrong))
        assert caught.value.param == "model"


@EVERY_API
def test_a_model_is_needed_where_engines_need_it(api: Api) -> None:
    body = msgspec.json.encode(dict(api.spec.example))
    if not api.spec.needs_model:
        assert parse(api, body).model == ""
        return
    for content in (body, body_of(api, model="")):
        with pytest.raises(BadRequest) as caught:
            parse(api, content)
        assert caught.value.param == "model"


@EVERY_API
@pytest.mark.parametrize("name", STEERING_FIELDS)
def test_fields_that_steer_engines_are_found(api: Api, name: str) -> None:
    assert parse(api, body_of(api, **{name: 1})).internal_fields == (name,)


@EVERY_API
def test_a_stream_lacks_usage_only_where_it_must_be_asked_for(api: Api) -> None:
    request = parse(api, body_of(api, stream=True))
    assert request.leaves_usage_out == api.spec.usage_if_asked
    assert request.asks_for_usage == (api.spec.reports_usage and not api.spec.usage_if_asked)


@EVERY_API
def test_an_example_is_recognised_without_its_path(api: Api) -> None:
    found = api_by_body(body_of(api), {"anthropic-version": "1"} if api.spec.errors == "anthropic" else {})
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
    assert error_form(Head("POST", "/team" + path, {}, has_body=True)) is form


def test_no_path_belongs_to_two_apis() -> None:
    paths = [path for api in Api for path in api.spec.paths]
    assert len(paths) == len(set(paths)) == len(APIS_BY_PATH)
    assert ANTHROPIC_PATHS == ("/v1/messages",)

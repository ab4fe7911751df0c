# SPDX-License-Identifier: Apache-2.0
"""Forms are read as engines read them, or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.refusals import BadRequest
from extproc.request.multipart_form import MOST_PARTS, read_form, with_fields

TYPE = "multipart/form-data; boundary=cut"


def part(name: str, value: bytes, more: str = "", headers: str = "") -> bytes:
    return f'--cut\r\nContent-Disposition: form-data; name="{name}"{more}\r\n{headers}\r\n'.encode() + value + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join((*parts, b"--cut--\r\n"))


FILE = part("file", b"RIFF\r\n--cu\0\xff", '; filename="a b.wav"', "Content-Type: audio/wav\r\n")
MODEL = part("model", b"llama")


def test_fields_and_files_are_found() -> None:
    found = read_form(form(FILE, MODEL, part("include[]", b"a"), part("include[]", b"b")), TYPE)
    assert found.text("model") == "llama"
    assert found.file("file") == b"RIFF\r\n--cu\0\xff"
    assert found.text("language") is found.file("other") is None
    assert found.names == {"file", "model", "include[]"}


@pytest.mark.parametrize(
    "content_type", [TYPE, 'Multipart/Form-Data;boundary="cut"', "multipart/form-data ; boundary=cut"]
)
def test_the_boundary_is_that_of_the_header(content_type: str) -> None:
    assert read_form(form(MODEL), content_type).text("model") == "llama"


@pytest.mark.parametrize(
    "content_type",
    ["", "application/json", "multipart/form-data", f"{TYPE}; charset=utf-16", f"{TYPE}; boundary=other", TYPE + "x"],
)
def test_another_content_type_is_refused(content_type: str) -> None:
    with pytest.raises(BadRequest):
        read_form(form(MODEL), content_type)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"--cut--\r\n",
        form(MODEL, MODEL),
        form(MODEL, part("model", b"", '; filename="x"')),
        b"\r\n" + form(MODEL),
        form(MODEL) + b"after",
        form(MODEL)[:-4],
        form(MODEL).replace(b"\r\n", b"\n"),
        form(part("model", b"a\n--cut\n")),
        form(part("model", b"a\r\n--cutter\r\n")),
        form(part("model", b"a", "", "Content-Transfer-Encoding: base64\r\n")),
        form(part("model", b"a", "", 'Content-Disposition: form-data; name="other"\r\n')),
        form(part("model", b"a", '; name="other"')),
        form(part("mod\\el", b"a")),
        b"--cut\r\nContent-Disposition: form-data; name=model\r\n\r\na\r\n--cut--\r\n",
        b'--cut\r\nContent-Disposition: form-data;\r\n name="model"\r\n\r\na\r\n--cut--\r\n',
        b"--cut\r\n\r\na\r\n--cut--\r\n",
        form(*(part(f"field-{number}", b"") for number in range(MOST_PARTS + 1))),
        form(part("prompt", b"a" * 2**21)),
    ],
)
def test_what_readers_differ_on_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        read_form(body, TYPE)


def test_a_file_is_no_field() -> None:
    for more in ('; filename="x"', "; filename*=utf-8''x"):
        found = read_form(form(part("model", b"a", more)), TYPE)
        with pytest.raises(BadRequest):
            found.text("model")


def test_other_values_leave_all_else_as_it_is() -> None:
    found = read_form(form(part("cache_salt", b"x"), FILE, MODEL), TYPE)
    assert with_fields(found, {"model": "engines/one"}, without=["cache_salt"]) == form(
        FILE, part("model", b"engines/one")
    )
    assert with_fields(found, {}) == found.body


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_refusal(content: bytes) -> None:
    for body in (content, form(MODEL)[:40] + content, form(part("model", content))):
        try:
            found = read_form(body, TYPE)
        except BadRequest:
            continue
        assert with_fields(found, {}).startswith(b"--cut\r\n")

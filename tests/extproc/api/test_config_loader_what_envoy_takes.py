# SPDX-License-Identifier: Apache-2.0
"""What Envoy would refuse, or no request could ever meet, is refused by the loader, with file and line."""

from __future__ import annotations

import json

import pytest
import yaml

from bench.stack.loopback_stack import documents
from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import load_snapshot
from extproc.api.match_patterns import MAX_PROGRAM_SIZE

_SERVED = [{"modelServerName": "llama"}]
_KEY_SET = json.dumps({"keys": [{"kty": "oct", "k": "AAAA"}]})


def rules(match: object) -> dict[str, object]:
    return {"rules": [{"modelMatch": match, "targetModels": _SERVED}, {"targetModels": _SERVED}]}


def header(name: str, match: object) -> dict[str, object]:
    return rules({"headers": {name: match}})


def api_key(**fields: object) -> dict[str, object]:
    return {"authentication": {"apiKeys": [{"name": "a", "tenant": "t", "key": "0123456789", **fields}]}}


def issuer(**fields: object) -> dict[str, object]:
    jwt = {"name": "a", "issuer": "i", "audiences": ["a"], "jwks": _KEY_SET, **fields}
    return {"authentication": {"jwt": [jwt]}}


def mistakes(
    gateway: dict[str, object] | None = None,
    more: dict[str, object] | None = None,
    route: dict[str, object] | None = None,
) -> list[str]:
    text = documents(["127.0.0.1:8000"], gateway=gateway or {}, more=more, route=route)
    try:
        load_snapshot({"a.yaml": text.encode()})
    except ConfigInvalid as error:
        found = error.mistakes
    else:
        return []
    assert all(one.file == "a.yaml" and one.line for one in found)
    assert all(str(one).isprintable() for one in found), "a control character on a terminal"
    return [str(one) for one in found]


@pytest.mark.parametrize("field", ["header", "uri"])
@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("(?=a)b", "invalid perl operator"),
        ("(?<!a)b", "invalid"),
        (r"(a)\1", "invalid escape sequence"),
        ("a*+", "bad repetition operator"),
        ("a{1001}", "invalid repetition size"),
        (r"a\Z", "invalid escape sequence"),
        ("(?#c)a", "invalid perl operator"),
        ("", "is empty"),
        ("[a-z]{1,900}", f"Envoy takes at most {MAX_PROGRAM_SIZE}"),
        ("a{999}b", f"Envoy takes at most {MAX_PROGRAM_SIZE}"),
    ],
)
def test_an_expression_that_re2_does_not_take_is_refused(field: str, expression: str, says: str) -> None:
    match = {"regex": expression}
    (found,) = mistakes(route=header("x-a", match) if field == "header" else rules({"uri": match}))
    assert says in found
    assert ".regex: " in found


@pytest.mark.parametrize(
    "expression", ["[a-z]{1,50}", "[a-z]{1,498}", r"\pL+", r"\z", "(?P<n>a)", "(?i)nightly-[0-9]+"]
)
def test_an_expression_that_re2_takes_is_taken(expression: str) -> None:
    assert not mistakes(route=header("x-a", {"regex": expression}))


@pytest.mark.parametrize("name", ["x a", "x\na", "x\0a", "x:a", ":path", "x\x7f", 'x"a', "x(a", "é", "x\r\ny: z"])
def test_what_is_no_name_of_a_header_is_refused(name: str) -> None:
    for found in (
        mistakes(route=header(name, {"exact": "a"})),
        mistakes(route={"rateLimits": [{"per": "Header", "header": name, "requests": 1}]}),
        mistakes(more={"flowControl": {"sessionHeader": name}}),
        mistakes(more={"cacheScopeHeader": name}),
        mistakes(gateway={"servedHeader": name}),
    ):
        assert len(found) >= 1
        assert "is no name of a header" in found[0] or "control character" in found[0]


def test_names_of_headers_may_be_written_in_any_case() -> None:
    assert not mistakes(route=header("X-Team", {"exact": "Any Case, and spaces"}), gateway={"servedHeader": "X-Served"})


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "a\0b", "a\x01b", "a\x7f", " a", "a "])
def test_a_value_that_no_header_can_have_is_refused(value: str) -> None:
    assert len(mistakes(route=header("x-a", {"exact": value}))) == 1
    assert len(mistakes(route=header("x-a", {"prefix": value}))) == (0 if value == "a " else 1)


@pytest.mark.parametrize("value", ["", "v1", "/a b", "/a?b=c", "/a#b", "/a\nb"])
def test_what_is_no_path_is_refused(value: str) -> None:
    assert len(mistakes(route=rules({"uri": {"exact": value}}))) == 1
    assert len(mistakes(route=rules({"uri": {"prefix": value}}))) >= 1


def test_an_empty_prefix_is_refused() -> None:
    (found,) = mistakes(route=header("x-a", {"prefix": ""}))
    assert "always holds" in found


@pytest.mark.parametrize("field", ["model", "modelName", "loraAdapters", "tenant", "user", "issuer", "pickerConfig"])
@pytest.mark.parametrize("text", ["a\nb", "a\n", "\x1b[2J", "a\0"])
def test_no_name_has_a_control_character(field: str, text: str) -> None:
    given = {
        "model": {"more": {"model": text}},
        "modelName": {"route": {"modelName": text}},
        "loraAdapters": {"route": {"loraAdapters": [text]}},
        "tenant": {"gateway": api_key(tenant=text)},
        "user": {"gateway": api_key(user=text)},
        "issuer": {"gateway": issuer(issuer=text)},
        "pickerConfig": {"more": {"pickerConfig": text}},
    }
    assert "control character" in mistakes(**given[field])[0]


def test_a_name_does_not_end_with_a_line_break() -> None:
    text = yaml.safe_dump(
        {
            "apiVersion": "attache.dev/v1alpha1",
            "kind": "ModelServer",
            "metadata": {"name": "a\n", "namespace": "b\n"},
            "spec": {"model": "m", "endpoints": []},
        }
    )
    with pytest.raises(ConfigInvalid) as caught:
        load_snapshot({"a.yaml": text.encode()})
    assert [one.path for one in caught.value.mistakes] == ["metadata.name", "metadata.namespace"]


@pytest.mark.parametrize("key", ["01234 56789", "01234\n56789", "01234\x0056789", "éééééééééé", " 0123456789"])
def test_a_key_that_no_client_can_send_is_refused_and_not_shown(key: str) -> None:
    (found,) = mistakes(gateway=api_key(key=key))
    assert "no client can send" in found
    assert "0123" not in found
    assert "é" not in found


@pytest.mark.parametrize("claim", ["a..b", ".a", "a.", "", "a\nb"])
def test_what_is_no_claim_is_refused(claim: str) -> None:
    assert len(mistakes(gateway=issuer(tenantClaim=claim))) == 1


@pytest.mark.parametrize("keys", ["garbage", "{}", '{"keys": []}', '{"keys": [{"kty": "RSA"}]}', '{"keys": [1]}'])
def test_a_key_set_without_a_usable_key_is_refused(keys: str) -> None:
    (found,) = mistakes(gateway=issuer(jwks=keys))
    assert "Key Set" in found


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messageTimeout", "0s"),
        ("messageTimeout", "2h"),
        ("accessLogFlush", "0s"),
        ("accessLogFlush", "1ns"),
        ("requestTimeout", "1000000h"),
        ("maxBodySize", 0),
        ("maxBodySize", "4Gi"),
        ("maxHeap", 0),
        ("maxConnections", 2**40),
        ("extproc", "unix:"),
        ("extproc", "unix:/" + "a" * 100),
        ("extproc", "unix:/a\0b"),
        ("servedHeader", "Host"),
        ("servedHeader", "content-length"),
    ],
)
def test_numbers_and_names_of_the_gateway_that_envoy_does_not_take_are_refused(field: str, value: object) -> None:
    (found,) = mistakes(gateway={field: value})
    assert f"spec.{field}" in found


@pytest.mark.parametrize(
    "policy",
    [
        {"connectTimeout": "0s"},
        {"connectTimeout": "1ns"},
        {"timeout": "1000000h"},
        {"outlierDetection": {"ejectionTime": "0s"}},
        {"outlierDetection": {"ejectionTime": "1000000h"}},
    ],
)
def test_times_that_envoy_does_not_take_are_refused(policy: dict[str, object]) -> None:
    (found,) = mistakes(more={"trafficPolicy": policy})
    assert "spec.trafficPolicy" in found

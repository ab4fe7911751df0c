# SPDX-License-Identifier: Apache-2.0
"""What is exported of bindings, how it is selected, and whom the server believes."""

from __future__ import annotations

from typing import Any

import pytest
from multidict import CIMultiDict

from controller.autoscaler.export.desired_replicas import CURRENT, DESIRED, RATIO, ExportedTarget, ExportedTargets
from controller.autoscaler.export.external_metrics import format_quantity, parse_front_proxy
from controller.kube.api_resources import parse_selector
from controller.kube.authorizer import User

LABELS = {"variant_name": "llama", "namespace": "shop"}


def binding(desired: int | None, current: int = 1, **target: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    reference = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "llama"}
    status = {"name": "main", "current": current} | ({} if desired is None else {"desired": desired})
    return {
        "metadata": {"name": "one", "namespace": "shop"},
        "spec": {"targets": [{"name": "main", "ref": reference, **target}]},
        "status": {"targets": [status]},
    }


def test_what_a_binding_does_not_say_for_a_while_stays() -> None:
    changes: list[tuple[ExportedTarget, ...] | None] = []
    exports = ExportedTargets(lambda _, targets: changes.append(targets))
    exports.set_binding("shop/one", binding(None))
    assert exports.in_namespace("shop") == []
    exports.set_binding("shop/one", binding(4))
    exports.set_binding("shop/one", binding(None))
    exports.set_binding("shop/one", {**binding(None), "status": {}})
    (one,) = exports.in_namespace("shop")
    assert (one.value(DESIRED), one.value(CURRENT), one.value(RATIO)) == (4.0, 1.0, 4.0)
    assert exports.in_namespace("bank") == []
    # only what a target of the binding still is
    exports.set_binding("shop/one", {**binding(None), "spec": {"targets": []}})
    assert exports.in_namespace("shop") == []
    exports.set_binding("shop/one", None)
    assert [None if one is None else len(one) for one in changes] == [1, 0, None]


def test_a_ratio_from_zero_is_what_is_desired() -> None:
    exports = ExportedTargets()
    exports.set_binding("shop/one", binding(3, 0))
    assert [one.value(RATIO) for one in exports.in_namespace("shop")] == [3.0]


def test_a_role_has_a_name_of_its_own() -> None:
    exports = ExportedTargets()
    reference = {"apiVersion": "attache.dev/v1alpha1", "kind": "ModelInfer", "name": "llama"}
    exports.set_binding("shop/one", binding(3, ref=reference, role="prefill"))
    (one,) = exports.in_namespace("shop")
    assert one.variant != "llama"
    assert "prefill" in one.variant


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("", True),
        ("variant_name=llama", True),
        ("variant_name==llama,namespace=shop", True),
        ("variant_name=qwen", False),
        ("variant_name!=llama", False),
        ("variant_name in (qwen, llama)", True),
        ("variant_name notin (qwen,llama),namespace", False),
        ("namespace,!zone", True),
        ("!namespace", False),
        ("zone", False),
        ("variant_name=", False),
    ],
)
def test_selectors(text: str, matches: bool) -> None:
    assert parse_selector(text)(LABELS) is matches


@pytest.mark.parametrize("text", ["a in", "a in (b", "=b", "a b", "a=b c", "a=(", "a=b,,c=d", "a," + "b," * 5000])
def test_broken_selectors_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="selector"):
        parse_selector(text)


def test_quantities_are_whole_thousandths() -> None:
    assert [format_quantity(one) for one in (0.0, 3.0, 1.5, 1 / 3)] == ["0", "3", "1500m", "333m"]


def test_headers_count_only_beside_the_certificate_of_the_api_server() -> None:
    proxy = parse_front_proxy(
        {
            "data": {
                "requestheader-client-ca-file": "PEM",
                "requestheader-allowed-names": '["front-proxy"]',
                "requestheader-username-headers": '["X-Remote-User"]',
                "requestheader-group-headers": '["X-Remote-Group"]',
                "requestheader-extra-headers-prefix": '["X-Remote-Extra-"]',
            }
        }
    )
    headers = CIMultiDict([("X-Remote-User", "hpa"), ("X-Remote-Group", "a"), ("X-Remote-Group", "b")])
    headers.add("X-Remote-Extra-Scopes", "c")
    certificate = {"subject": ((("commonName", "front-proxy"),),)}
    assert proxy.user_of(certificate, headers) == User("hpa", ("a", "b"), extra=(("scopes", ("c",)),))
    assert proxy.user_of(None, headers) is None
    assert proxy.user_of({"subject": ((("commonName", "somebody"),),)}, headers) is None
    assert proxy.user_of(certificate, CIMultiDict()) is None
    assert parse_front_proxy({}).user_of(certificate, headers) is None

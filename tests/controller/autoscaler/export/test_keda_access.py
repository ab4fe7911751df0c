# SPDX-License-Identifier: Apache-2.0
"""Who may read what at KEDA's port."""

from __future__ import annotations

import pytest

from controller.autoscaler.export.keda_access import parse_read_permissions


def test_without_lists_everybody_may_read_everything() -> None:
    assert parse_read_permissions([], []).refusal([], "shop") == ""


def test_a_name_may_read_its_namespaces_or_all() -> None:
    readers = parse_read_permissions([], ["keda", "tenant=shop, bank"])
    assert readers.refusal(["keda"], "anything") == ""
    assert readers.refusal(["tenant"], "bank") == ""
    assert "not for the namespace other" in readers.refusal(["tenant"], "other")
    assert "whose names are: none" in readers.refusal([], "shop")


def test_a_list_of_namespaces_holds_for_all_clients() -> None:
    readers = parse_read_permissions(["shop"], ["keda"])
    assert readers.refusal(["keda"], "shop") == ""
    assert "--keda-namespace bank" in readers.refusal(["keda"], "bank")


@pytest.mark.parametrize("text", ["", "=shop", "tenant=", "tenant=shop,,bank"])
def test_what_is_no_client_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write NAME"):
        parse_read_permissions([], [text])


def test_a_client_is_named_once() -> None:
    with pytest.raises(ValueError, match="twice"):
        parse_read_permissions([], ["tenant=shop", "tenant"])

# SPDX-License-Identifier: Apache-2.0
"""Label selectors, and the labels by which what they select can be looked up."""

from __future__ import annotations

import pytest

from controller.kube.selectors import required_labels, selector


def test_labels_with_one_value_are_required() -> None:
    text = "app=llama, tier==gpu,zone in (a),rack in (a,b),kind!=x,!gone,there,of notin (y)"
    assert required_labels(text) == {"app": "llama", "tier": "gpu", "zone": "a"}


def test_all_terms_have_to_match() -> None:
    matches = selector("app=llama,rack in (a, b),!gone")
    assert matches({"app": "llama", "rack": "b"})
    assert not matches({"app": "llama", "rack": "c"})
    assert not matches({"app": "llama", "rack": "a", "gone": ""})


@pytest.mark.parametrize("text", ["a in b", "(", "a=b c=d"])
def test_what_is_no_selector_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="unable to parse"):
        required_labels(text)

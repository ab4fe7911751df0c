# SPDX-License-Identifier: Apache-2.0
"""Which spellings mean the same accelerators."""

from __future__ import annotations

import pytest

from controller.api.shared_types import matches_accelerator

H100 = "NVIDIA-H100-80GB-HBM3"


@pytest.mark.parametrize(
    "kind", ["H100", "h100", "nvidia-h100", "nvidia_h100_80gb", "h100 80GB", H100, H100.lower(), "NVIDIA"]
)
def test_a_name_is_of_each_kind_that_says_no_more(kind: str) -> None:
    assert matches_accelerator(H100, kind)


@pytest.mark.parametrize("kind", ["h1", "H1000", "A100", "h100-pcie", "nvidia-a100", "nvidia.com/gpu", "-"])
def test_it_is_of_no_other_kind(kind: str) -> None:
    assert not matches_accelerator(H100, kind)


def test_the_vendor_may_be_left_out_on_either_side() -> None:
    assert matches_accelerator("Tesla-T4", "nvidia-tesla-t4")
    assert matches_accelerator("nvidia-tesla-t4", "Tesla-T4")
    assert matches_accelerator("AMD_Instinct_MI300X_OAM", "mi300x")

# SPDX-License-Identifier: Apache-2.0
"""Durations as Go writes them, sizes as Kubernetes does."""

from __future__ import annotations

import copy
import pickle

import pytest

from extproc.api.quantities import ByteSize, Duration, Quantity


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25),
        ("1h", 3600.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        (".5s", 0.5),
        ("0s", 0.0),
        ("0", 0.0),
        ("100us", 1e-4),
        ("100µs", 1e-4),
        ("2d", 172_800.0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    duration = Duration(text)
    assert duration == pytest.approx(seconds)
    assert str(duration) == f"{duration}" == text
    assert type(duration + 1) is float


@pytest.mark.parametrize("given", ["", "30", "soon", "-1s", "1 h", "1h30", "s", "9999999999h", 30, 0, None, True])
def test_what_is_no_duration_is_refused(given: object) -> None:
    with pytest.raises(ValueError, match=r"(is not a duration|has no unit|has no value); write "):
        Duration(given)


@pytest.mark.parametrize(
    ("given", "size"),
    [
        ("64Mi", 64 << 20),
        ("1Gi", 1 << 30),
        ("1.5Gi", 3 << 29),
        ("500M", 500_000_000),
        ("4k", 4000),
        ("1e6", 1_000_000),
        ("1E6", 1_000_000),
        ("123", 123),
        (123, 123),
        (1e6, 1_000_000),
        ("7Ei", 7 << 60),
    ],
)
def test_sizes(given: object, size: int) -> None:
    assert ByteSize(given) == size
    assert str(ByteSize(given)) == str(given)
    assert type(ByteSize(given) + 1) is int


@pytest.mark.parametrize("given", ["", "100m", "0.5", "-1", "64MB", "lots", "8Ei", "1_000", "1e99", 0.5, True, None])
def test_what_is_no_whole_number_of_bytes_is_refused(given: object) -> None:
    with pytest.raises(ValueError, match=r"(is not a size|has no value); write "):
        ByteSize(given)


def test_copies_keep_the_text() -> None:
    for one in (Duration("90s"), ByteSize("1Ki"), Quantity("1k")):
        for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):  # noqa: S301 - our own bytes
            assert (other, str(other)) == (one, str(one))


@pytest.mark.parametrize("kind", [Duration, ByteSize, Quantity])
@pytest.mark.parametrize(
    "text",
    ["1" * 1_100_000, "1" * 1_100_000 + "k", "1.1" * 500_000 + "s", "0" * 100 + "1s"],
    ids=["without a unit", "beyond decimals", "many points", "zeros"],
)
def test_numbers_of_a_hundred_digits_are_refused_unread(kind: type, text: str) -> None:
    # what is read takes time with the square or cube of its length, while all requests wait
    with pytest.raises(ValueError, match=r"111|1\.1|000") as refused:
        kind(text)
    assert len(str(refused.value)) < 500

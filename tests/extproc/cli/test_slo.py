# SPDX-License-Identifier: Apache-2.0
"""What ``attache slo`` prints of the counts of several processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from extproc.__main__ import main
from extproc.api.status_page_contents import SloObjectiveCounts
from extproc.cli.slo import merge_attainments, render
from tests.extproc.cli.test_common import answering, page

if TYPE_CHECKING:
    from collections.abc import Sequence

HOUR = 480_000
NOW_S = HOUR * 3600.0 + 1800.0
TTFT = SloObjectiveCounts("default/chat", "chat", "ttft", 0.5, 0.99, 30 * 86400.0)


def counted(*hours: tuple[int, int, int], excluded: int = 0) -> SloObjectiveCounts:
    return msgspec.structs.replace(TTFT, hours=list(hours), excluded=excluded)


def shown(*counts: SloObjectiveCounts, worst: int = 3) -> list[str]:
    return render(merge_attainments(counts), now_s=NOW_S, worst=worst)


def cells(lines: Sequence[str]) -> dict[str, str]:
    """Of the first objective."""
    heads = [one for one in lines[0].split("  ") if one]
    return dict(zip(map(str.strip, heads), (one.strip() for one in lines[1].split("  ") if one.strip()), strict=True))


def test_processes_are_added_up_by_the_hour() -> None:
    lines = shown(counted((HOUR, 600, 0), excluded=2), counted((HOUR - 1, 390, 10), (HOUR, 0, 0), excluded=1))
    assert cells(lines) == {
        "ROUTE": "default/chat",
        "CLASS": "chat",
        "OBJECTIVE": "ttft 500ms",
        "PROMISED": "99% in 30d",
        "ATTAINED": "99.000%",
        "REQUESTS": "1,000",
        "LEFT OUT": "3",
        "BUDGET LEFT": "0.0%",
        "BURN RATE": "1.00",
    }


def test_the_worst_hours_are_those_with_most_misses() -> None:
    lines = shown(counted((HOUR - 9, 90, 10), (HOUR - 5, 0, 4), (HOUR - 3, 500, 20), (HOUR, 100, 0)), worst=2)
    start = lines.index("Worst hours:")
    assert lines[start + 1] == ("default/chat chat ttft: 20 of 520 missed (3.8%) in the hour from 2024-10-03 21:00 UTC")
    assert "10 of 100 missed (10.0%)" in lines[start + 2]
    assert lines[start + 3] == ""
    # more than may have missed it
    assert cells(lines)["BUDGET LEFT"].startswith("-")
    assert cells(lines)["BURN RATE"] == "0.00"
    assert "Worst hours:" not in shown(counted((HOUR, 5, 0)))


def test_what_is_not_all_is_not_shown_as_all() -> None:
    assert cells(shown(counted((HOUR, 9_999_999, 1))))["ATTAINED"] == "99.999%"
    assert cells(shown(counted((HOUR, 10, 0))))["ATTAINED"] == "100.000%"


def test_an_objective_of_streams_without_streams_is_explained() -> None:
    lines = shown(TTFT)
    assert cells(lines)["ATTAINED"] == "-"
    assert lines[-1] == ("default/chat chat ttft: no request counted; TTFT and TPOT are of streamed answers alone")


def test_the_exit_status_says_whether_a_budget_is_used_up(capsys: pytest.CaptureFixture[str]) -> None:
    for hours, status in (((HOUR, 1000, 1), 0), ((HOUR, 90, 10), 1), ((HOUR, 10, 0), 0)):
        with answering(page(msgspec.json.encode(counted(hours)) + b"\n")) as address:
            assert main(["slo", f"http://{address}/slo"]) == status
        assert "default/chat" in capsys.readouterr().out


def test_no_objectives_and_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(page(b"")) as address:
        assert main(["slo", address]) == 0
    assert "no ModelRoute has objectives" in capsys.readouterr().out
    assert main(["slo", "127.0.0.1:1"]) == 2
    assert "is extproc running there?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["slo", "--worst", "-1"])
    assert "write 0 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    "raw",
    [
        b"<html>hello</html>",
        b'{"route": 1}',
        b"[" * 100_000,
        msgspec.json.encode(TTFT).replace(b"[]", b"[[1e999, 1, 1]]"),
    ],
)
def test_a_page_of_something_else_is_a_line(raw: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with answering(page(raw)) as address:
        assert main(["slo", address]) == 2
    said = capsys.readouterr().err
    assert f"no objectives at {address}" in said
    assert len(said.splitlines()) == 1


def test_hours_that_no_calendar_has_are_no_dates() -> None:
    lines = shown(counted((2**62, 0, 5), (-(2**62), 1, 5)))
    assert cells(lines)["ATTAINED"] == "9.090%"
    assert "Worst hours:" not in lines

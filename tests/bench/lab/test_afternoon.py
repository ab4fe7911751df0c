# SPDX-License-Identifier: Apache-2.0
"""A researcher's afternoon, as docs/lab.md tells it: its files and commands are taken from that page and run.

The report is opened in a headless Chromium if there is one (`apt-get install chromium`).
"""

from __future__ import annotations

import json
import re
import shlex
import struct
import subprocess
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.__main__ import main
from tests.programs import program

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).parents[3] / "docs/lab.md"
_FILE = re.compile(r"^`([\w.]+)`:\n\n```\w*\n(.*?)```", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^    attache ((?:.*\\\n)*.*)", re.MULTILINE)


@pytest.fixture(scope="module")
def afternoon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory in which all of the page's section was done."""
    section = PAGE.read_text().partition("## A researcher's afternoon\n")[2].partition("\n## ")[0]
    directory = tmp_path_factory.mktemp("afternoon")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(directory)
        for name, text in _FILE.findall(section):
            Path(name).write_text(text)
        first, edited, compared = [shlex.split(one.replace("\\\n", " ")) for one in _COMMAND.findall(section)]
        assert main(first) == 0
        old, new = re.search(r"`(alpha=\d)` to `(alpha=\d)`", section).groups()  # type: ignore[union-attr]
        source = Path("my.py").read_text()
        assert old in source
        Path("my.py").write_text(source.replace(old, new))
        assert main(edited) == 0
        assert main(compared) == 0
        yield directory


@pytest.mark.slow
def test_the_edited_policy_has_other_numbers_and_the_others_the_same(afternoon: Path) -> None:
    before, after = (json.loads((afternoon / f"{name}.json").read_text())["groups"] for name in ("before", "after"))
    # one for each rate
    assert len(before) == len(after) == 2
    assert [one["conditions"] for one in before] == [one["conditions"] for one in after]
    for old, new in zip((one["policies"] for one in before), (one["policies"] for one in after), strict=True):
        assert old.keys() == new.keys() == {"attache", "my.py:Mine", "round-robin"}
        assert [old[one] for one in ("attache", "round-robin")] == [new[one] for one in ("attache", "round-robin")]
    assert [one["policies"]["my.py:Mine"] for one in before] != [one["policies"]["my.py:Mine"] for one in after]


@pytest.mark.slow
def test_the_report_names_what_made_it(afternoon: Path) -> None:
    page = (afternoon / "report.html").read_text()
    assert "rig.yamlx2" in page
    for file in ("trace.jsonl", "rig.yaml", "my.py"):
        assert f"{file} (xxh3 " in page
    assert page.count("<img") == 2


@pytest.mark.slow
def test_the_report_is_drawn_by_a_browser(afternoon: Path) -> None:
    browser = program("chromium", "chromium-browser", "google-chrome")
    target = (afternoon / "report.html").as_uri()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={afternoon / 'profile'}"]

    def browse(*more: str) -> str:
        command = [browser, *flags, *more, target]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout

    page = browse("--dump-dom")
    assert page.count("<table>") == page.count("<img") == 2
    assert "my.py:Mine" in page
    shot = afternoon / "report.png"
    browse("--hide-scrollbars", "--window-size=1400,2600", f"--screenshot={shot}")
    pixels = colors_of(shot.read_bytes())
    # blue, orange and green: each of the three policies in its own colour
    for color in ((31, 119, 180), (255, 127, 14), (44, 160, 44)):
        assert sum(count for one, count in pixels.items() if near(one, color)) > 500


def near(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(abs(left - right) <= 6 for left, right in zip(one, other, strict=True))


def colors_of(png: bytes) -> dict[tuple[int, ...], int]:
    """How many pixels of each colour an 8-bit PNG has, its filters undone."""
    at, packed, width, size = 8, b"", 0, 3
    while at < len(png):
        (length,), kind = struct.unpack(">I", png[at : at + 4]), png[at + 4 : at + 8]
        body = png[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, size = struct.unpack(">I", body[:4])[0], {2: 3, 6: 4}[body[9]]
        packed += body if kind == b"IDAT" else b""
        at += 12 + length
    raw, stride, above = zlib.decompress(packed), width * size, bytes(width * size)
    counts: dict[tuple[int, ...], int] = {}
    for start in range(0, len(raw), stride + 1):
        line = unfiltered(raw[start], bytearray(raw[start + 1 : start + 1 + stride]), above, size)
        for pixel in zip(*(line[channel::size] for channel in range(3)), strict=True):
            counts[pixel] = counts.get(pixel, 0) + 1
        above = bytes(line)
    return counts


def unfiltered(kind: int, line: bytearray, above: bytes, size: int) -> bytearray:
    for index in range(len(line) if kind else 0):
        left = line[index - size] if index >= size else 0
        corner = above[index - size] if index >= size else 0
        up = above[index]
        guess = left + up - corner
        nearest = min((abs(guess - left), 0, left), (abs(guess - up), 1, up), (abs(guess - corner), 2, corner))[2]
        line[index] = (line[index] + (0, left, up, (left + up) // 2, nearest)[kind]) % 256
    return line

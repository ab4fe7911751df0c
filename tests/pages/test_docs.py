# SPDX-License-Identifier: Apache-2.0
"""What pages tell people to type exists, and links inside the repository lead somewhere."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import yaml
from prometheus_client import generate_latest

from controller.bundle.acknowledgements import AcknowledgementPoller
from controller.bundle.metrics import BundleMetrics
from controller.bundle.sync import BundleSync
from extproc.api.config_loader import ConfigDirectory
from extproc.metrics.request_metrics import Metrics
from tools.site_pages import PAGES, with_site_links

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
SOURCES = [*(ROOT / name for name in PAGES), *DOCS]

_TOPS = "extproc|controller|bench|tests|tools|manifests|deploy|envoy|docs"
# bench/out is written by the commands
_PATH = re.compile(rf"(?<![\w/.:-])((?:{_TOPS})/(?!out)[\w./-]+)")


@pytest.mark.parametrize("page", SOURCES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", SOURCES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_sections_lead_to_one(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", page.read_text())
    targets = [(page.parent / file if file else page, section) for file, section in links]
    assert [one for one in targets if one[0].suffix == ".md" and one[1] not in _sections(one[0])] == []


@cache
def _sections(page: Path) -> set[str]:
    """What a link may name: headings, as GitHub and the site spell them, and marked places."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    shown = (re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", one) for one in headings)
    return {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in shown} | {
        *re.findall(r'<a id="([^"]+)">', text)
    }


@pytest.mark.parametrize("page", SOURCES, ids=lambda page: str(page.relative_to(ROOT)))
def test_rows_of_tables_stand_in_tables(page: Path) -> None:
    # code, which may have pipes, is fenced, indented or quoted
    prose = re.sub(r"^```.*?^```$|^ {4}[^\n]*$|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert [line for line in prose.splitlines() if " | " in line and not line.startswith("|")] == []


def test_files_of_the_repository_that_pages_name_exist() -> None:
    of_others = ROOT / "docs" / "reference" / "llm-d-files.md"
    texts = {page.name: page.read_text() for page in SOURCES if page != of_others}
    paths = {(page, path.rstrip("./")) for page, text in texts.items() for path in _PATH.findall(text)}
    assert sorted(one for one in paths if not (ROOT / one[1]).exists()) == []


@pytest.mark.parametrize("page", SOURCES, ids=lambda page: page.name)
def test_prose_is_at_most_120_columns_wide(page: Path) -> None:
    # what a command prints is as wide as it is
    prose = re.sub(r"^```text\n.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = (line for line in prose.splitlines() if not line.lstrip().startswith("|"))
    assert [line for line in lines if len(line) > 120] == []


def test_the_site_shows_every_page() -> None:
    shown = re.findall(r"[\w/-]+\.md", yaml.safe_dump(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    there = {str(page.relative_to(ROOT / "docs")) for page in DOCS}
    assert sorted(shown) == sorted(there | set(PAGES.values()))


@pytest.mark.parametrize("mode", ["light", "dark"])
@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "images").glob("*.svg")), ids=lambda picture: picture.stem)
def test_text_in_pictures_is_legible(picture: Path, mode: str) -> None:
    lines = [line for line in picture.read_text().splitlines() if "--ink:" in line]
    color = dict(re.findall(r"--(\w+): (#\w{6})", lines[mode == "dark"]))
    pairs = [("ink", "page"), ("ink", "box"), ("ink", "fill"), ("soft", "page"), ("soft", "box")]
    pairs += [(name, "page") for name in ("blue", "red")]
    # what WCAG asks of text at the level AA
    there = [pair for pair in pairs if color.keys() >= {*pair}]
    assert [pair for pair in there if _contrast(color[pair[0]], color[pair[1]]) < 4.5] == []
    assert ("ink", "page") in there


def _contrast(one: str, other: str) -> float:
    """From 1 to 21, as WCAG 2 defines it."""
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(color: str) -> float:
    parts = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_links_of_pages_at_the_top_are_those_of_the_site() -> None:
    text = "[a](docs/lab.md#traffic) [b](ARCHITECTURE.md) [c](https://x/docs/y) [d](#here)"
    expected = "[a](lab.md#traffic) [b](architecture.md) [c](https://x/docs/y) [d](#here)"
    assert with_site_links(text) == expected


def test_the_alerts_on_the_operations_page_use_metrics_that_there_are(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    (text,) = re.findall(r"```yaml\n(groups:.*?)```", page, re.DOTALL)
    rules = [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
    used = {name for rule in rules for name in re.findall(r"attache_[a-z_]+", rule["expr"])}
    registry = Metrics(list, lambda: 0.0, lambda: 0.0).registry
    acknowledgements = AcknowledgementPoller(lambda _: None, "bootstrap.json")
    registry.register(BundleMetrics(BundleSync(ConfigDirectory(tmp_path), tmp_path, "path", acknowledgements)))
    known = set(re.findall(r"^# TYPE (\S+)", generate_latest(registry).decode(), re.MULTILINE))
    assert len(used) >= 6
    assert used <= known

# SPDX-License-Identifier: Apache-2.0
"""The reference page of published EndpointPickerConfigs: which load here, and what refuses the others.

``llm_d_files.json`` has the plugin types of each file and the names of their parameters; each file was loaded when this
was written.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from extproc.llmd.registry import BUILT_IN, NOT_BUILT
from tools.reference.kinds import MARK
from tools.reference.llm_d_parameters import is_taken

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_FILES: Final = Path(__file__).with_suffix(".json")
# Files that something else than a type refuses, here and in llm-d's present release.
_BY_HAND: Final[Mapping[str, str]] = MappingProxyType(
    {
        "guides/agentic-serving/router/agentic-serving-gpu.values.yaml": (
            "a profile names active-request-scorer, which no plugin is called; llm-d refuses it, too"
        ),
        "deploy/config/pd-slo-epp-config.yaml": "a draft with a field profileHandler, which no release had",
    }
)
_HEAD: Final = """\
# Published EndpointPickerConfigs

Files of llm-d, of the Gateway API Inference Extension, of KServe and of guides elsewhere, of this year and before, also
those inside of Helm values and of documentation, that were loaded here. What of them has no effect, `attache check`
tells.
"""


def page() -> str:
    """The Markdown page."""
    found = list(verdicts())
    loads = sum(not refused for *_, refused in found)
    summary = f"Of {len(found)} files {loads} load. The others:\n"
    rows = [f"| {repo} | `{path}` | {refused} |" for repo, path, refused in found if refused]
    table = ["| repository | file | refused because of |", "|---|---|---|", *rows]
    loaded = ["## Files that load", "", "| repository | file |", "|---|---|"]
    loaded += [f"| {repo} | `{path}` |" for repo, path, refused in found if not refused]
    return "\n".join([MARK, "", _HEAD, summary, *table, "", *loaded]) + "\n"


def verdicts() -> Iterator[tuple[str, str, str]]:
    """Repository, path, and what refuses the file; empty if it loads."""
    for repo, files in json.loads(_FILES.read_text()).items():
        for path, plugins in sorted(files.items()):
            yield repo, path, _BY_HAND.get(path) or ", ".join(_missing(plugins.split()))


def _missing(plugins: list[str]) -> Iterator[str]:
    for one in plugins:
        name, _, parameters = one.partition(":")
        if name not in BUILT_IN:
            yield f"`{name}` ({NOT_BUILT[name]})" if name in NOT_BUILT else f"`{name}`"
            continue
        refused = [parameter for parameter in parameters.split("+") if not is_taken(name, parameter)]
        if refused:
            yield f"`{name}`: {', '.join(f'`{parameter}`' for parameter in refused)}"

# SPDX-License-Identifier: Apache-2.0
"""Write what the golden Models become: ``python -m tools.golden_models``, after a look at the difference"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from controller.commands.render import model_as_yaml, objects_in, render_models

if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER: Final = Path(__file__).parent.parent / "tests" / "controller" / "models" / "model" / "golden"


def golden() -> Mapping[Path, str]:
    """The text of each ``NAME.children.yaml``, from its ``NAME.yaml``."""
    found = {}
    for source in sorted(FOLDER.glob("*.yaml")):
        if not source.name.endswith(".children.yaml"):
            objects = [dict(one) for one in objects_in(source.name, source.read_text(), "default")]
            found[source.with_suffix(".children.yaml")] = "".join(model_as_yaml(one) for one in render_models(objects))
    return found


if __name__ == "__main__":
    for path, text in golden().items():
        path.write_text(text)

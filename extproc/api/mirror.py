# SPDX-License-Identifier: Apache-2.0
"""Copies of a rule's requests to another ModelServer, whose answers nobody reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from extproc.api.parameter_overrides import MostTokens
from extproc.api.spec import Name, Spec

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from extproc.api.config_errors import Finding, Path

IS_TARGET: Final = "mirror is a target of the rule, which has the requests themselves; name another ModelServer"


class Mirror(Spec, frozen=True):
    """``model_server_name``: where copies go. ``percent``: the share of requests of which there is one.
    ``max_output_tokens``: of each answer to a copy, as its tokens are computed for nobody.
    """

    model_server_name: Name
    percent: Annotated[float, msgspec.Meta(ge=0, le=100)] = 100.0
    max_output_tokens: MostTokens | None = None


def check_mirror(mirror: Mirror | None, targets: Collection[str], path: Path) -> Iterator[Finding]:
    """It is another ModelServer than the rule's own."""
    if mirror is not None and mirror.model_server_name in targets:
        yield (*path, "mirror", "modelServerName"), IS_TARGET

# SPDX-License-Identifier: Apache-2.0
"""What the engines do for an extproc, on the wire: the page /loads, by which the controller chooses and drains pods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LOADS_PATH: Final = "/loads"
# On pods of gateways: the port that serves this page for all extproc processes of the pod.
LOADS_LABEL: Final = "attache.dev/tells-loads"


class EndpointLoad(msgspec.Struct, frozen=True, rename="camel"):
    """``in_flight``: requests that this process has sent there. ``cached_tokens``: of prompts, in its cache, as far as
    this process knows. ``reported``: requests that the engine itself says it has: those that came from others too, and
    those that went to another engine than was decided, because Envoy could not reach that one or did not know it yet.
    """

    in_flight: int = 0
    cached_tokens: int = 0
    reported: int = 0

    @property
    def busy_with(self) -> int:
        """Requests at the engine. What was sent is known sooner than what is reported."""
        return max(self.in_flight, self.reported)


def total(pages: Iterable[Mapping[str, EndpointLoad]]) -> dict[str, EndpointLoad]:
    """Of several processes. Requests are each process's own and add up. Caches and reports are the same, seen by
    all.
    """
    found: dict[str, EndpointLoad] = {}
    for page in pages:
        for address, one in page.items():
            before = found.get(address, EndpointLoad())
            found[address] = EndpointLoad(
                before.in_flight + one.in_flight,
                max(before.cached_tokens, one.cached_tokens),
                max(before.reported, one.reported),
            )
    return found

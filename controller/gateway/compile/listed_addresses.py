# SPDX-License-Identifier: Apache-2.0
"""Addresses that a ModelServer of a cluster may list: not those of the gateway's own pod and node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.api.addresses import is_own, parse_endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.api.model_server import ModelServerSpec


def own_address(spec: ModelServerSpec) -> str:
    """The first address that means the gateway's own pod or node; empty if there is none.

    What a host name resolves to is looked at when it is resolved.
    """
    return next((one for one in _addresses(spec) if is_own(parse_endpoint(one).host)), "")


def _addresses(spec: ModelServerSpec) -> Iterator[str]:
    for endpoint in spec.endpoints:
        yield from (one for one in (endpoint.address, endpoint.kv_events, endpoint.kv_replay) if one is not None)

# SPDX-License-Identifier: Apache-2.0
"""How the objects of a cluster are referred to: pods of engines by labels, gateways by name."""

from __future__ import annotations

from typing import Annotated

import msgspec

from extproc.api.spec import Name, Namespace, NonEmpty, Spec

Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
LabelValue = Annotated[str, msgspec.Meta(max_length=63, pattern=r"^([0-9A-Za-z]([-0-9A-Za-z_.]*[0-9A-Za-z])?)?$")]


class WorkloadSelector(Spec, frozen=True):
    """Pods of a ModelServer's namespace. ``match_labels``: a pod has all of these labels."""

    match_labels: Annotated[dict[str, LabelValue], msgspec.Meta(min_length=1, max_length=64)]


class WorkloadPort(Spec, frozen=True):
    """Where the engines in selected pods listen. ``port``: the engine's, or that of its first data-parallel rank.
    ``rank_ports``: those of further ranks; each rank is an endpoint of its own.
    """

    port: Port
    rank_ports: Annotated[tuple[Port, ...], msgspec.Meta(max_length=7)] = ()

    @property
    def ports(self) -> tuple[int, ...]:
        """All of them, by rank."""
        return (self.port, *self.rank_ports)


class ParentReference(Spec, frozen=True):
    """A gateway that a route is attached to, as in the Gateway API. ``name``: the gateway's. ``namespace``: the route's
    own, if left out. ``section_name``: one of its listeners; ``port``: listeners on this port. ``group`` and
    ``kind``: of the gateway.
    """

    name: Name
    namespace: Namespace | None = None
    section_name: NonEmpty | None = None
    port: Port | None = None
    group: str = "gateway.networking.k8s.io"
    kind: str = "Gateway"

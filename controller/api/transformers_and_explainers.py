# SPDX-License-Identifier: Apache-2.0
"""Steps of a Model: servers of its user's own that requests pass before its engines, or in their place."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from controller.api.shared_types import EnvVar, LayeredSpec, Replicas, Words
from extproc.api.quantities import Duration
from extproc.api.spec import NonEmpty, Port, list_map_keys


class Step(LayeredSpec, frozen=True):
    """A server of KServe's SDK, or another that takes its arguments. It calls the model's engines, the predictor, by
    itself.
    """

    # Of its container.
    image: NonEmpty | None = None
    # Instead of the image's entry point.
    command: Words | None = None
    # After those that name the model, the port and the predictor; one that is written here is not added.
    args: Words = ()
    # Its environment.
    env: Annotated[tuple[EnvVar, ...], msgspec.Meta(max_length=200, extra_json_schema=list_map_keys("name"))] = ()
    # Of its container.
    resources: dict[str, Any] | None = None
    # Where it listens.
    port: Port = 8080
    # Its pods; left out, it starts at 1 and autoscalers may set it.
    replicas: Replicas | None = None
    # The longest that an answer may take, and that it waits for the predictor.
    timeout: Duration = Duration("1m")
    # How long running requests have to end before a pod is deleted.
    drain_timeout: Duration = Duration("5m")
    # Further fields of the PodSpec; its container is called ``engine``.
    pod: dict[str, Any] = msgspec.field(default_factory=dict)


class Transformer(Step, frozen=True):
    """Requests go to it first, and it calls the predictor: it changes requests before, and answers after.

    ``colocated``: it is a container of the engines' pods, ``transformer-container``, and not pods of its own; then
    ``replicas`` and ``pod`` are those of the engines.
    """

    colocated: bool = False

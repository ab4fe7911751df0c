# SPDX-License-Identifier: Apache-2.0
"""Steps of a Model: servers of its user's own that requests pass before its engines, or in their place."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from controller.api.common import EnvVar, Layered, Replicas, Words
from extproc.api.quantities import Duration
from extproc.api.spec import NonEmpty, Port, keyed_by


class Step(Layered, frozen=True):
    """A server of KServe's SDK, or another that takes its arguments. It calls the model's engines, the predictor, by
    itself.

    ``image``: of its container. ``command``: instead of the image's entry point. ``args``: after those that name the
    model, the port and the predictor; one that is written here is not added. ``env``: its environment. ``resources``:
    of its container. ``port``: where it listens. ``replicas``: its pods; left out, it starts at 1 and autoscalers may
    set it. ``timeout``: the longest that an answer may take, and that it waits for the predictor. ``drain_timeout``:
    how long running requests have to end before a pod is deleted. ``pod``: further fields of the PodSpec; its container
    is called ``engine``.
    """

    image: NonEmpty | None = None
    command: Words | None = None
    args: Words = ()
    env: Annotated[tuple[EnvVar, ...], msgspec.Meta(max_length=200, extra_json_schema=keyed_by("name"))] = ()
    resources: dict[str, Any] | None = None
    port: Port = 8080
    replicas: Replicas | None = None
    timeout: Duration = Duration("1m")
    drain_timeout: Duration = Duration("5m")
    pod: dict[str, Any] = msgspec.field(default_factory=dict)


class Transformer(Step, frozen=True):
    """Requests go to it first, and it calls the predictor: it changes requests before, and answers after.

    ``colocated``: it is a container of the engines' pods, ``transformer-container``, and not pods of its own; then
    ``replicas`` and ``pod`` are those of the engines.
    """

    colocated: bool = False

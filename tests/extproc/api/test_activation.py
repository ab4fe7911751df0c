# SPDX-License-Identifier: Apache-2.0
"""What may be said of requests that wait for engines."""

from __future__ import annotations

import pytest

from extproc.api.errors import ConfigInvalid
from extproc.api.load import load

SERVER = """
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec: {model: m, endpoints: [], activation: {%s}}
"""


def test_defaults() -> None:
    (server,) = load({"a.yaml": (SERVER % "").encode()}).servers
    activation = server.spec.activation
    assert activation is not None
    assert (activation.hold_timeout, activation.start_time, activation.max_requests) == (600.0, 60.0, 1000)
    assert activation.max_bytes == 256 * 1024 * 1024


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ("holdTimeout: 2h", "spec.activation.holdTimeout"),
        ("holdTimeout: 0s", "spec.activation.holdTimeout"),
        ("startTime: 0s", "spec.activation.startTime"),
        ("maxRequests: 0", "spec.activation.maxRequests"),
        ("keepAlive: true", "spec.activation"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(given: str, place: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        load({"a.yaml": (SERVER % given).encode()})
    assert place in str(caught.value)

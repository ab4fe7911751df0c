# SPDX-License-Identifier: Apache-2.0
"""Which headers of a request name its session, by all the forms that files have."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from extproc.api.picker_flow_control import SESSION_HEADERS, AgentSessionHeaders
from extproc.api.session_affinity import SessionSource
from extproc.scheduling.plugins.affinity import SessionAffinityScorer, SessionIdProducer, ThunderAgentAffinity

OTHERS = {
    "agents": AgentSessionHeaders(additional_session_headers=("X-Mine",)),
    "ids": SessionIdProducer(header_name="X-Id"),
}
AGENTS = ("x-mine", *SESSION_HEADERS)


def headers(plugin: SessionAffinityScorer) -> tuple[str, ...]:
    return tuple(one.header for one in plugin.session_id_config.sources)


@pytest.mark.parametrize(
    ("given", "expected", "ttl_s"),
    [
        ({"strategy": "session_id"}, ("x-session-id",), 300),
        ({"strategy": "session_id", "sessionIdConfig": {"sources": [{"attribute": "agent-identity"}]}}, AGENTS, 300),
        ({"strategy": "session_id", "sessionIdConfig": {"sources": [{"attribute": "session-id"}]}}, ("x-id",), 300),
        ({"sessionIDProducerName": "ids"}, ("x-id",), 300),
        ({"algorithm": "session_id_header", "headerName": "X-S"}, ("x-s", *AGENTS), 600),
        ({"algorithm": "session_id_header", "evictionTtlSeconds": 60}, ("x-session-token", *AGENTS), 60),
    ],
)
def test_sources_are_headers_in_the_end(given: dict[str, Any], expected: tuple[str, ...], ttl_s: float) -> None:
    plugin = msgspec.convert(given, SessionAffinityScorer).with_plugins(OTHERS)
    assert headers(plugin) == expected
    assert plugin.ttl_s == ttl_s
    assert plugin.uses_client_ids


def test_producers_that_the_file_does_not_declare_have_their_defaults() -> None:
    given = {"strategy": "session_id", "sessionIdConfig": {"sources": [{"attribute": "agent-identity"}]}}
    assert headers(msgspec.convert(given, SessionAffinityScorer).with_plugins({})) == SESSION_HEADERS
    assert SessionIdProducer().headers == ("x-session-id",)


def test_a_token_needs_no_producer() -> None:
    plugin = SessionAffinityScorer()
    assert plugin.with_plugins(OTHERS) is plugin
    assert not plugin.uses_client_ids


def test_thunder_agent_keeps_sessions_of_agents() -> None:
    plugin = ThunderAgentAffinity().with_plugins(OTHERS)
    assert (headers(plugin), plugin.ttl_s) == (AGENTS, 3600)
    assert SessionSource(header="x-mine") in plugin.sources

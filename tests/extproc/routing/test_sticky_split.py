# SPDX-License-Identifier: Apache-2.0
"""A split by a key: shares by weight, keys that stay, keys that move to one target alone."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter

import pytest

from extproc.api.config_errors import ConfigInvalid
from extproc.core.explanation import sticky_split_of
from extproc.routing.sticky_split import StickySplit
from extproc.wire_names import TENANT, USER
from tests.extproc.scenes import configuration, core_of, endpoints, request

SPLIT = StickySplit("Session", "default/chat")
KEYS = [b"key-%d" % number for number in range(20_000)]
SERVERS = {name: endpoints(f"10.0.0.{number}:8000") for number, name in enumerate(("old", "new", "third"), start=1)}


def chosen(weights: dict[str, int], split: StickySplit = SPLIT) -> list[str]:
    names = list(weights)
    return [names[split.choose(names, list(weights.values()), key)] for key in KEYS]


@pytest.mark.parametrize(
    "weights", [{"a": 90, "b": 10}, {"a": 1, "b": 999_999}, {"a": 5, "b": 3, "c": 2}, {"a": 1, "b": 1}]
)
def test_each_target_has_its_weights_share_of_the_keys(weights: dict[str, int]) -> None:
    found, total = Counter(chosen(weights)), sum(weights.values())
    for name, weight in weights.items():
        share = weight / total
        # five standard deviations of a binomial share, and never nothing at all
        assert abs(found[name] / len(KEYS) - share) < 5 * (share * (1 - share) / len(KEYS)) ** 0.5 + 1e-3


def test_a_weight_that_rises_moves_keys_to_its_target_alone() -> None:
    steps = [chosen({"old": 100 - weight, "new": weight, "third": 40}) for weight in (1, 5, 25, 50, 99)]
    raised = [chosen({"old": 100, "new": weight, "third": 40}) for weight in (1, 5, 25, 50, 99)]
    for before, after in itertools.pairwise(raised):
        moved = {(was, now) for was, now in zip(before, after, strict=True) if was != now}
        assert {now for _, now in moved} == {"new"}
    for before, after in itertools.pairwise(steps):
        assert not [one for one in zip(before, after, strict=True) if one[0] == "new" and one[1] != "new"]


def test_a_target_that_leaves_gives_up_its_own_keys_alone_in_any_order() -> None:
    before, after = chosen({"a": 5, "b": 3, "c": 2}), chosen({"c": 2, "a": 5})
    assert all(now == was for was, now in zip(before, after, strict=True) if was != "b")


def test_routes_split_independently() -> None:
    both = zip(chosen({"a": 1, "b": 1}), chosen({"a": 1, "b": 1}, StickySplit("Session", "default/x")), strict=True)
    assert 0.45 < sum(one == other for one, other in both) / len(KEYS) < 0.55


def test_another_process_chooses_the_same() -> None:
    code = (
        "from extproc.routing.sticky_split import StickySplit\n"
        "split = StickySplit('Session', 'default/chat')\n"
        "print(''.join(str(split.choose(['a', 'b'], [1, 1], b'key-%d' % one)) for one in range(200)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert found == "".join(str("ab".index(name)) for name in chosen({"a": 1, "b": 1})[:200])


def test_no_two_callers_have_one_key() -> None:
    def key(by: str, tenant: str, user: str = "", **headers: str) -> bytes:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return StickySplit(by, "r").key_of(named, tenant, user)  # type: ignore[arg-type]

    assert len({key("Session", "a", x_session_id="1"), key("Session", "b", x_session_id="1")}) == 2
    assert key("Session", "a1", x_session_id="1:2") != key("Session", "a", x_session_id="11:2")
    assert key("User", "a", "b:c") != key("User", "a:b", "c")
    assert key("Session", "a", x_session_id="1", session_id="2") == key("Session", "a", x_session_id="1")
    assert key("Session", "a", x_claude_code_session_id="1") == key("Session", "a", x_session_id=" 1 ")
    # nothing to go by
    assert {key("Session", "a"), key("Session", "a", x_session_id="  "), key("User", "a")} == {b""}
    assert key("Tenant", "anonymous") == b""
    # whatever bytes a client sends
    assert key("Session", "a", x_session_id="\xff" * 60_000) != key("Session", "a", x_session_id="\udcff")


def rule(sticky: str, **weights: int) -> dict[str, str]:
    targets = [{"modelServerName": name, "weight": weight} for name, weight in weights.items()]
    return {"chat": f"rules: {json.dumps([{'targetModels': targets, 'sticky': sticky}])}"}


@pytest.mark.parametrize(("sticky", "header"), [("Session", "x-session-id"), ("Tenant", TENANT), ("User", USER)])
def test_requests_of_one_caller_go_to_one_server_and_callers_to_several(sticky: str, header: str) -> None:
    core = core_of(servers=SERVERS, routes=rule(sticky, old=50, new=50, third=0))
    places = {
        name: {request(core, headers={header: name}).destination.server for _ in range(8)}
        for name in map(str, range(40))
    }
    assert all(len(found) == 1 for found in places.values())
    assert set().union(*places.values()) == {"default/old", "default/new"}
    # without a key each request is drawn
    assert len({request(core, headers={}).destination.server for _ in range(40)}) == 2


def test_a_header_that_no_gateway_has_verified_is_no_tenant() -> None:
    core = core_of(servers=SERVERS, routes=rule("Tenant", old=50, new=50))
    arrivals = [request(core, headers=None) for _ in range(40)]
    assert len({one.destination.server for one in arrivals}) == 2


def test_a_session_moves_while_its_server_has_no_engines_and_then_returns() -> None:
    held = "activation: {}\nendpoints: []\n"
    routes = rule("Session", old=50, new=50)
    both = core_of(servers=SERVERS, routes=routes)
    one = core_of(servers={**SERVERS, "new": held}, routes=routes)
    for name in map(str, range(30)):
        where = {core: request(core, headers={"x-session-id": name}) for core in (both, one)}
        assert where[one].destination.server == "default/old"
        if where[both].destination.server == "default/old":
            continue
        assert "go to default/new, which cannot have this one now" in sticky_split_of(where[one])


def test_a_server_that_is_listed_twice_has_both_weights() -> None:
    targets = [{"modelServerName": name, "weight": 25} for name in ("new", "old", "new", "new")]
    core = core_of(
        servers=SERVERS, routes={"chat": f"rules: {json.dumps([{'targetModels': targets, 'sticky': 'Session'}])}"}
    )
    served = Counter(request(core, headers={"x-session-id": str(n)}).destination.server for n in range(2_000))
    assert 0.7 < served["default/new"] / 2_000 < 0.8


def test_the_reason_is_explained() -> None:
    core = core_of(servers=SERVERS, routes=rule("Session", old=50, new=50))
    assert "requests of its session go to this one" in sticky_split_of(request(core, headers={"x-session-id": "1"}))
    assert "the request names no session" in sticky_split_of(request(core, headers={}))
    assert sticky_split_of(request(core_of(servers=SERVERS), headers={"x-session-id": "1"})) == ""
    explained = core.explain(request(core, headers={"x-session-id": "1"}), now=0.0)
    assert "session" in explained.split


def test_tiers_and_other_words_are_refused() -> None:
    targets = [{"modelServerName": name} for name in ("old", "new")]
    for fields, message in (
        ({"sticky": "Tenant", "tiers": {}}, "sticky has no effect with tiers"),
        ({"sticky": "Cookie"}, "sticky"),
    ):
        with pytest.raises(ConfigInvalid, match=message):
            configuration(
                servers=SERVERS, routes={"chat": f"rules: {json.dumps([{'targetModels': targets, **fields}])}"}
            )

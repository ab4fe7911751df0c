# SPDX-License-Identifier: Apache-2.0
"""What is kept of decisions, for how long, and how people read it."""

from __future__ import annotations

import msgspec
import pytest

from controller.autoscaler.decision.decision import AppliedRule, Decision, Recommendation, StageDecision, TargetDecision
from controller.autoscaler.decision.situation import Backlog, Freshness
from controller.autoscaler.reconciler.binding_state import decode_annotation, encode_annotation
from controller.autoscaler.reconciler.decision_records import (
    BindingDecisionLog,
    DecisionRecord,
    DecisionRecords,
    explain_record,
)
from controller.commands.explain_scaling import main


def record(at_s: float, desired: int = 2) -> DecisionRecord:
    stage = StageDecision(
        "Both",
        (Recommendation("Work", 2.25, "queued work", {"rate": 1.5}), Recommendation("Slo", None, "no latency yet")),
        2.25,
        (AppliedRule("Stabilized", 2.25, 3.0, "the largest of 120 s"),),
        Backlog(requests=3, tokens=1200.0, oldest_s=2.0),
        Freshness(age_s=0.4, gateways=2, silent=("gateway-1",)),
    )
    decision = Decision(
        binding="default/one",
        at_s=at_s,
        mode="Auto",
        targets=(TargetDecision("main", 2, desired, ready=2, reason="3 are asked for"),),
        stages=(stage,),
    )
    return DecisionRecord(decision=decision, acts={"main": "scaled from 2 to 3"})


def decoded(log: BindingDecisionLog) -> list[DecisionRecord]:
    return [msgspec.json.decode(one, type=DecisionRecord) for one in log.newest_first()]


def test_the_newest_comes_first_and_what_says_nothing_new_is_kept_once_a_minute() -> None:
    log = BindingDecisionLog()
    for at_s in (0.0, 5.0, 10.0, 15.0, 62.0, 65.0):
        log.add(record(at_s, desired=3 if at_s == 10.0 else 2))
    # 65 is the latest; 5 and 62 said nothing new within a minute
    assert [one.decision.at_s for one in decoded(log)] == [65.0, 15.0, 10.0, 0.0]


def test_a_hundred_are_kept() -> None:
    log = BindingDecisionLog()
    for number in range(300):
        log.add(record(float(number), desired=number))
    found = decoded(log)
    assert (len(found), found[0].decision.at_s, found[-1].decision.at_s) == (100, 299.0, 200.0)


def test_pages_have_the_decisions_of_the_present_term() -> None:
    records, log = DecisionRecords(), BindingDecisionLog()
    log.add(record(1.0))
    records.set_logs(lambda: {"default/one": log, "default/new": BindingDecisionLog()})
    assert list(records.records_by_binding()) == ["default/one"]
    assert len(list(records.records_of_binding("default/one"))) == 1
    assert list(records.records_of_binding("default/two")) == []
    records.set_logs(dict)
    assert list(records.records_of_binding("default/one")) == []


def test_of_hours_without_news_the_last_twenty_minutes_are_kept_and_all_news() -> None:
    log = BindingDecisionLog()
    for minute in range(300):
        log.add(record(60.0 * minute, desired=7 if 100 <= minute < 103 else 2))
    found = [one.decision.at_s / 60 for one in decoded(log)]
    # at 0, 100 and 103 something was new
    assert found == [*range(299, 279, -1), 103, 100, 0]


def test_a_decision_reads_like_its_way() -> None:
    text = explain_record(record(0.0))
    for said in ("default/one at 1970-01-01 00:00:00 UTC, mode Auto", "2.25", "unknown", "no latency yet"):
        assert said in text
    assert "then Stabilized: 2.25 -> 3, the largest of 120 s" in text
    assert "silent gateways: gateway-1" in text
    assert "scaled from 2 to 3" in text
    assert "not proven" not in text
    decision = record(0.0).decision
    stages = (msgspec.structs.replace(decision.stages[0], is_proven=False),)
    text = explain_record(DecisionRecord(decision=msgspec.structs.replace(decision, stages=stages)))
    assert "targets: not proven the cheapest; a slightly cheaper set may exist" in text


def test_what_no_strategy_knows_and_nobody_waits_for_reads_so() -> None:
    decision = record(0.0).decision
    stage = msgspec.structs.replace(
        decision.stages[0], combined=None, waiting=Backlog(), freshness=Freshness(gateways=1, unreported=("pod-1",))
    )
    text = explain_record(DecisionRecord(decision=msgspec.structs.replace(decision, stages=(stage,))))
    assert ": the strategies do not know\n" in text
    assert "  waiting: no requests\n" in text
    assert "of 1 gateway; silent gateways: none; engines without reports: pod-1" in text
    several = msgspec.structs.replace(stage, waiting=Backlog(requests=2, tokens=9.0, oldest_s=1.5, at_zero=1))
    text = explain_record(DecisionRecord(decision=msgspec.structs.replace(decision, stages=(several,))))
    assert "  waiting: 2 requests with 9 tokens, the first for 1.5 s; 1 without any engine\n" in text


@pytest.mark.parametrize("text", ["x", "0", "-1", "1.5"])
def test_a_number_of_decisions_that_is_none(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit):
        main(["default/one", f"--last={text}"], "explain-scaling")
    assert f"argument --last: '{text}' is not a number of decisions; write 1 or more" in capsys.readouterr().err


def test_what_was_learned_survives_packing_and_what_is_too_long_is_left_out() -> None:
    assert decode_annotation(encode_annotation(b'{"Both": 1}')) == b'{"Both": 1}'
    assert encode_annotation(b"") == ""
    assert decode_annotation("nothing of ours") == b""
    assert decode_annotation("!") == b""


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:1"])
def test_the_command_says_which_manager_does_not_answer(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["default/one", "--manager", url], "explain-scaling") == 2
    said = capsys.readouterr().err
    assert said.startswith("http://127.0.0.1:1 does not answer: [Errno 111] Connection refused\n")
    assert "kubectl -n attache-system port-forward" in said

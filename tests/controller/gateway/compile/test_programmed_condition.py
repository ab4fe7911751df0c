# SPDX-License-Identifier: Apache-2.0
"""Programmed is True only for what all consumers use, and says why for the rest."""

from __future__ import annotations

from typing import Any

from controller.gateway.compile.programmed_condition import ConfigConsumer, add_programmed_condition, are_statuses_known
from controller.kube.conditions import (
    WantedCondition,
    WantedListItem,
    WantedStatus,
    WantedStatusList,
    condition_false,
    condition_true,
    merge_status,
)
from extproc.api.status_page_contents import ConfigReport

FILE = "modelserver.default.llama.json"
NEW = {FILE: "new", "gateway.json": "g"}
OLD = {FILE: "old", "gateway.json": "g"}
WRITER = ConfigConsumer("the gateway role", ConfigReport(files=NEW), is_writer=True)


def status(*conditions: WantedCondition, kind: str = "ModelServer", generation: int = 2) -> WantedStatus:
    shown = conditions or (condition_true("Accepted"), condition_true("Programmed"))
    return WantedStatus(kind=kind, key="default/llama", generation=generation, conditions=shown)


def programmed(*consumers: ConfigConsumer, observed: dict[str, Any] | None = None) -> tuple[str, str, str]:
    found = add_programmed_condition(status(), observed or {}, NEW, [WRITER, *consumers])
    (one,) = (one for one in found.conditions if one.type == "Programmed")
    return one.status, one.reason, one.message


def extproc(**report: Any) -> ConfigConsumer:  # noqa: ANN401 - fields of the report
    return ConfigConsumer("extproc", ConfigReport(**report))


def test_it_is_true_once_all_use_it() -> None:
    envoy = ConfigConsumer("Envoy", ConfigReport(files=NEW))
    assert programmed(extproc(files=NEW), envoy) == ("True", "Programmed", "in use by extproc and Envoy")


def test_it_is_unknown_while_somebody_has_not_taken_it() -> None:
    assert programmed(
        extproc(files=NEW), ConfigConsumer("Envoy", ConfigReport(files=OLD, waiting="no Envoy answers"))
    ) == (
        "Unknown",
        "Pending",
        "no Envoy answers",
    )
    assert programmed(ConfigConsumer("extproc", None))[2] == "extproc does not answer"
    assert programmed(extproc(files=OLD))[2] == "extproc has not taken it yet"


def test_it_is_false_with_the_reason_if_somebody_refuses() -> None:
    assert programmed(extproc(files=OLD, refused="a.json: wrong")) == (
        "False",
        "Refused",
        "extproc does not use it: a.json: wrong",
    )


def test_a_model_that_no_engine_lists_is_told_beside_the_endpoints() -> None:
    consumer = extproc(files=NEW, wrong_models={"default/llama": "its engines list 'a' and not 'b'"})
    wanted = status(condition_true("Programmed"), condition_true("Available", "new requests go to 1 of 1 endpoints"))
    found = add_programmed_condition(wanted, {}, NEW, [WRITER, consumer])
    (one,) = (one for one in found.conditions if one.type == "Available")
    assert (one.status, one.reason) == ("True", "ModelNotListed")
    assert one.message == "new requests go to 1 of 1 endpoints; its engines list 'a' and not 'b'"
    assert add_programmed_condition(wanted, {}, NEW, [WRITER, extproc(files=NEW)]).conditions[1].reason == "Available"


def test_a_model_server_whose_breaker_is_open_is_not_available() -> None:
    consumer = extproc(files=NEW, open_breakers={"default/llama": "its breaker is open"})
    wanted = status(condition_true("Programmed"), condition_true("Available", "new requests go to 2 of 2 endpoints"))
    found = add_programmed_condition(wanted, {}, NEW, [WRITER, consumer])
    (one,) = (one for one in found.conditions if one.type == "Available")
    assert (one.status, one.reason) == ("False", "BreakerOpen")
    assert one.message == "new requests go to 2 of 2 endpoints; its breaker is open"
    assert add_programmed_condition(wanted, {}, NEW, [WRITER, extproc(files=NEW)]).conditions[1].status == "True"


def available(
    *consumers: ConfigConsumer, observed: dict[str, Any] | None = None, generation: int = 2
) -> tuple[str, str, str]:
    wanted = status(condition_true("Programmed"), condition_true("Available", "go to it"), generation=generation)
    found = add_programmed_condition(wanted, observed or {}, NEW, [WRITER, *consumers]).conditions[1]
    return found.status, found.reason, found.message


def test_a_model_server_is_available_once_all_send_requests_to_its_engines() -> None:
    envoy = ConfigConsumer("Envoy", ConfigReport(files=OLD, waiting="Envoy does not use the newest cds.json yet"))
    behind = ("Unknown", "Pending", "Envoy does not use the newest cds.json yet")
    assert available(extproc(files=NEW), envoy) == behind
    assert available(extproc(files=OLD))[2] == "extproc has not taken it yet"
    assert available(extproc(files=OLD, refused="a.json: wrong"))[2] == "a.json: wrong"
    assert available(ConfigConsumer("extproc", None))[2] == "extproc does not answer"
    warming = available(extproc(files=NEW, warming=frozenset({"default/llama"})))
    assert warming == ("Unknown", "Pending", "extproc uses its first endpoints once Envoy has them")
    assert available(extproc(files=NEW, warming=frozenset({"default/other"}))) == ("True", "Available", "go to it")
    assert available() == ("True", "Available", "go to it"), "nobody is asked"


def test_a_model_server_that_was_available_stays_so_until_it_changes_or_has_no_engine() -> None:
    wanted = status(condition_true("Programmed"), condition_true("Available"))
    served = merge_status(wanted, {}, "2026-11-01T00:00:00Z")
    assert served is not None
    assert available(extproc(files=OLD), observed=served) == ("True", "Available", "go to it")
    assert available(ConfigConsumer("extproc", None), observed=served)[0] == "True"
    assert available(extproc(files=OLD), observed=served, generation=3)[0] == "Unknown"
    without = status(condition_true("Programmed"), condition_false("Available", "NoPods", "none"))
    assert add_programmed_condition(without, served, NEW, [WRITER]).conditions[1].status == "False"
    empty = merge_status(without, {}, "2026-11-01T00:00:00Z")
    assert empty is not None
    assert available(extproc(files=OLD), observed=empty)[0] == "Unknown", "its first engine is new to extproc"


def test_pods_that_come_and_go_do_not_turn_it() -> None:
    served = merge_status(status(condition_true("Programmed")), {}, "2026-11-01T00:00:00Z")
    assert served is not None
    assert programmed(extproc(files=OLD), observed=served) == ("True", "Programmed", "in use by extproc")
    refused = programmed(extproc(files=OLD, refused="a.json: wrong"), observed=served)
    assert refused == ("True", "Programmed", "in use by extproc; no change is used: a.json: wrong")
    lost = programmed(extproc(refused="a.json: wrong", has_nothing=True), observed=served)
    assert lost == ("False", "Refused", "extproc does not use it: a.json: wrong"), "it serves nothing of before either"
    before = merge_status(status(condition_true("Programmed"), generation=1), {}, "2026-11-01T00:00:00Z")
    assert programmed(extproc(files=OLD), observed=before)[0] == "Unknown", "another generation"


def test_while_the_gateway_config_is_invalid_objects_say_that_nothing_changes() -> None:
    refused = "GatewayConfig default/main: listen: wrong"
    for files, expected in ((NEW, ("True", "Programmed")), (OLD, ("False", "GatewayConfigInvalid"))):
        writer = ConfigConsumer("the gateway role", ConfigReport(files=files, refused=refused), is_writer=True)
        found = add_programmed_condition(status(), {}, NEW, [writer, extproc(files=files)])
        one = found.conditions[1]
        assert (one.status, one.reason) == expected
        assert refused in one.message


def test_what_is_not_served_stays_as_it_was_said() -> None:
    refused = status(condition_false("Accepted", "Invalid", "x"), condition_false("Programmed", "Invalid", "y"))
    assert add_programmed_condition(refused, {}, NEW, [WRITER, extproc(files=OLD)]) == refused


def test_missing_keys_are_the_gateway_configs() -> None:
    missing = ConfigConsumer("Envoy", ConfigReport(files=NEW, missing_keys=("/keys/a: No such file or directory",)))
    config = status(kind="GatewayConfig")
    found = add_programmed_condition(config, {}, NEW, [WRITER, missing]).conditions
    assert [(one.type, one.status, one.reason) for one in found[1:]] == [
        ("Programmed", "True", "Programmed"),
        ("ResolvedRefs", "False", "KeyNotFound"),
    ]
    assert "/keys/a: No such file" in found[2].message
    assert add_programmed_condition(config, {}, NEW, [WRITER, extproc(files=NEW)]).conditions[2].status == "True"
    # nobody was asked, so nothing is known
    assert len(add_programmed_condition(config, {}, NEW, [WRITER]).conditions) == 2


def test_what_is_unknown_is_looked_at_again_soon() -> None:
    pending = add_programmed_condition(status(), {}, NEW, [WRITER, ConfigConsumer("extproc", None)])
    assert not are_statuses_known([pending])
    assert are_statuses_known([add_programmed_condition(status(), {}, NEW, [WRITER, extproc(files=NEW)])])


def shown(wanted: WantedStatus) -> list[str]:
    """Programmed of the object itself, if it has it, then of the items of its lists."""
    entries = [entry.conditions for found in wanted.lists for entry in found.entries]
    return [
        f"{one.status} {one.message}".strip()
        for conditions in (wanted.conditions, *entries)
        for one in conditions
        if one.type == "Programmed"
    ]


def test_a_gateway_and_its_listeners_are_what_the_gateway_config_holds() -> None:
    def entry(name: str, programmed: WantedCondition) -> WantedListItem:
        return WantedListItem(identity={"name": name}, conditions=(programmed,))

    entries = (
        entry("http", condition_true("Programmed")),
        entry("https", condition_false("Programmed", "Invalid", "no certificate")),
    )
    gateway = WantedStatus(
        kind="Gateway",
        key="default/web",
        generation=2,
        conditions=(condition_true("Accepted"), condition_true("Programmed")),
        lists=(WantedStatusList(name="listeners", entries=entries),),
        is_plain=True,
    )
    behind = ConfigConsumer("extproc", ConfigReport(files={"gateway.json": "old"}))
    pending = add_programmed_condition(gateway, {}, NEW, [WRITER, behind])
    not_yet = "Unknown extproc has not taken it yet"
    assert shown(pending) == [not_yet, not_yet, "False no certificate"]
    assert not are_statuses_known([pending])
    used = add_programmed_condition(gateway, {}, NEW, [WRITER, extproc(files=NEW)])
    assert shown(used) == ["True in use by extproc", "True in use by extproc", "False no certificate"]
    assert are_statuses_known([used])
    # another Gateway's change makes the file new; a listener that comes into use waits for it
    served = merge_status(used, {}, "2026-11-01T00:00:00Z")
    assert served is not None
    more = WantedStatusList(name="listeners", entries=(entries[0], entry("https", condition_true("Programmed"))))
    changed = WantedStatus(
        kind="Gateway", key="default/web", generation=2, conditions=gateway.conditions, lists=(more,), is_plain=True
    )
    assert shown(add_programmed_condition(changed, served, NEW, [WRITER, behind])) == [
        "True in use by extproc",
        "True in use by extproc",
        not_yet,
    ]


def test_a_route_says_of_each_parent_whether_its_file_is_used() -> None:
    parent = {"parentRef": {"name": "web"}, "controllerName": "attache.dev/gateway"}
    entry = WantedListItem(identity=parent, conditions=(condition_true("Accepted"), condition_true("Programmed")))
    parents = WantedStatusList(name="parents", entries=(entry,), controller="attache.dev/gateway")
    route = WantedStatus(kind="HTTPRoute", key="default/app", generation=1, conditions=(), lists=(parents,))
    digests = {"httproute.default.app.json": "new"}
    use = [ConfigConsumer("extproc", ConfigReport(files=digests)), ConfigConsumer("Envoy", None)]
    assert shown(add_programmed_condition(route, {}, digests, use)) == ["Unknown Envoy does not answer"]
    assert shown(add_programmed_condition(route, {}, digests, use[:1])) == ["True in use by extproc"]

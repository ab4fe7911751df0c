# SPDX-License-Identifier: Apache-2.0
"""Gateways: classes, addresses, listeners, and what they say of themselves."""

from __future__ import annotations

from typing import Any

import pytest

from controller.gateway.compile.gateway_api.gateways import GatewayApiSettings, parse_addresses
from controller.gateway.compile.referenced_secrets import ReferencedObjectKey
from tests.controller.gateway.compile.gateway_api.outcomes import (
    addresses,
    attached,
    compiled,
    conditions,
    gateway_says,
    listener_says,
    listeners_of,
    served,
    snapshot,
    status,
)
from tests.gateway_objects import (
    GROUP,
    authorities,
    certificate,
    endpoint_slice,
    gateway,
    gateway_class,
    grant,
    http_route,
    https,
    listener,
    make,
    service,
    tls_secret,
)
from tests.kube_objects import resource, route, server

DEFINITION = "gatewayclasses.gateway.networking.k8s.io"
TWO = GatewayApiSettings(bind=("10.0.0.1", "10.0.0.2"))
GOOD = {
    "Accepted": ("True", "Accepted"),
    "Programmed": ("True", "Programmed"),
    "ResolvedRefs": ("True", "ResolvedRefs"),
}
HTTP_ROUTE = {"group": "gateway.networking.k8s.io", "kind": "HTTPRoute"}


def test_a_gateway_of_our_class_listens_and_says_where() -> None:
    outcome = compiled(gateway("web", listener("http", 80, hostname="*.example.org")))
    (found,) = snapshot(outcome).gateway.listeners
    assert (found.name, found.address, found.hostname) == ("default/web/http", "10.0.0.1:80", "*.example.org")
    assert gateway_says(outcome) == GOOD
    assert status(outcome, "Gateway", "web").fields == {"addresses": [{"type": "IPAddress", "value": "10.0.0.1"}]}
    assert listener_says(outcome, "http") == {**GOOD, "Conflicted": ("False", "NoConflicts")}
    assert HTTP_ROUTE in listeners_of(outcome)["http"].fields["supportedKinds"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hostname": "[::1]:8000"}, "is no host name"),
        ({"hostname": "a b"}, "is no host name"),
        ({"port": 0}, "address"),
        ({"name": "UP"}, "is no name of a listener"),
    ],
)
def test_a_listener_that_no_reader_takes_is_refused_alone(fields: dict[str, Any], said: str) -> None:
    outcome = compiled(gateway("web", {**listener("odd", 81), **fields}, listener("good", 80)))
    assert list(addresses(outcome)) == ["default/web/good"]
    refused = listeners_of(outcome)[fields.get("name", "odd")]
    (accepted,) = (one for one in refused.conditions if one.type == "Accepted")
    assert (accepted.status, accepted.reason) == ("False", "UnsupportedValue")
    assert said in accepted.message


@pytest.mark.parametrize("spec", ["text", ["a"], {"endpointPickerRef": "x"}, {"selector": 3, "targetPorts": "8000"}])
@pytest.mark.parametrize("kind", ["InferencePool", "ModelAccessPolicy", "ModelRoute", "ModelServer", "HTTPRoute"])
def test_an_object_of_another_shape_changes_nothing_of_the_others(kind: str, spec: Any) -> None:  # noqa: ANN401 - of any shape
    groups = {"InferencePool": "inference.networking.k8s.io/v1", "HTTPRoute": f"{GROUP}/v1"}
    odd = make(groups.get(kind, "attache.dev/v1alpha1"), kind, "odd", namespace="other", spec=spec)
    alone, beside = compiled(gateway("web")), compiled(gateway("web"), odd)
    assert addresses(beside) == addresses(alone)
    assert snapshot(beside).gateway.listeners == snapshot(alone).gateway.listeners


def test_another_controllers_gateway_is_none_of_ours() -> None:
    outcome = compiled(gateway_class("attache", "example.com/other"), gateway())
    assert snapshot(outcome).gateway.listeners == ()
    assert ("Gateway", "default/web") not in outcome.statuses
    assert ("GatewayClass", "attache") not in outcome.statuses


def test_a_class_of_ours_is_accepted_and_lists_features_in_order() -> None:
    found = status(compiled(), "GatewayClass", "attache", "")
    assert conditions(found.conditions) == {"Accepted": ("True", "Accepted")}
    names = [one["name"] for one in found.fields["supportedFeatures"]]
    assert names == sorted(names)
    assert {"Gateway", "HTTPRoute", "ReferenceGrant"} <= set(names)


@pytest.mark.parametrize(
    ("release", "expected"),
    [("v1.6.3", "True"), ("v1.1.0", "True"), ("v1.0.0", "False"), ("v2.1.0", "False"), ("", "False")],
)
def test_a_class_says_whether_the_installed_release_is_known(release: str, expected: str) -> None:
    definition = make("apiextensions.k8s.io/v1", "CustomResourceDefinition", DEFINITION, namespace="")
    definition["metadata"]["annotations"] = {"gateway.networking.k8s.io/bundle-version": release}
    found = conditions(status(compiled(definition), "GatewayClass", "attache", "").conditions)
    assert found["SupportedVersion"][0] == expected
    assert found["Accepted"][0] == "True"


def test_a_role_may_serve_one_gateway_alone() -> None:
    settings = GatewayApiSettings(gateway="default/web", bind=("10.0.0.1",))
    outcome = compiled(gateway("web"), gateway("other"), settings=settings)
    assert list(addresses(outcome)) == ["default/web/http"]
    assert ("Gateway", "default/other") not in outcome.statuses


def test_each_gateway_has_an_address_of_its_own_while_there_are_enough() -> None:
    outcome = compiled(gateway("a", created="2026-02-01T00:00:00Z"), gateway("b"), settings=TWO)
    assert addresses(outcome) == {"default/b/http": "10.0.0.1:80", "default/a/http": "10.0.0.2:80"}


def test_a_gateway_keeps_the_address_in_its_status() -> None:
    old = gateway("old", created="2025-01-01T00:00:00Z")
    outcome = compiled(old, gateway("web", has=("10.0.0.1",)), settings=TWO)
    assert addresses(outcome) == {"default/old/http": "10.0.0.2:80", "default/web/http": "10.0.0.1:80"}


def test_a_gateway_gets_the_address_that_it_asks_for() -> None:
    asking = gateway("asks", created="2026-02-01T00:00:00Z", addresses=[{"value": "10.0.0.1"}])
    outcome = compiled(gateway("web", has=("10.0.0.1",)), asking, settings=TWO)
    assert addresses(outcome) == {"default/web/http": "10.0.0.2:80", "default/asks/http": "10.0.0.1:80"}


def test_addresses_that_cannot_be_had_are_refused() -> None:
    outcome = compiled(gateway(addresses=[{"type": "IPAddress", "value": "10.9.9.9"}]))
    assert gateway_says(outcome)["Accepted"] == ("True", "Accepted")
    assert gateway_says(outcome)["Programmed"] == ("False", "AddressNotUsable")
    assert snapshot(outcome).gateway.listeners == ()
    odd = compiled(gateway(addresses=[{"type": "test/odd", "value": "x"}]))
    assert gateway_says(odd)["Accepted"] == ("False", "UnsupportedAddress")
    # an address of which only the type is given is any address
    assert gateway_says(compiled(gateway(addresses=[{"type": "IPAddress"}]))) == GOOD


def test_gateways_that_share_an_address_share_ports_by_host_and_the_older_wins() -> None:
    first = gateway("first", listener("http", 80, hostname="a.example.org"), listener("tls", 8443))
    second = gateway(
        "second",
        listener("same", 80, hostname="A.example.org"),
        listener("other", 80, hostname="b.example.org"),
        https("odd", 8443, "cert"),
        created="2026-02-01T00:00:00Z",
    )
    outcome = compiled(second, first, tls_secret())
    assert set(addresses(outcome)) == {"default/first/http", "default/first/tls", "default/second/other"}
    assert listener_says(outcome, "same", "second")["Conflicted"] == ("True", "HostnameConflict")
    assert listener_says(outcome, "same", "second")["Accepted"] == ("False", "HostnameConflict")
    assert listener_says(outcome, "odd", "second")["Conflicted"] == ("True", "ProtocolConflict")
    assert gateway_says(outcome, "second")["Accepted"] == ("True", "ListenersNotValid")
    assert gateway_says(outcome, "second")["Programmed"] == ("True", "Programmed")


def test_no_gateway_has_the_port_of_steps_and_their_routes_need_no_gateway() -> None:
    config = resource("GatewayConfig", "gateway", {"steps": "0.0.0.0:9012"})
    predictor = route("predictor", "llama")
    predictor["spec"]["callers"] = "Steps"
    web = gateway("web", listener("own", 9012), listener("http"))
    outcome = compiled(config, web, server(), predictor, config="default/gateway")
    assert list(addresses(outcome)) == ["default/web/http"]
    assert listener_says(outcome, "own")["Accepted"] == ("False", "ProtocolConflict")
    assert snapshot(outcome).gateway.steps == "0.0.0.0:9012"
    (found,) = snapshot(outcome).routes
    assert (found.spec.callers, found.spec.parent_refs) == ("Steps", ())


def test_of_conflicting_listeners_of_one_gateway_none_is_served() -> None:
    outcome = compiled(gateway("web", listener("a"), listener("b"), listener("c", 8080)))
    assert list(addresses(outcome)) == ["default/web/c"]
    assert listener_says(outcome, "a")["Conflicted"] == ("True", "HostnameConflict")
    assert listener_says(outcome, "b")["Conflicted"] == ("True", "HostnameConflict")


@pytest.mark.parametrize(
    ("advertise", "expected"),
    [
        ("203.0.113.7", [{"type": "IPAddress", "value": "203.0.113.7"}]),
        ("web.example.org", [{"type": "Hostname", "value": "web.example.org"}]),
        ("service/default/lb", [{"type": "IPAddress", "value": "203.0.113.9"}]),
    ],
)
def test_what_is_advertised_is_in_the_status(advertise: str, expected: list[dict[str, str]]) -> None:
    balancer = {**service("lb"), "status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.9"}]}}}
    outcome = compiled(gateway(), balancer, settings=GatewayApiSettings(advertise=advertise, port_offset=8000))
    assert status(outcome, "Gateway", "web").fields["addresses"] == expected
    assert addresses(outcome) == {"default/web/http": "0.0.0.0:8080"}
    assert [one.public_port for one in snapshot(outcome).gateway.listeners] == [80]


def test_without_an_address_to_publish_a_gateway_is_not_programmed() -> None:
    outcome = compiled(gateway(), settings=GatewayApiSettings(advertise="service/default/lb"))
    assert gateway_says(outcome)["Programmed"] == ("False", "AddressNotAssigned")


def test_a_listener_of_another_protocol_is_not_accepted() -> None:
    only = compiled(gateway("web", listener("tcp", 1111, "TCP")))
    assert gateway_says(only)["Accepted"] == ("False", "ListenersNotValid")
    assert gateway_says(only)["Programmed"] == ("False", "Invalid")
    assert listener_says(only, "tcp")["Accepted"] == ("False", "UnsupportedProtocol")
    assert listeners_of(only)["tcp"].fields["supportedKinds"] == []
    both = compiled(gateway("web", listener("http"), listener("tcp", 1111, "TCP")))
    assert gateway_says(both)["Accepted"] == ("True", "ListenersNotValid")
    assert list(addresses(both)) == ["default/web/http"]


def test_kinds_of_routes_that_nobody_knows_are_named_and_left_out() -> None:
    kinds = {"kinds": [{"kind": "TLSRoute"}]}
    outcome = compiled(gateway("web", listener("http", allowedRoutes=kinds)))
    assert listener_says(outcome, "http")["ResolvedRefs"] == ("False", "InvalidRouteKinds")
    assert listeners_of(outcome)["http"].fields["supportedKinds"] == []
    both = compiled(gateway("web", listener("http", allowedRoutes={"kinds": [{"kind": "X"}, {"kind": "HTTPRoute"}]})))
    assert listener_says(both, "http")["ResolvedRefs"] == ("False", "InvalidRouteKinds")
    assert listeners_of(both)["http"].fields["supportedKinds"] == [HTTP_ROUTE]
    assert list(addresses(both)) == ["default/web/http"]


def test_certificates_are_files_that_the_listener_names() -> None:
    outcome = compiled(gateway("web", https("https", 443, "cert")), tls_secret())
    (found,) = snapshot(outcome).gateway.listeners
    assert found.tls is not None
    (pair,) = found.tls.certificates
    crt, key = certificate()
    assert outcome.files[pair.cert_file] == crt
    assert outcome.files[pair.key_file] == key
    assert ReferencedObjectKey("Secret", "default/cert") in outcome.pointers
    # whoever writes a Secret must not be able to write a document
    assert not pair.cert_file.endswith((".json", ".yaml", ".yml"))


def test_files_come_before_what_names_them() -> None:
    things = gateway("web", https("https", 443, "cert")), tls_secret(), http_route(), service(), endpoint_slice("app")
    order = [name.split(".")[0] for name in compiled(*things).files]
    assert order == ["secret", "secret", "gateway", "backend", "httproute"]


@pytest.mark.parametrize(
    ("secret", "said"),
    [
        (None, "there is no Secret default/cert"),
        (tls_secret(crt=b"nonsense"), "tls.crt is not a certificate"),
        (tls_secret(key=b""), "it has no tls.key"),
        (tls_secret(key=certificate("other.org")[1]), "tls.key is not the key of tls.crt"),
    ],
)
def test_a_certificate_that_cannot_be_used_concerns_its_listener_alone(
    secret: dict[str, object] | None, said: str
) -> None:
    both = gateway("web", https("https", 443, "cert"), listener())
    outcome = compiled(both, *([] if secret is None else [secret]), http_route(parents=({"name": "web"},)))
    assert list(addresses(outcome)) == ["default/web/http"]
    assert listener_says(outcome, "https")["ResolvedRefs"] == ("False", "InvalidCertificateRef")
    assert listener_says(outcome, "https")["Programmed"] == ("False", "Invalid")
    assert listener_says(outcome, "https")["Accepted"] == ("True", "Accepted")
    (message,) = (one.message for one in listeners_of(outcome)["https"].conditions if one.type == "ResolvedRefs")
    assert said in message
    (of_all,) = (one.message for one in status(outcome, "Gateway", "web").conditions if one.type == "ResolvedRefs")
    assert of_all == f"listener https: {message}"
    # routes attach, and are served where they can be
    assert attached(outcome) == {"https": 1, "http": 1}
    assert served(outcome) == {"default/app": ["default/web/http"]}


def test_a_secret_of_another_namespace_needs_a_grant() -> None:
    there = https("https", 443)
    there["tls"]["certificateRefs"] = [{"name": "cert", "namespace": "blue"}]
    secret = tls_secret(namespace="blue")
    refused = compiled(gateway("web", there), secret)
    assert listener_says(refused, "https")["ResolvedRefs"] == ("False", "RefNotPermitted")
    assert ReferencedObjectKey("Secret", "blue/cert") not in refused.pointers
    source = ("default", "gateway.networking.k8s.io", "Gateway")
    for name, allowed in (("", True), ("cert", True), ("other", False)):
        outcome = compiled(gateway("web", there), secret, grant(source, ("", "Secret"), namespace="blue", name=name))
        assert ("default/web/https" in addresses(outcome)) == allowed
    elsewhere = grant(("red", *source[1:]), ("", "Secret"), namespace="blue")
    assert addresses(compiled(gateway("web", there), secret, elsewhere)) == {}


def frontend(*references: dict[str, object], mode: str = "AllowValidOnly") -> dict[str, object]:
    return {"frontend": {"default": {"validation": {"caCertificateRefs": list(references), "mode": mode}}}}


CA = {"group": "", "kind": "ConfigMap", "name": "ca"}


def test_clients_show_certificates_where_the_gateway_asks_for_them() -> None:
    per_port = {"port": 8443, "tls": {}}
    tls = {"frontend": {**frontend(CA)["frontend"], "perPort": [per_port]}}  # type: ignore[dict-item]
    web = gateway("web", https("a", 443, "cert"), https("b", 8443, "cert"), listener("c"), tls=tls)
    outcome = compiled(web, tls_secret(), authorities())
    found = {one.name: one.tls for one in snapshot(outcome).gateway.listeners}
    asking = found["default/web/a"]
    assert asking is not None
    assert asking.client_certificates is not None
    assert outcome.files[asking.client_certificates.ca_file] == certificate()[0]
    other = found["default/web/b"]
    assert other is not None
    assert other.client_certificates is None
    assert found["default/web/c"] is None


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        (CA, "InvalidCACertificateRef"),
        ({**CA, "kind": "Service"}, "InvalidCACertificateKind"),
        ({**CA, "namespace": "blue"}, "RefNotPermitted"),
    ],
)
def test_without_authorities_no_client_could_connect(reference: dict[str, object], reason: str) -> None:
    web = gateway("web", https("https", 443, "cert"), listener("http"), tls=frontend(reference))
    outcome = compiled(web, tls_secret())
    assert listener_says(outcome, "https")["Accepted"] == ("False", "NoValidCACertificate")
    assert listener_says(outcome, "https")["ResolvedRefs"] == ("False", reason)
    assert listener_says(outcome, "https")["Programmed"][0] == "False"
    assert listener_says(outcome, "http")["Programmed"][0] == "True"


def test_a_mode_that_lets_others_in_is_refused() -> None:
    web = gateway("web", https("https", 443, "cert"), tls=frontend(CA, mode="AllowInsecureFallback"))
    assert listener_says(compiled(web, tls_secret(), authorities()), "https")["Accepted"] == (
        "False",
        "UnsupportedValue",
    )


def config(name: str = "main", **spec: object) -> dict[str, object]:
    return resource("GatewayConfig", name, dict(spec))


def parameters(name: str = "main", kind: str = "GatewayConfig") -> dict[str, object]:
    return {"parametersRef": {"group": "attache.dev", "kind": kind, "name": name}}


def test_a_gateways_parameters_are_a_gateway_config() -> None:
    outcome = compiled(gateway(infrastructure=parameters()), config(failureMode="Close"))
    assert snapshot(outcome).gateway.failure_mode == "Close"
    assert list(addresses(outcome)) == ["default/web/http"]
    assert conditions(status(outcome, "GatewayConfig", "main").conditions)["Programmed"][0] == "True"


SPIFFE = {"clientCertificates": [{"name": "workloads", "field": "URI", "pattern": "spiffe://a/{tenant}"}]}


def test_callers_can_be_identified_by_certificates_where_the_gateway_asks_for_them() -> None:
    things = config(authentication=SPIFFE), tls_secret(), authorities()
    asks = gateway("web", https("https", 443, "cert"), listener("http"), tls=frontend(CA), infrastructure=parameters())
    outcome = compiled(asks, *things)
    assert not outcome.refused
    authentication = snapshot(outcome).gateway.authentication
    assert authentication is not None
    assert [one.name for one in authentication.client_certificates] == ["workloads"]
    # nobody could be identified by the plain one
    assert list(addresses(outcome)) == ["default/web/https"]
    assert listener_says(outcome, "http")["Programmed"] == ("False", "Invalid")
    said = next(one.message for one in listeners_of(outcome)["http"].conditions if one.type == "Programmed")
    assert "this listener asks for none" in said
    assert conditions(status(outcome, "GatewayConfig", "main").conditions)["Programmed"][0] == "True"


def test_without_a_listener_that_asks_for_certificates_nothing_is_changed() -> None:
    plain = gateway("web", listener("http"), infrastructure=parameters())
    outcome = compiled(plain, config(authentication=SPIFFE))
    assert "asks for no client certificate" in outcome.refused
    assert gateway_says(outcome)["Programmed"] == ("False", "Invalid")
    alone = compiled(config(authentication=SPIFFE), config="default/main")
    assert "asks for no client certificate" in alone.refused


def test_a_class_has_parameters_for_its_gateways() -> None:
    reference = {**parameters()["parametersRef"], "namespace": "default"}  # type: ignore[dict-item]
    outcome = compiled(gateway_class(parametersRef=reference), gateway(namespace="blue"), config(failureMode="Close"))
    assert snapshot(outcome).gateway.failure_mode == "Close"
    gone = compiled(gateway_class(parametersRef=reference), gateway(namespace="blue"))
    assert conditions(status(gone, "GatewayClass", "attache", "").conditions)["Accepted"] == (
        "False",
        "InvalidParameters",
    )
    assert gateway_says(gone, namespace="blue")["Accepted"] == ("False", "InvalidParameters")


@pytest.mark.parametrize("reference", [parameters("gone"), parameters("broken"), parameters(kind="Other")])
def test_a_gateway_whose_parameters_cannot_be_had_serves_nothing(reference: dict[str, object]) -> None:
    outcome = compiled(gateway(infrastructure=reference), config("broken", failureMode="Ajar"), http_route())
    assert gateway_says(outcome)["Accepted"] == ("False", "InvalidParameters")
    assert gateway_says(outcome)["Programmed"] == ("False", "Invalid")
    assert snapshot(outcome).gateway.listeners == ()
    assert served(outcome) == {}


def test_of_gateways_with_different_parameters_the_oldest_decides() -> None:
    young = gateway("young", created="2026-03-01T00:00:00Z", infrastructure=parameters("other"))
    outcome = compiled(
        young,
        gateway("old", infrastructure=parameters()),
        gateway("plain", created="2026-04-01T00:00:00Z"),
        config(failureMode="Close"),
        config("other", failureMode="Open"),
        settings=GatewayApiSettings(bind=("10.0.0.1", "10.0.0.2", "10.0.0.3")),
    )
    assert snapshot(outcome).gateway.failure_mode == "Close"
    assert gateway_says(outcome, "young")["Accepted"] == ("False", "InvalidParameters")
    assert set(addresses(outcome)) == {"default/old/http", "default/plain/http"}
    assert conditions(status(outcome, "GatewayConfig", "other").conditions)["Programmed"] == ("False", "Conflict")


def test_a_gateway_of_another_shape_is_left_out() -> None:
    strange = make("gateway.networking.k8s.io/v1", "Gateway", "strange", spec={"listeners": "many"})
    twice = gateway("twice", listener("http", 8000), listener("http", 8001))
    assert list(addresses(compiled(strange, twice, gateway()))) == ["default/web/http"]


def test_listeners_beyond_what_one_envoy_gets_are_not_programmed() -> None:
    many = [listener(f"l{number}", 8000 + number) for number in range(64)]
    gateways = [gateway(f"g{number}", *many, created=f"2026-0{number + 1}-01T00:00:00Z") for number in range(5)]
    settings = GatewayApiSettings(bind=parse_addresses("10.0.0.0/29"))
    outcome = compiled(*gateways, settings=settings)
    assert len(snapshot(outcome).gateway.listeners) == 256
    assert gateway_says(outcome, "g4")["Programmed"] == ("False", "NoResources")


@pytest.mark.parametrize("text", ["", "localhost", "10.0.0.0/8", "10.0.0.1,x"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write"):
        parse_addresses(text)


def test_addresses_are_listed_or_a_range() -> None:
    assert parse_addresses("10.0.0.2, 10.0.0.1") == ("10.0.0.2", "10.0.0.1")
    assert parse_addresses("127.0.2.0/30") == ("127.0.2.1", "127.0.2.2")

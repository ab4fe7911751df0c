# SPDX-License-Identifier: Apache-2.0
"""A ModelServer's references to certificates and keys become files; what cannot be had is never left out silently."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from controller.gateway.compile.compiler import CompileResult, file_name
from controller.gateway.compile.referenced_secrets import ReferencedObjectKey, referenced_file
from extproc.api.config_loader import load_snapshot
from extproc.api.engine_connection import EngineConnection
from tests.controller.gateway.compile.gateway_api.outcomes import compiled, snapshot, status
from tests.gateway_objects import (
    Object,
    authorities,
    backend_ref,
    certificate,
    gateway,
    http_route,
    make,
    pool,
    service,
    tls_secret,
)
from tests.kube_objects import pod, resource, route, secret, server

CONNECTION: dict[str, Any] = {
    "tls": {
        "serverName": "engines.example.com",
        "caCertificateRef": {"name": "ca"},
        "clientCertificateRef": {"name": "cert"},
    },
    "apiKeyRef": {"name": "keys"},
}
KEY = "sk-of-the-engines"
KEYS = secret("keys", {"api-key": f"{KEY}\n", "other": "two\nlines", "binary": "é", "empty": " \n"})
ALL = authorities(), tls_secret(), KEYS


def served(outcome: CompileResult) -> tuple[EngineConnection, list[str]]:
    (found,) = snapshot(outcome).servers
    return found.spec.connection, [one.address for one in found.spec.endpoints]


def says(outcome: CompileResult, type_: str) -> tuple[str, str, str]:
    (found,) = (one for one in status(outcome, "ModelServer", "llama").conditions if one.type == type_)
    return found.status, found.reason, found.message


def secret_files(outcome: CompileResult) -> set[str]:
    return {name for name in outcome.files if name.startswith(("secret.", "configmap."))}


def test_references_become_files_that_the_document_names() -> None:
    outcome = compiled(server(connection=CONNECTION), route(), pod("a"), *ALL)
    connection, addresses = served(outcome)
    assert addresses == ["10.0.0.1:8000"]
    crt, key = certificate()
    tls = connection.tls
    assert tls is not None
    assert tls.client_certificate is not None
    assert connection.api_key_file is not None
    assert outcome.files[tls.ca_file or ""] == crt
    assert outcome.files[tls.client_certificate.cert_file] == crt
    assert outcome.files[tls.client_certificate.key_file] == key
    assert outcome.files[connection.api_key_file].decode().strip() == KEY
    assert (tls.server_name, tls.insecure_skip_verify) == ("engines.example.com", False)
    said = "connection uses the ConfigMap 'ca', the Secret 'cert', the Secret 'keys'"
    assert says(outcome, "ResolvedRefs") == ("True", "ResolvedRefs", said)
    assert says(outcome, "Available")[0] == "True"


def test_files_come_before_the_document_that_names_them() -> None:
    outcome = compiled(server(connection=CONNECTION), pod("a"), *ALL)
    names = list(outcome.files)
    assert max(map(names.index, secret_files(outcome))) < names.index(file_name("ModelServer", "default/llama"))


def test_what_is_referred_to_is_read_from_the_servers_own_namespace() -> None:
    outcome = compiled(server(namespace="blue", connection=CONNECTION), *ALL)
    own = {
        ReferencedObjectKey("ConfigMap", "blue/ca"),
        ReferencedObjectKey("Secret", "blue/cert"),
        ReferencedObjectKey("Secret", "blue/keys"),
    }
    assert own <= outcome.pointers
    assert not {one.key for one in outcome.pointers} & {"default/ca", "default/cert", "default/keys"}
    assert secret_files(outcome) == set()


def test_authorities_may_be_in_a_secret_under_any_key() -> None:
    text = certificate()[0].decode()
    tls = {"serverName": "a.b", "caCertificateRef": {"kind": "Secret", "name": "ca", "key": "Root_1.pem"}}
    outcome = compiled(server(connection={"tls": tls}), secret("ca", {"Root_1.pem": text, "ca.crt": "x"}))
    connection, _ = served(outcome)
    assert connection.tls is not None
    assert outcome.files[connection.tls.ca_file or ""].decode() == text
    assert len(secret_files(outcome)) == 1


BAD_CA = {**CONNECTION, "tls": {**CONNECTION["tls"], "caCertificateRef": {"name": "ca", "key": "root.crt"}}}


@pytest.mark.parametrize(
    ("connection", "things", "reason", "said"),
    [
        (CONNECTION, ALL[1:], "InvalidCACertificateRef", "there is no ConfigMap default/ca that this role may read"),
        (CONNECTION, (authorities(text="x"), *ALL[1:]), "InvalidCACertificateRef", "ca.crt has no certificate in PEM"),
        (BAD_CA, ALL, "InvalidCACertificateRef", "it has no root.crt"),
        (CONNECTION, (ALL[0], ALL[2]), "InvalidCertificateRef", "there is no Secret default/cert"),
        (
            CONNECTION,
            (ALL[0], tls_secret(key=certificate("another")[1]), ALL[2]),
            "InvalidCertificateRef",
            "tls.key is not the key of tls.crt",
        ),
        (CONNECTION, ALL[:2], "InvalidApiKeyRef", "there is no Secret default/keys"),
        *(
            ({"apiKeyRef": {"name": "keys", "key": key}}, ALL, "InvalidApiKeyRef", said)
            for key, said in {
                "none": "it has no none",
                "other": "other is no key that a header can carry",
                "binary": "binary is no key that a header can carry",
                "empty": "empty is no key that a header can carry",
            }.items()
        ),
    ],
)
def test_without_what_it_refers_to_a_server_has_no_endpoints_and_says_why(
    connection: dict[str, object], things: tuple[Object, ...], reason: str, said: str
) -> None:
    """Its requests are answered 503: neither a request nor a key goes to an engine that was not checked."""
    outcome = compiled(server(connection=connection), route(), pod("a"), *things)
    assert served(outcome) == (EngineConnection(), [])
    assert secret_files(outcome) == set()
    assert len(snapshot(outcome).routes) == 1
    status_, reason_, message = says(outcome, "ResolvedRefs")
    assert (status_, reason_) == ("False", reason)
    assert said in message
    assert says(outcome, "Accepted")[0] == "True"
    assert says(outcome, "Programmed")[:2] == ("False", "Invalid")
    assert says(outcome, "Available")[:2] == ("False", "ConnectionNotUsable")
    assert KEY not in str(outcome.statuses)


def test_every_reference_that_is_missing_is_said() -> None:
    message = says(compiled(server(connection=CONNECTION)), "ResolvedRefs")[2]
    assert all(one in message for one in ("ConfigMap default/ca", "Secret default/cert", "Secret default/keys"))


def test_one_server_without_its_certificates_concerns_no_other() -> None:
    outcome = compiled(server(connection=CONNECTION), server("fine"), pod("a"))
    endpoints = {one.metadata.name: len(one.spec.endpoints) for one in snapshot(outcome).servers}
    assert endpoints == {"fine": 1, "llama": 0}


def test_a_pools_annotation_may_refer_to_secrets_of_its_namespace() -> None:
    thing = pool("llama")
    thing["metadata"]["annotations"] = {"attache.dev/model-server": "connection: {apiKeyRef: {name: keys}}"}
    backend = backend_ref("llama", None, group="inference.networking.k8s.io", kind="InferencePool")
    things = thing, service("picker", 9002), gateway(), http_route("app", backend), pod("a")
    connection, addresses = served(compiled(*things, KEYS))
    assert connection.api_key_file == referenced_file(ReferencedObjectKey("Secret", "default/keys"), "api-key")
    assert len(addresses) == 1
    without = compiled(*things)
    assert served(without) == (EngineConnection(), [])
    (parent,) = status(without, "InferencePool", "llama").lists[0].entries
    (accepted,) = (one for one in parent.conditions if one.type == "Accepted")
    assert (accepted.status, accepted.reason) == ("False", "NotSupportedByParent")
    assert "there is no Secret default/keys" in accepted.message


def test_long_names_fit_into_files_and_do_not_meet() -> None:
    """One long name would otherwise keep the whole directory from being written."""
    long, key = "n" * 253, "k" * 253
    data = {name: base64.b64encode(KEY.encode()).decode() for name in (key, f"{key[:-1]}x")}
    thing = make("v1", "Secret", long, data=data, type="Opaque")
    things = (
        server(name, connection={"apiKeyRef": {"name": long, "key": one}}) for name, one in zip("ab", data, strict=True)
    )
    outcome = compiled(*things, server(long), route(long), thing)
    assert max(map(len, outcome.files)) <= 240
    assert len(secret_files(outcome)) == 2
    assert len(load_snapshot({one: text for one, text in outcome.files.items() if one.endswith(".json")}).servers) == 3


PROVIDER: dict[str, Any] = {"host": "api.example.com"}


def provider(**connection: object) -> Object:
    return resource(
        "ModelServer", "llama", {"model": "m", "provider": PROVIDER, "apis": ["Messages"], "connection": connection}
    )


def test_a_providers_key_comes_from_a_secret() -> None:
    outcome = compiled(provider(apiKeyRef={"name": "keys"}), route(), *ALL)
    (found,) = snapshot(outcome).servers
    assert found.spec.provider is not None
    assert [one.address for one in found.spec.endpoints] == ["api.example.com:443"]
    assert outcome.files[found.spec.connection.api_key_file or ""].decode().strip() == KEY
    assert says(outcome, "Available") == (
        "True",
        "Available",
        "new requests go to the provider at api.example.com:443",
    )


def test_without_its_secret_a_provider_gets_nothing() -> None:
    outcome = compiled(provider(apiKeyRef={"name": "keys"}), route())
    (found,) = snapshot(outcome).servers
    assert (found.spec.provider, found.spec.endpoints) == (None, ())
    assert says(outcome, "Available")[:2] == ("False", "ConnectionNotUsable")


def test_a_providers_key_is_no_file_of_the_gateway() -> None:
    outcome = compiled(provider(apiKeyFile="/etc/passwd"), route())
    assert says(outcome, "Accepted")[0] == "False"


AWS_FILE = "[default]\naws_access_key_id = AKIDEXAMPLE\naws_secret_access_key = wJalr+K7MDENG/bPxRfi=\n"
SIGNS = {"host": "api.example.com", "auth": {"type": "AWS", "region": "us-east-1"}}


def signing(text: str, **connection: object) -> CompileResult:
    spec = {"model": "m", "provider": SIGNS, "apis": ["Messages"], "connection": connection}
    return compiled(resource("ModelServer", "llama", spec), route(), secret("aws", {"api-key": text}))


def test_what_requests_to_aws_are_signed_with_comes_from_a_secret() -> None:
    outcome = signing(AWS_FILE, apiKeyRef={"name": "aws"})
    (found,) = snapshot(outcome).servers
    assert found.spec.provider is not None
    assert outcome.files[found.spec.connection.api_key_file or ""].decode() == AWS_FILE


@pytest.mark.parametrize(
    "text", ["sk-a-key", "[default]\naws_access_key_id = A\n", AWS_FILE.replace("default", "other")]
)
def test_another_secret_signs_nothing(text: str) -> None:
    outcome = signing(text, apiKeyRef={"name": "aws"})
    (found,) = snapshot(outcome).servers
    assert found.spec.provider is None
    message = says(outcome, "ResolvedRefs")[2]
    assert "api-key is no credentials file of AWS; write one of up to 4096 bytes, with [default]," in message
    assert "sk-a-key" not in message


def test_nothing_is_signed_as_the_gateways_own_pod() -> None:
    message = says(signing(AWS_FILE), "Accepted")
    assert message[0] == "False"
    assert "would sign as the gateway's own pod" in message[2]

# SPDX-License-Identifier: Apache-2.0
"""Checks of connections to engines beyond their shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from extproc.api.validation import is_hostname, parse_endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.api.errors import Finding, Path
    from extproc.api.model_server import ModelServerSpec

_NO_NAME: Final = "nothing says which name the engines' certificates have; write serverName"


def check_connection(spec: ModelServerSpec) -> Iterator[Finding]:
    """A certificate can be checked, and there is one key."""
    connection = spec.connection
    path: Path = ("spec", "connection")
    keys = connection.api_key_file, connection.api_key_env, connection.api_key_ref
    if sum(one is not None for one in keys) > 1:
        yield path, "write apiKeyFile or apiKeyEnv, not both; or in a cluster apiKeyRef alone"
    tls = connection.tls
    if tls is None:
        return
    authorities = tls.ca_file, tls.ca_certificate_ref
    if sum(one is not None for one in authorities) + tls.insecure_skip_verify != 1:
        said = "write caFile, or insecureSkipVerify: true to accept any certificate; in a cluster caCertificateRef"
        yield (*path, "tls"), f"{said} in place of caFile"
    if tls.client_certificate is not None and tls.client_certificate_ref is not None:
        yield (*path, "tls"), "write clientCertificate, or in a cluster clientCertificateRef, not both"
    names = [((*path, "tls", "serverName"), tls.server_name)]
    names += [(("spec", "endpoints", index, "serverName"), one.server_name) for index, one in enumerate(spec.endpoints)]
    for where, name in names:
        if name is not None and not is_hostname(name):
            yield where, f"'{name}' is no host name; write a name that the certificate has"
    if not tls.insecure_skip_verify and tls.server_name is None:
        yield from _check_names(spec)


def check_no_references(spec: ModelServerSpec) -> Iterator[Finding]:
    """For directories: the gateway role of a cluster puts files in the place of references."""
    connection = spec.connection
    path: Path = ("spec", "connection")
    said = "is in an object of a cluster, which a directory has none of"
    if connection.api_key_ref is not None:
        yield (*path, "apiKeyRef"), f"{said}; write apiKeyFile or apiKeyEnv, or apply it to a cluster"
    if connection.tls is None:
        return
    if connection.tls.ca_certificate_ref is not None:
        yield (*path, "tls", "caCertificateRef"), f"{said}; write caFile, or apply it to a cluster"
    if connection.tls.client_certificate_ref is not None:
        yield (*path, "tls", "clientCertificateRef"), f"{said}; write clientCertificate, or apply it to a cluster"


def _check_names(spec: ModelServerSpec) -> Iterator[Finding]:
    if spec.workload_selector is not None:
        yield ("spec", "connection", "tls"), _NO_NAME
    for index, one in enumerate(spec.endpoints):
        try:
            named = one.server_name is not None or not parse_endpoint(one.address).is_ip
        except ValueError:
            continue
        if not named:
            yield ("spec", "endpoints", index), f"{_NO_NAME} here or in connection.tls"

# SPDX-License-Identifier: Apache-2.0
"""Checks of connections to engines beyond their shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from extproc.config.validation import is_hostname, parse_endpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from extproc.config.errors import Finding, Path
    from extproc.config.model_server import ModelServerSpec

_NO_NAME: Final = "nothing says which name the engines' certificates have; write serverName"


def check_connection(spec: ModelServerSpec) -> Iterator[Finding]:
    """A certificate can be checked, and there is one key."""
    connection = spec.connection
    path: Path = ("spec", "connection")
    if connection.api_key_file is not None and connection.api_key_env is not None:
        yield path, "write apiKeyFile or apiKeyEnv, not both"
    tls = connection.tls
    if tls is None:
        return
    if (tls.ca_file is None) != tls.insecure_skip_verify:
        yield (*path, "tls"), "write caFile, or insecureSkipVerify: true to accept any certificate"
    names = [((*path, "tls", "serverName"), tls.server_name)]
    names += [(("spec", "endpoints", index, "serverName"), one.server_name) for index, one in enumerate(spec.endpoints)]
    for where, name in names:
        if name is not None and not is_hostname(name):
            yield where, f"'{name}' is no host name; write a name that the certificate has"
    if not tls.insecure_skip_verify and tls.server_name is None:
        yield from _check_names(spec)


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

# SPDX-License-Identifier: Apache-2.0
"""Patterns of certificates' names as Lua reads them."""

from __future__ import annotations

import pytest

from controller.bundle.envoy.authentication import AUTHENTICATION_FILES, authentication_files, unused_files
from controller.bundle.envoy.client_certificates import lua_pattern
from extproc.api.authentication import Authentication, CertificateName


@pytest.mark.parametrize(
    ("field", "pattern", "expected"),
    [
        ("URI", "spiffe://a.b/{tenant}/{user}", "^spiffe%:%/%/a%.b%/([^/%c%z]+)%/([^/%c%z]+)$"),
        ("DNS", "{user}.{tenant}.Example", "^([^%.%c%z]+)%.([^%.%c%z]+)%.example$"),
        ("CommonName", "100%-{tenant}", "^100%%%-([^/@%c%z]+)$"),
        ("CommonName", "billing", "^billing$"),
    ],
)
def test_all_but_the_names_is_taken_literally(field: str, pattern: str, expected: str) -> None:
    tenant = None if "{tenant}" in pattern else "fixed"
    assert lua_pattern(CertificateName(name="a", field=field, pattern=pattern, tenant=tenant)) == expected  # type: ignore[arg-type]


def test_the_bundle_has_the_files_of_one_way_to_authenticate() -> None:
    named = CertificateName(name="a", field="URI", pattern='x"\\{tenant}')
    authentication = Authentication(client_certificates=(named,))
    files = authentication_files(authentication)
    assert set(files) == {"certificates.json"}
    assert unused_files(authentication) == set(AUTHENTICATION_FILES) - set(files)

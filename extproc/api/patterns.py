# SPDX-License-Identifier: Apache-2.0
"""Patterns of text fields, and what to write instead of what does not match."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

# ``\Z``, as ``$`` would also match before a line break at the end.
NAME: Final = r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?\Z"
NAMESPACE: Final = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z"
# With the namespace and name of its Gateway in front, if it is one's: ``default/web/https``.
LISTENER: Final = r"^[a-z0-9]([-a-z0-9./]{0,198}[a-z0-9])?\Z"
NO_CONTROL: Final = r"^[^\x00-\x1f\x7f]*\Z"
# What a client can send as a token of the header ``authorization``.
KEY: Final = r"^[\x21-\x7e]*\Z"
# Of a request for one of our own pages: written into its first line as it is.
HTTP_PATH: Final = r"^/[\x21-\x7e]*\Z"
# A key of a Secret's or a ConfigMap's data.
DATA_KEY: Final = r"^[-._a-zA-Z0-9]+\Z"
HEADER: Final = r"^[0-9A-Za-z-]+\Z"
# Of another's configuration, where an empty text means the default.
HEADER_OR_EMPTY: Final = r"^[0-9A-Za-z_-]*\Z"
ISOLATION: Final = r"^(Tenant|User|Shared|Header:[0-9A-Za-z!#$%&'*+.^`|~-]+)\Z"
# Claims of tokens; a dot goes into an object.
CLAIM: Final = r"^[^\x00-\x1f\x7f.]+(\.[^\x00-\x1f\x7f.]+)*\Z"
# A name, or the beginning or the end of names.
WILDCARD: Final = r"^(\*|[^*\x00-\x1f\x7f]+\*?|\*[^*\x00-\x1f\x7f]+)\Z"
HTTPS_URL: Final = (
    r"^https://([0-9A-Za-z]([-.0-9A-Za-z]*[0-9A-Za-z])?|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[!-\"$-~]*)?\Z"
)

ADVICE: Final[Mapping[str, str]] = MappingProxyType(
    {
        NAME: "is not a name; write lower-case letters, digits, '-' and '.' (at most 253)",
        NAMESPACE: "is not a namespace; write lower-case letters, digits and '-' (at most 63)",
        LISTENER: "is no name of a listener; write lower-case letters, digits, '-', '.' and '/' (at most 200)",
        NO_CONTROL: "has a control character, such as a line break; leave it out",
        KEY: "has a character that no client can send in a header; write ASCII letters, digits and signs, no spaces",
        HTTP_PATH: "is no path; write one that begins with '/' and has no spaces, such as /metrics",
        DATA_KEY: "is no key of a Secret's or ConfigMap's data; write letters, digits, '-', '_' and '.'",
        HEADER: "is no name of a header; write letters, digits and '-'",
        HEADER_OR_EMPTY: "is no name of a header; write letters, digits, '-' and '_'",
        ISOLATION: "is not a choice; write Tenant, User, Shared or Header:NAME",
        WILDCARD: "is no name; '*' stands at its beginning or at its end, and control characters nowhere",
        HTTPS_URL: "is no address of TLS; write https://HOST/PATH, without a user and without '#'",
        CLAIM: "is no claim; write a name, or names joined by single dots, such as realm.tenant",
    }
)

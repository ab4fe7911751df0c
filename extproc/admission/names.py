# SPDX-License-Identifier: Apache-2.0
"""Names in headers: read as text, and of bounded length."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

# Longer names are cut and end in a hash of the whole, so that two callers stay two: names are kept in memory and shown
# in metrics.
_MAX_CHARACTERS: Final = 128
_HASH_BYTES: Final = 16


def name_in(headers: Mapping[str, str], header: str) -> str:
    """The value of a header, shortened to a bounded length; empty if it is missing."""
    return shortened(headers.get(header.lower(), ""))


def verified_name_in(headers: Mapping[str, str], header: str) -> str:
    """A name that Envoy has written, as configuration spells it: Envoy writes UTF-8, and headers are read as
    Latin-1.
    """
    value = headers.get(header, "")
    if not value.isascii():
        try:
            value = value.encode("latin-1").decode()
        except UnicodeError:
            # a gateway that is trusted wrote something else; it stays as it was read
            return shortened(value)
    return shortened(value)


def shortened(name: str) -> str:
    """``name`` in at most 128 characters."""
    if len(name) <= _MAX_CHARACTERS:
        return name
    hashed = blake2b(name.encode(errors="surrogatepass"), digest_size=_HASH_BYTES).hexdigest()
    return f"{name[: _MAX_CHARACTERS - len(hashed) - 1]}~{hashed}"

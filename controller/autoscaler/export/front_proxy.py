# SPDX-License-Identifier: Apache-2.0
"""The API server that passes requests on to us: how it is known, and whom it speaks for.

It shows a client certificate of an authority that it names in a ConfigMap, and says the caller in headers. Without that
certificate the headers are worth nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.kube.authorizer import User

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIG_MAP: Final = ("kube-system", "extension-apiserver-authentication")
_NAMES = msgspec.json.Decoder(tuple[str, ...])


class FrontProxy(msgspec.Struct, frozen=True):
    """``authority``: PEM; empty: the cluster has no such proxy. ``names``: common names that certificates may have;
    none: any. The headers: in small letters.
    """

    authority: str = ""
    names: tuple[str, ...] = ()
    user_headers: tuple[str, ...] = ()
    group_headers: tuple[str, ...] = ()
    extra_prefixes: tuple[str, ...] = ()

    def user_of(self, certificate: Mapping[str, Any] | None, headers: Any) -> User | None:  # noqa: ANN401 - a multi-dict
        """``certificate``: as ssl tells a checked one; None without one."""
        if not certificate or not self.authority:
            return None
        if self.names and _common_name(certificate) not in self.names:
            return None
        name = next((said for one in self.user_headers if (said := headers.get(one))), "")
        if not name:
            return None
        groups = tuple(said for one in self.group_headers for said in headers.getall(one, ()))
        extra: dict[str, list[str]] = {}
        for header, value in headers.items():
            for prefix in self.extra_prefixes:
                if header.lower().startswith(prefix):
                    extra.setdefault(header.lower().removeprefix(prefix), []).append(value)
        return User(name, groups, extra=tuple((one, tuple(several)) for one, several in sorted(extra.items())))


def front_proxy_of(config_map: Mapping[str, Any]) -> FrontProxy:
    """Raises ValueError."""
    data = config_map.get("data") or {}

    def names(key: str) -> tuple[str, ...]:
        return _NAMES.decode(data.get(key) or "[]")

    def lowered(key: str) -> tuple[str, ...]:
        return tuple(one.lower() for one in names(key))

    return FrontProxy(
        authority=data.get("requestheader-client-ca-file", ""),
        names=names("requestheader-allowed-names"),
        user_headers=lowered("requestheader-username-headers"),
        group_headers=lowered("requestheader-group-headers"),
        extra_prefixes=lowered("requestheader-extra-headers-prefix"),
    )


def _common_name(certificate: Mapping[str, Any]) -> str:
    for parts in certificate.get("subject", ()):
        for key, value in parts:
            if key == "commonName":
                return str(value)
    return ""

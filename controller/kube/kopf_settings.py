# SPDX-License-Identifier: Apache-2.0
"""How kopf works here: it follows kinds and calls handlers; it writes nothing and gives up at nothing."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import kopf

if TYPE_CHECKING:
    from collections.abc import Iterator

    from controller.kube.access import Access

_PREFIX: Final = "attache.dev"
# Tokens of service accounts are renewed long before they end: read again that often.
_TOKEN_LIFE: Final = timedelta(minutes=5)
_BACKOFFS_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0)


class Endless:
    """Waits between attempts, without end: kopf stops an operator whose waits have run out."""

    def __iter__(self) -> Iterator[float]:
        yield from _BACKOFFS_S
        while True:
            yield _BACKOFFS_S[-1]


def operator_settings() -> kopf.OperatorSettings:
    """No peering, no Events, no scan for new kinds, names of our own should kopf ever write."""
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.networking.error_backoffs = Endless()
    settings.networking.request_timeout = 30.0
    settings.networking.connect_timeout = 5.0
    settings.watching.server_timeout = 290  # an API server reads no fractions
    settings.watching.inactivity_timeout = 70.0
    settings.queueing.idle_timeout = 0.5
    settings.queueing.exit_timeout = 0.1
    settings.persistence.finalizer = f"{_PREFIX}/kopf"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=_PREFIX)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=_PREFIX)
    return settings


def login(access: Access) -> kopf.ConnectionInfo:
    """What kopf shows the API server; asked for again after a few minutes. Raises AccessInvalid."""
    _, _, token = access.headers().get("authorization", "").partition(" ")
    return kopf.ConnectionInfo(
        server=access.server,
        ca_data=access.ca or None,
        insecure=access.insecure or None,
        token=token or None,
        certificate_data=access.certificate or None,
        private_key_data=access.key or None,
        default_namespace=access.namespace,
        expiration=datetime.now(UTC) + _TOKEN_LIFE if access.token_file else None,
    )

"""What all settings written in YAML have in common."""

from __future__ import annotations

from typing import Annotated

import msgspec

Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]
NonEmpty = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]


class Spec(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True):
    """camelCase, unknown fields refused."""

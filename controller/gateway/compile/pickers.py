# SPDX-License-Identifier: Apache-2.0
"""EndpointPickerConfigs from ConfigMaps, as files of the directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from extproc.config.decode import read_picker_file
from extproc.config.errors import ConfigInvalid

if TYPE_CHECKING:
    from collections.abc import Mapping

# ConfigMaps with this label are read; others may be large, and are none of our business.
LABEL: Final = "attache.dev/picker-config"


def picker_file_name(key: str) -> str:
    """Of the ConfigMap ``namespace/name``, in the directory."""
    return f"picker.{key.replace('/', '.', 1)}.yaml"


def picker_file_of(key: str, thing: Mapping[str, Any]) -> dict[str, bytes]:
    """The file's name and content if the ConfigMap holds exactly one EndpointPickerConfig that can be used; else empty."""
    texts = list((thing.get("data") or {}).values())
    if len(texts) != 1:
        return {}
    name = picker_file_name(key)
    try:
        read_picker_file(name, texts[0])
    except ConfigInvalid:
        return {}
    return {name: texts[0].encode()}

# SPDX-License-Identifier: Apache-2.0
"""EndpointPickerConfigs from ConfigMaps, as files of the directory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.gateway.compile.file_names import bounded_name
from extproc.api.decode import read_picker_file
from extproc.api.errors import ConfigInvalid, Mistake
from extproc.api.load import unforeseen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from extproc.api.picker_config import PickerCheck

# ConfigMaps with this label are read; others may be large, and are none of our business.
LABEL: Final = "attache.dev/picker-config"


class Picker(msgspec.Struct, frozen=True, kw_only=True):
    """One ConfigMap. ``file`` and ``content``: what the directory has of it, if it can be used. ``problem``: why it
    cannot be; empty if it can. ``notes``: what of it has no effect.
    """

    file: str
    content: bytes = b""
    problem: str = ""
    notes: Sequence[str] = ()


def picker_file_name(key: str) -> str:
    """Of the ConfigMap ``namespace/name``, in the directory."""
    return bounded_name(f"picker.{key.replace('/', '.', 1)}", ".yaml")


def picker_of(key: str, thing: Mapping[str, Any], check: PickerCheck) -> Picker:
    """The EndpointPickerConfig in the ConfigMap ``key``, which has one key with one document."""
    name = picker_file_name(key)
    texts = list((thing.get("data") or {}).values())
    if len(texts) != 1:
        return Picker(file=name, problem=f"has {len(texts)} keys; give it one, whose text is an EndpointPickerConfig")
    try:
        notes = tuple(check(read_picker_file(name, texts[0])))
    except ConfigInvalid as error:
        return Picker(file=name, problem="; ".join(map(_said, error.mistakes)))
    except Exception as error:  # noqa: BLE001 - whatever a text does to a plugin, the others must be served
        return Picker(file=name, problem=_said(unforeseen(name, error)))
    return Picker(file=name, content=texts[0].encode(), notes=notes)


def _said(mistake: Mistake) -> str:
    """Without the file, which nobody has written."""
    where = f"line {mistake.line}: " if mistake.line else ""
    return f"{where}{mistake.path}: {mistake.message}" if mistake.path else f"{where}{mistake.message}"

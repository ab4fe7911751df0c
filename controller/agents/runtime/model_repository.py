# SPDX-License-Identifier: Apache-2.0
"""Models in the repository of a V2 server: a directory each, made from an artefact's files in the form of the server

MLServer finds models by files ``model-settings.json``, whose ``name`` counts, and not the directory's. So each model
gets settings of ours: the artefact's own, if it has some, with the declared name, and with its files by their absolute
path. Otherwise an artefact could take the name of another model. Its directories are not linked, as MLServer searches
them.

Triton finds models by directories, each with a directory for each version. An artefact without such is version 1.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from controller.agents.runtime.declared_adapters import AdapterNameInvalid

if TYPE_CHECKING:
    from extproc.engines.dialects import Dialect

_SETTINGS: Final = "model-settings.json"
_CONFIG: Final = "config.pbtxt"
# In directories that were made here: no other one is changed or removed.
_MARK: Final = ".attache"
_MOST_BYTES: Final = 1024 * 1024


def add_model(repository: Path, name: str, files: Path, *, dialect: Dialect, weights_format: str) -> None:
    """Make the directory of ``name``; what the server has under that name already stays if it was not made here.

    ``files``: a directory, or a single file. Raises OSError, and AdapterNameInvalid with what to correct.
    """
    place = repository / name
    if _is_foreign(place) or files == place:
        return
    remove_model(repository, name)
    settings = None
    if dialect.implementations:
        settings = mlserver_model_settings(name, files, _own_settings(files), weights_format, dialect)
    elif files.is_dir() and any(one.name.isdecimal() for one in files.iterdir()):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(files)
        return
    place.mkdir(parents=True)
    (place / _MARK).touch()
    if settings is not None:
        _link_files(place, files)
        (place / _SETTINGS).write_bytes(msgspec.json.encode(settings))
    else:
        _add_version(place, files)


def remove_model(repository: Path, name: str) -> None:
    """Take a model out, if it was added here; the files stay where they are."""
    place = repository / name
    if place.is_symlink():
        place.unlink()
    elif (place / _MARK).exists():
        shutil.rmtree(place)


def mlserver_model_settings(
    name: str, files: Path, own: dict[str, Any], weights_format: str, dialect: Dialect
) -> dict[str, Any]:
    """MLServer's settings of a model. ``own``: the artefact's. Raises AdapterNameInvalid if none can load it."""
    implementation = own.get("implementation") or dialect.implementations.get(weights_format)
    if not implementation:
        known = ", ".join(sorted(dialect.implementations))
        what = f"format '{weights_format}' is unknown" if weights_format else "its format is missing"
        raise AdapterNameInvalid(f"{name}: {what}; write one of {known}, or add a {_SETTINGS} to the artefact")
    parameters = own.get("parameters")
    parameters = dict(parameters) if isinstance(parameters, dict) else {}
    return {
        **own,
        "name": name,
        "implementation": implementation,
        "parameters": {**parameters, "uri": _uri(files, parameters)},
    }


def _uri(files: Path, parameters: dict[str, Any]) -> str:
    """Within the artefact."""
    inner = parameters.get("uri")
    if not files.is_dir() or not isinstance(inner, str):
        return str(files)
    path = Path(inner)
    return str(files) if path.is_absolute() or ".." in path.parts or "://" in inner else str(files / path)


def _own_settings(files: Path) -> dict[str, Any]:
    """Of the artefact; empty without any. Raises AdapterNameInvalid for some that cannot be read."""
    file = files / _SETTINGS
    if not files.is_dir() or not file.is_file():
        return {}
    with file.open("rb") as content:
        try:
            return msgspec.json.decode(content.read(_MOST_BYTES), type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise AdapterNameInvalid(f"{_SETTINGS} of the artefact cannot be read: {error}") from error


def _link_files(place: Path, files: Path) -> None:
    """Modules of the artefact, which its settings may name, are imported from the directory of the settings."""
    for one in sorted(files.iterdir()) if files.is_dir() else ():
        if one.is_file() and one.name not in {_SETTINGS, _MARK}:
            (place / one.name).symlink_to(one)


def _add_version(place: Path, files: Path) -> None:
    if files.is_dir():
        (place / "1").symlink_to(files)
        if (files / _CONFIG).is_file():
            (place / _CONFIG).symlink_to(files / _CONFIG)
    else:
        (place / "1").mkdir()
        (place / "1" / f"model{files.resolve().suffix}").symlink_to(files)


def _is_foreign(place: Path) -> bool:
    return place.exists() and not place.is_symlink() and not (place / _MARK).exists()

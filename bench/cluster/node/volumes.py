# SPDX-License-Identifier: Apache-2.0
"""A pod's volumes as directories of this machine, and paths in containers as paths there. No network.

A process sees this machine's files, not a container's: a mount at ``/config`` is a directory elsewhere. So every word
of a container's command, arguments and variables that is a mount's path, or begins with it and ``/``, or has it behind
``=`` or ``:``, is rewritten to the directory.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bench.cluster.node.environment import Missing, Sources, field, plain_data

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_KEPT: Final = {"hostPath", "persistentVolumeClaim"}


def volume_files(pod: Mapping[str, Any], sources: Sources) -> dict[str, dict[str, bytes]]:
    """The files of each volume by the volume's name; empty for emptyDir. Raises Missing.

    Of other sources (CSI, NFS) the volume is an empty directory. Those of ``kept_volumes`` are not among them.
    """
    return {
        volume["name"]: _files(volume, pod, sources)
        for volume in pod["spec"].get("volumes") or ()
        if not volume.keys() & _KEPT
    }


class Kept(NamedTuple):
    """Where volumes are that outlive pods. ``host``: stands for the node's root directory. ``claims``: holds a
    directory for each claim that any pod of the cluster has used.
    """

    host: Path
    claims: Path


def kept_volumes(pod: Mapping[str, Any], kept: Kept) -> dict[str, Path]:
    """The directories of the pod's host paths and claims, by the name of the volume."""
    found: dict[str, Path] = {}
    for volume in pod["spec"].get("volumes") or ():
        if "hostPath" in volume:
            found[volume["name"]] = kept.host.joinpath(*_parts(volume["hostPath"]["path"]))
        elif "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            found[volume["name"]] = kept.claims / pod["metadata"]["namespace"] / claim
    return found


def token_file(pod: Mapping[str, Any], volumes: Path) -> Path | None:
    """Where the token of the pod's service account is, if a volume has it."""
    for volume in pod["spec"].get("volumes") or ():
        for source in (volume.get("projected") or {}).get("sources") or ():
            if "serviceAccountToken" in source:
                name, file = str(volume["name"]), str(source["serviceAccountToken"]["path"])
                return volumes / name / file
    return None


def mounts(container: Mapping[str, Any], volumes: Path) -> dict[str, Path]:
    """Where each mount path of a container is on this machine; ``volumes`` holds a directory for each volume."""
    return {
        one["mountPath"].rstrip("/") or "/": volumes / one["name"] / (one.get("subPath") or "")
        for one in container.get("volumeMounts") or ()
    }


def rewritten(word: str, places: Mapping[str, Path], listen_ip: str, own_ports: frozenset[int] = frozenset()) -> str:
    """A word as the process must have it: mount paths, ``0.0.0.0`` and the pod's own ``127.0.0.1`` replaced.

    Where pods share this machine's addresses, a server that would listen on all of them listens on its pod's own,
    ``listen_ip``, and its neighbours in the pod find it there: ``own_ports`` are those that the pod's containers
    declare. ``listen_ip`` is empty where a pod has a network of its own: there these addresses may stay.
    """
    paths = "|".join(re.escape(path) for path in sorted(places, key=len, reverse=True) if path != "/")
    if paths:
        # in one pass, so that what was rewritten is not rewritten again
        word = re.sub(rf"(?<![\w./-])(?:{paths})(?=$|[/:,;\"'\s])", lambda found: str(places[found[0]]), word)
    if not listen_ip:
        return word
    word = re.sub(
        r"(?<![\d.])127\.0\.0\.1:(\d+)(?!\d)",
        lambda found: f"{listen_ip}:{found[1]}" if int(found[1]) in own_ports else found[0],
        word,
    )
    return re.sub(r"(?<![\d.])0\.0\.0\.0(?![\d.])|\[::\](?=:|$)", listen_ip, word)


def ports_of(pod: Mapping[str, Any]) -> frozenset[int]:
    """Ports that a pod's containers declare."""
    containers = (*(pod["spec"].get("initContainers") or ()), *pod["spec"]["containers"])
    return frozenset(one["containerPort"] for each in containers for one in each.get("ports") or ())


def write_files(directory: Path, files: Mapping[str, bytes]) -> bool:
    """Make ``directory`` hold these files, each replaced in one step; whether anything changed."""
    directory.mkdir(parents=True, exist_ok=True)
    changed = False
    for name, content in files.items():
        path = directory / name
        if path.is_file() and path.read_bytes() == content:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.new")
        new.write_bytes(content)
        new.replace(path)
        changed = True
    return changed


def remove_others(directory: Path, files: Mapping[str, bytes]) -> None:
    """Remove what a ConfigMap or Secret no longer has."""
    for path in directory.iterdir():
        if path.is_file() and path.name not in files:
            path.unlink()


def link_to(link: Path, target: Path) -> None:
    """Make ``link`` lead to the directory ``target``, which is made if it is not there."""
    target.mkdir(parents=True, exist_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(target, target_is_directory=True)


def _parts(path: str) -> list[str]:
    """Of an absolute path, without what would lead out of the directory that stands for the root."""
    return [part for part in path.split("/") if part not in {"", ".", ".."}]


def _files(volume: Mapping[str, Any], pod: Mapping[str, Any], sources: Sources) -> dict[str, bytes]:
    if "configMap" in volume:
        one = volume["configMap"]
        return _chosen(one, one["name"], sources.config_maps, "configmap")
    if "secret" in volume:
        one = volume["secret"]
        return _chosen(one, one.get("secretName") or one["name"], sources.secrets, "secret")
    if "downwardAPI" in volume:
        items: Sequence[Mapping[str, Any]] = volume["downwardAPI"].get("items") or ()
        return {
            one["path"]: field(one["fieldRef"]["fieldPath"], pod, sources).encode()
            for one in items
            if "fieldRef" in one
        }
    if "serviceAccountToken" in volume:
        return {volume["serviceAccountToken"]["path"]: sources.token}
    if "projected" in volume:
        result: dict[str, bytes] = {}
        for source in volume["projected"].get("sources") or ():
            result |= _files(source, pod, sources)
        return result
    return {}


def _chosen(
    source: Mapping[str, Any], name: str, known: Mapping[str, Mapping[str, Any]], what: str
) -> dict[str, bytes]:
    thing = known.get(name)
    if thing is None:
        if source.get("optional"):
            return {}
        raise Missing(f'{what} "{name}" not found')
    data = plain_data(thing)
    if not source.get("items"):
        return data
    return {one["path"]: data[one["key"]] for one in source["items"] if one["key"] in data}

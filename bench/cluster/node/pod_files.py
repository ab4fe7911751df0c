# SPDX-License-Identifier: Apache-2.0
"""A pod's files on this machine: volumes and logs as directories, and paths in containers as paths there. No network.

A process sees this machine's files, not a container's: a mount at ``/config`` is a directory elsewhere. So every word
of a container's command, arguments and variables that is a mount's path, or begins with it and ``/``, or has it behind
``=`` or ``:``, is rewritten to the directory.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bench.cluster.kubernetes_binaries import ROOT
from bench.cluster.local_control_plane import write_kubeconfig
from bench.cluster.node.container_processes import ContainerLaunch, HandlerEnvironment
from bench.cluster.node.pod_spec import (
    ReferencedSources,
    ReferenceMissing,
    config_data,
    container_command,
    environment,
    expand_variables,
    pod_field,
    referenced_names,
)
from controller.kube.api_resources import CONFIG_MAPS, SECRETS, SERVICE_ACCOUNTS
from controller.kube.cluster_access import ClusterAccess

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from bench.cluster.node.pod_network import PodSandbox
    from bench.cluster.node.pod_spec import ContainerSpec
    from controller.kube.api_resources import Object
    from controller.kube.client import Client

_KEPT: Final = {"hostPath", "persistentVolumeClaim"}
# programs are found, and Python finds this repository, as in the process that runs the node
_INHERITED: Final = (
    "PATH",
    "HOME",
    "LANG",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "TMPDIR",
    "COVERAGE_PROCESS_START",
    "COVERAGE_PROCESS_CONFIG",
)
_DAY_S: Final = 86_400  # tokens are not renewed
_CRASH: Final = ("sh", "-c", "echo this pod was made to crash; exit 1")


def volume_files(pod: Mapping[str, Any], sources: ReferencedSources) -> dict[str, dict[str, bytes]]:
    """The files of each volume by the volume's name; empty for emptyDir. Raises Missing.

    Of other sources (CSI, NFS) the volume is an empty directory. Those of ``persistent_volumes`` are not among them.
    """
    return {
        volume["name"]: _files(volume, pod, sources)
        for volume in pod["spec"].get("volumes") or ()
        if not volume.keys() & _KEPT
    }


class PersistentPaths(NamedTuple):
    """Where volumes are that outlive pods. ``host``: stands for the node's root directory. ``claims``: holds a
    directory for each claim that any pod of the cluster has used.
    """

    host: Path
    claims: Path


def persistent_volumes(pod: Mapping[str, Any], kept: PersistentPaths) -> dict[str, Path]:
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


def mount_paths(container: Mapping[str, Any], volumes: Path) -> dict[str, Path]:
    """Where each mount path of a container is on this machine; ``volumes`` holds a directory for each volume."""
    return {
        one["mountPath"].rstrip("/") or "/": volumes / one["name"] / (one.get("subPath") or "")
        for one in container.get("volumeMounts") or ()
    }


def rewrite_argument(
    word: str, places: Mapping[str, Path], listen_ip: str, own_ports: frozenset[int] = frozenset()
) -> str:
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


def remove_stale_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Remove what a ConfigMap or Secret no longer has."""
    for path in directory.iterdir():
        if path.is_file() and path.name not in files:
            path.unlink()


def make_link(link: Path, target: Path) -> None:
    """Make ``link`` lead to the directory ``target``, which is made if it is not there."""
    target.mkdir(parents=True, exist_ok=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(target, target_is_directory=True)


def _parts(path: str) -> list[str]:
    """Of an absolute path, without what would lead out of the directory that stands for the root."""
    return [part for part in path.split("/") if part not in {"", ".", ".."}]


def _files(volume: Mapping[str, Any], pod: Mapping[str, Any], sources: ReferencedSources) -> dict[str, bytes]:
    if "configMap" in volume:
        one = volume["configMap"]
        return _chosen(one, one["name"], sources.config_maps, "configmap")
    if "secret" in volume:
        one = volume["secret"]
        return _chosen(one, one.get("secretName") or one["name"], sources.secrets, "secret")
    if "downwardAPI" in volume:
        items: Sequence[Mapping[str, Any]] = volume["downwardAPI"].get("items") or ()
        return {
            one["path"]: pod_field(one["fieldRef"]["fieldPath"], pod, sources).encode()
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
        raise ReferenceMissing(f'{what} "{name}" not found')
    data = config_data(thing)
    if not source.get("items"):
        return data
    return {one["path"]: data[one["key"]] for one in source["items"] if one["key"] in data}


class PodFiles:
    """One pod's directory, below that of its node. ``kept``: for volumes that outlive it."""

    def __init__(
        self,
        directory: Path,
        client: Client,
        *,
        place: PodSandbox,
        host_ip: str,
        kept: PersistentPaths,
        images: Mapping[str, Sequence[str]],
        check_image: Callable[[str], None],
        crashes: Callable[[], bool],
    ) -> None:
        self.pod_ip = place.address
        self._place = place
        # a server that would listen on all addresses listens on this one, if pods share their ports
        self._listen_ip = place.address if place.shares_ports else ""
        self.directory = directory
        self._kept = kept
        self._client = client
        self._host_ip = host_ip
        self._images = images
        self._check_image = check_image
        self._crashes = crashes
        self._environments: dict[str, dict[str, str]] = {}
        self._places: dict[str, dict[str, Path]] = {}
        self._token = b""
        # words that bring a command to the pod's place in the network
        self._entered: Sequence[str] = ()
        # what the pod refers to, once it was all there
        self._known: ReferencedSources | None = None

    async def container_launch(self, pod: Object, container: ContainerSpec) -> ContainerLaunch:
        """How to start a container now; raises ImageMissing, Missing and ClusterError.

        ConfigMaps and Secrets are as they were at the first start or the last ``refresh``.
        """
        self._check_image(container.image)
        self._entered = await self._place.command_prefix()
        own_words, words = (_CRASH, []) if self._crashes() else container_command(container.raw, self._images)
        # a restart does not wait for the API server: objects read some seconds ago are used
        sources = self._known or await self._sources(pod)
        # unless something is missing in it
        self._known = None
        places = mount_paths(container.raw, self.directory / "volumes")
        self._write_volumes(pod, sources)
        given = environment(pod, container.raw, sources)
        self._known = sources
        ports = ports_of(pod)
        variables = {name: rewrite_argument(value, places, self._listen_ip, ports) for name, value in given.items()}
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        # our programs are found from any directory
        inherited["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), inherited.get("PYTHONPATH", "")]))
        own = {"HOSTNAME": pod["metadata"]["name"], "ATTACHE_POD_IP": self.pod_ip}
        self._places[container.name] = places
        self._environments[container.name] = {**inherited, **own, **self._cluster_access(pod), **variables}
        return ContainerLaunch(
            command=[
                *self._entered,
                # they listen on the pod's address like others
                *(rewrite_argument(word, {}, self._listen_ip) for word in own_words),
                *(rewrite_argument(expand_variables(word, given), places, self._listen_ip, ports) for word in words),
            ],
            environment=self._environments[container.name],
            directory=self.directory,
            log=self.log_of(container.name),
        )

    def log_of(self, container: str) -> Path:
        """The log file of a container."""
        return self.directory / f"{container}.log"

    async def refresh(self, pod: Object) -> None:
        """Bring the files of ConfigMaps and Secrets up to date; raises Missing and ClusterError."""
        sources = await self._sources(pod)
        self._write_volumes(pod, sources)
        self._known = sources

    def handler_context(self, container: str) -> HandlerEnvironment:
        """Where the container's probes and hooks run."""
        variables = self._environments.get(container, {})
        places = self._places.get(container, {})
        return HandlerEnvironment(
            pod_ip=self.pod_ip,
            enter=self._entered,
            environment=variables,
            directory=str(self.directory),
            rewrite=lambda word: rewrite_argument(word, places, self._listen_ip),
        )

    def remove_volumes(self) -> None:
        """Its volumes go with it; the logs stay."""
        shutil.rmtree(self.directory / "volumes", ignore_errors=True)

    def _cluster_access(self, pod: Object) -> dict[str, str]:
        """Variables by which a process finds the API server with its pod's service account.

        In a pod, programs read the token from a fixed path, which a process of this machine lacks: ``KUBECONFIG``
        replaces it.
        """
        file = token_file(pod, self.directory / "volumes")
        if file is None:
            return {}
        server = self._client.access.server
        account = ClusterAccess(server, self._client.access.ca, pod["metadata"]["namespace"], token_file=str(file))
        path = write_kubeconfig(self.directory / "kubeconfig", account)
        host, _, port = server.rpartition("//")[2].partition(":")
        return {"KUBECONFIG": str(path), "KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}

    async def _account_token(self, pod: Object) -> bytes:
        """The token of the pod's service account if a volume projects it, requested once."""
        if not self._token and token_file(pod, self.directory) is not None:
            asked = {
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenRequest",
                "spec": {"expirationSeconds": _DAY_S},
            }
            name = pod["spec"].get("serviceAccountName") or "default"
            answer = await self._client.post(SERVICE_ACCOUNTS, name, pod["metadata"]["namespace"], "token", asked)
            self._token = str(answer["status"]["token"]).encode()
        return self._token

    def _write_volumes(self, pod: Object, sources: ReferencedSources) -> None:
        for name, kept in persistent_volumes(pod, self._kept).items():
            make_link(self.directory / "volumes" / name, kept)
        for name, files in volume_files(pod, sources).items():
            volume = self.directory / "volumes" / name
            write_files(volume, files)
            if files:
                remove_stale_files(volume, files)

    async def _sources(self, pod: Object) -> ReferencedSources:
        config_maps, secrets = referenced_names(pod)
        namespace = pod["metadata"]["namespace"]
        found = await asyncio.gather(
            *(self._client.get_or_none(CONFIG_MAPS, name, namespace) for name in sorted(config_maps)),
            *(self._client.get_or_none(SECRETS, name, namespace) for name in sorted(secrets)),
        )
        there = [one for one in found if one is not None]
        return ReferencedSources(
            config_maps={one["metadata"]["name"]: one for one in there if one["kind"] == "ConfigMap"},
            secrets={one["metadata"]["name"]: one for one in there if one["kind"] == "Secret"},
            pod_ip=self.pod_ip,
            host_ip=self._host_ip,
            token=await self._account_token(pod),
        )

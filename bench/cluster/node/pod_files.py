# SPDX-License-Identifier: Apache-2.0
"""What a pod has on this machine: directories for its volumes, logs, and the words its processes are started with."""

from __future__ import annotations

import asyncio
import os
import shutil
from typing import TYPE_CHECKING, Final

from bench.cluster.assets import ROOT
from bench.cluster.kubeconfig import write_kubeconfig
from bench.cluster.node.container_process import Launch
from bench.cluster.node.environment import Sources, environment, expanded, references
from bench.cluster.node.images import command
from bench.cluster.node.probing import Surroundings
from bench.cluster.node.volumes import (
    Kept,
    kept_volumes,
    link_to,
    mounts,
    ports_of,
    remove_others,
    rewritten,
    token_file,
    volume_files,
    write_files,
)
from controller.kube.access import Access
from controller.kube.resources import CONFIG_MAPS, SECRETS, SERVICE_ACCOUNTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from bench.cluster.node.pod_network import PodPlace
    from bench.cluster.node.pod_spec import ContainerSpec
    from controller.kube.client import Client
    from controller.kube.resources import Object

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


class PodFiles:
    """One pod's directory, below that of its node. ``kept``: for volumes that outlive it."""

    def __init__(
        self,
        directory: Path,
        client: Client,
        *,
        place: PodPlace,
        host_ip: str,
        kept: Kept,
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
        self._known: Sources | None = None

    async def launch(self, pod: Object, container: ContainerSpec) -> Launch:
        """How to start a container now; raises ImageMissing, Missing and ClusterError.

        ConfigMaps and Secrets are as they were at the first start or the last ``refresh``.
        """
        self._check_image(container.image)
        self._entered = await self._place.enter()
        own_words, words = (_CRASH, []) if self._crashes() else command(container.raw, self._images)
        # a restart does not wait for the API server: what was known some seconds ago will do
        sources = self._known or await self._sources(pod)
        # unless something is missing in it
        self._known = None
        places = mounts(container.raw, self.directory / "volumes")
        self._write_volumes(pod, sources)
        given = environment(pod, container.raw, sources)
        self._known = sources
        ports = ports_of(pod)
        variables = {name: rewritten(value, places, self._listen_ip, ports) for name, value in given.items()}
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        # our programs are found from any directory
        inherited["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), inherited.get("PYTHONPATH", "")]))
        own = {"HOSTNAME": pod["metadata"]["name"], "ATTACHE_POD_IP": self.pod_ip}
        self._places[container.name] = places
        self._environments[container.name] = {**inherited, **own, **self._cluster_access(pod), **variables}
        return Launch(
            command=[
                *self._entered,
                # they listen on the pod's address like others
                *(rewritten(word, {}, self._listen_ip) for word in own_words),
                *(rewritten(expanded(word, given), places, self._listen_ip, ports) for word in words),
            ],
            environment=self._environments[container.name],
            directory=self.directory,
            log=self.log_of(container.name),
        )

    def log_of(self, container: str) -> Path:
        """The file with what a container says."""
        return self.directory / f"{container}.log"

    async def refresh(self, pod: Object) -> None:
        """Bring the files of ConfigMaps and Secrets up to date; raises Missing and ClusterError."""
        sources = await self._sources(pod)
        self._write_volumes(pod, sources)
        self._known = sources

    def surroundings(self, container: str) -> Surroundings:
        """Where the container's probes and hooks run."""
        variables = self._environments.get(container, {})
        places = self._places.get(container, {})
        return Surroundings(
            pod_ip=self.pod_ip,
            enter=self._entered,
            environment=variables,
            directory=str(self.directory),
            rewrite=lambda word: rewritten(word, places, self._listen_ip),
        )

    def remove(self) -> None:
        """Its volumes go with it; the logs stay."""
        shutil.rmtree(self.directory / "volumes", ignore_errors=True)

    def _cluster_access(self, pod: Object) -> dict[str, str]:
        """Variables by which a process finds the API server with its pod's service account.

        Programs look for a token at a fixed place, where a process of this machine has none: ``KUBECONFIG`` is that
        place.
        """
        file = token_file(pod, self.directory / "volumes")
        if file is None:
            return {}
        server = self._client.access.server
        account = Access(server, self._client.access.ca, pod["metadata"]["namespace"], token_file=str(file))
        path = write_kubeconfig(self.directory / "kubeconfig", account)
        host, _, port = server.rpartition("//")[2].partition(":")
        return {"KUBECONFIG": str(path), "KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}

    async def _account_token(self, pod: Object) -> bytes:
        """The token of the pod's service account if a volume wants it, asked for once."""
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

    def _write_volumes(self, pod: Object, sources: Sources) -> None:
        for name, kept in kept_volumes(pod, self._kept).items():
            link_to(self.directory / "volumes" / name, kept)
        for name, files in volume_files(pod, sources).items():
            volume = self.directory / "volumes" / name
            write_files(volume, files)
            if files:
                remove_others(volume, files)

    async def _sources(self, pod: Object) -> Sources:
        config_maps, secrets = references(pod)
        namespace = pod["metadata"]["namespace"]
        found = await asyncio.gather(
            *(self._client.find(CONFIG_MAPS, name, namespace) for name in sorted(config_maps)),
            *(self._client.find(SECRETS, name, namespace) for name in sorted(secrets)),
        )
        there = [one for one in found if one is not None]
        return Sources(
            config_maps={one["metadata"]["name"]: one for one in there if one["kind"] == "ConfigMap"},
            secrets={one["metadata"]["name"]: one for one in there if one["kind"] == "Secret"},
            pod_ip=self.pod_ip,
            host_ip=self._host_ip,
            token=await self._account_token(pod),
        )

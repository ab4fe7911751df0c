# SPDX-License-Identifier: Apache-2.0
"""A real Kubernetes control plane on loopback: etcd, API server, controllers, scheduler; its kubeconfig and CRDs."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import os
import secrets
import signal
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec
import yaml

from bench.cluster.certificates import Authority, service_account_key_pair, write_private
from bench.cluster.netns import SERVICE_RANGE
from bench.stack.processes import Processes, StartFailed, free_ports
from controller.kube.api_resources import CRDS, NAMESPACES, SERVICE_ACCOUNTS
from controller.kube.client import Client, connect
from controller.kube.cluster_access import ClusterAccess
from controller.kube.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping

    from bench.cluster.kubernetes_binaries import ClusterBinaries
    from controller.kube.api_resources import Object

log = logging.getLogger(__name__)
_SERVED_S: Final = 60.0
_PAUSE_S: Final = 0.05
# the parser in C is ten times faster, where PyYAML was built with it
_Loader: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# Between two looks for processes that have ended.
_RESTART_S: Final = 1.0
API_SERVER: Final = "kube-apiserver"
CONTROLLERS: Final = "kube-controller-manager"
SCHEDULER: Final = "kube-scheduler"
ETCD: Final = "etcd"
ADMIN: Final = "admin"
NOBODY: Final = "nobody"
_MANAGER: Final = "bench"
_FRONT_PROXY: Final = "front-proxy"
# users of the token file and their groups; Kubernetes' own roles bind the names that begin with system:
_USERS: Final[Mapping[str, str]] = {
    ADMIN: "system:masters",
    NOBODY: "",
    "system:kube-controller-manager": "",
    "system:kube-scheduler": "",
}


def write_kubeconfig(path: Path, access: ClusterAccess) -> Path:
    """A kubeconfig with one cluster, one user and one context; it may hold a token, so only its owner may read it."""
    cluster: dict[str, object] = {"server": access.server}
    if access.ca:
        cluster["certificate-authority-data"] = base64.b64encode(access.ca.encode()).decode()
    user = {"tokenFile": access.token_file} if access.token_file else {"token": access.token} if access.token else {}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "bench", "cluster": cluster}],
        "users": [{"name": "bench", "user": user}],
        "contexts": [
            {"name": "bench", "context": {"cluster": "bench", "user": "bench", "namespace": access.namespace}}
        ],
        "current-context": "bench",
    }
    return write_private(path, yaml.safe_dump(content, sort_keys=False))


async def apply_crds(client: Client, folders: Iterable[Path]) -> int:
    """Apply all CRDs in these folders and below, as far as they exist; how many there were.

    Raises ClusterError, and StartFailed if one is not served after a minute.
    """
    found = [one for folder in folders for one in await asyncio.to_thread(_crds_in, folder)]
    await asyncio.gather(*(_apply(client, one) for one in found))
    return len(found)


async def apply_folder(plane: ControlPlane, assets: ClusterBinaries, folder: Path) -> None:
    """Apply manifests with kubectl, as a user does; raises StartFailed."""
    words = ["--kubeconfig", str(plane.kubeconfig), "apply", "-k", str(folder)]
    process = await asyncio.create_subprocess_exec(
        str(assets.binary("kubectl")), *words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    said, _ = await process.communicate()
    if process.returncode:
        raise StartFailed(f"kubectl apply -k {folder} failed: {said.decode()}")


async def _apply(client: Client, crd: Object) -> None:
    name = crd["metadata"]["name"]
    await client.apply(CRDS, crd, force=True)
    try:
        async with asyncio.timeout(_SERVED_S):
            while not _is_served(await client.get(CRDS, name)):  # noqa: ASYNC110  only the object shows it
                await asyncio.sleep(_PAUSE_S)
    except TimeoutError:
        message = "the machine may be too busy: end what else runs on it, and try again"
        raise StartFailed(f"the API server does not serve {name} after {_SERVED_S:g} s; {message}") from None


def _is_served(crd: Object) -> bool:
    conditions = (crd.get("status") or {}).get("conditions") or ()
    return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)


def _crds_in(folder: Path) -> list[Object]:
    documents: list[dict[str, Any] | None] = []
    for file in sorted(folder.rglob("*.yaml")):
        documents += yaml.load_all(file.read_text(), Loader=_Loader)
    return [one for one in documents if one and one.get("kind") == CRDS.kind]


class ControlPlaneOptions(msgspec.Struct, frozen=True):
    """Which parts run. Without controllers there is no garbage collection, no Deployment, no EndpointSlice.

    ``node_lifecycle``: nodes whose Lease is not renewed for ``node_grace_s`` become Unknown, and their pods are evicted
    after the pods' tolerations (by default 5 minutes). ``address``: where the API server listens.
    """

    controllers: bool = True
    scheduler: bool = True
    node_lifecycle: bool = False
    node_grace_s: int = 40
    address: str = "127.0.0.1"


class ControlPlane(msgspec.Struct, frozen=True):
    """A running control plane. ``admin`` may do everything; ``nobody`` is authenticated and may do nothing."""

    processes: Processes
    directory: Path
    admin: ClusterAccess
    nobody: ClusterAccess
    kubeconfig: Path
    options: ControlPlaneOptions

    async def stop_api(self) -> None:
        """Kill the API server; its data stays in etcd. (On SIGTERM it would wait for its watches, up to a minute.)"""
        await self.processes.end(API_SERVER, signal.SIGKILL)

    async def restart_api(self) -> None:
        """Start it again, on the same port with the same data, and wait until it is ready."""
        await self.processes.start_again(API_SERVER)
        async with connect(self.admin, manager=_MANAGER, timeout_s=2.0) as client:
            await self.processes.wait_ready(API_SERVER, client.is_ready)

    def freeze_api(self) -> None:
        """Stop its execution: connections stay open and nothing is answered."""
        _signal(self.processes.pid(API_SERVER), signal.SIGSTOP)

    def thaw_api(self) -> None:
        """Let it run on."""
        _signal(self.processes.pid(API_SERVER), signal.SIGCONT)


@contextlib.asynccontextmanager
async def running_control_plane(
    directory: Path,
    assets: ClusterBinaries,
    options: ControlPlaneOptions = ControlPlaneOptions(),  # noqa: B008 - frozen
) -> AsyncIterator[ControlPlane]:
    """Start it in ``directory`` and wait until it is ready; end it on the way out, API server before etcd.

    Raises StartFailed and AssetsMissing.
    """
    files = _Files(directory, options.address)
    etcd, peer, port = free_ports(3)
    commands = {
        ETCD: _etcd(assets, directory, etcd, peer),
        API_SERVER: _api_server(assets, files, port, etcd, options),
        CONTROLLERS: _controller_manager(assets, files, options),
        SCHEDULER: _scheduler(assets, files),
    }
    access = {user: files.access(user, f"https://{options.address}:{port}") for user in _USERS}
    kubeconfigs = {user: write_kubeconfig(files.kubeconfig(user), one) for user, one in access.items()}
    async with Processes(directory) as processes, connect(access[ADMIN], manager=_MANAGER, timeout_s=2.0) as client:
        await processes.start(ETCD, commands[ETCD])
        await processes.wait_ready(ETCD, _Healthy(f"http://127.0.0.1:{etcd}/health"))
        await processes.start(API_SERVER, commands[API_SERVER])
        await processes.wait_ready(API_SERVER, client.is_ready)
        if options.controllers:
            await processes.start(CONTROLLERS, commands[CONTROLLERS])
            # pods are refused until their service account is there
            await processes.wait_ready(CONTROLLERS, _HasAccounts(client))
        if options.scheduler:
            await processes.start(SCHEDULER, commands[SCHEDULER])
        restarts = asyncio.create_task(_restart_ended(processes, tuple(commands)))
        try:
            yield ControlPlane(processes, directory, access[ADMIN], access[NOBODY], kubeconfigs[ADMIN], options)
        finally:
            restarts.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await restarts
            # an API server waits for its clients' watches, so they go first, even if it was restarted since
            for name in (SCHEDULER, CONTROLLERS):
                if processes.is_running(name):
                    await processes.end(name)


async def _restart_ended(processes: Processes, names: Iterable[str]) -> None:
    """Start again what ends by itself, until cancelled, as a scheduler does without its API server for a minute."""
    while True:
        await asyncio.sleep(_RESTART_S)
        for name in names:
            if processes.has_ended(name):
                log.warning("%s has ended, and is started again", name)
                await processes.restart(name, signal.SIGTERM)


class _Files:
    """Certificates, keys and tokens, created for each control plane."""

    def __init__(self, directory: Path, address: str) -> None:
        self._directory = directory
        authority = Authority(datetime.now(UTC))
        self._ca = authority.certificate
        names = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")
        certificate, key = authority.issue("kube-apiserver", [address, "10.0.0.1"], names)
        private, public = service_account_key_pair()
        # not the server's authority: a holder of this certificate may impersonate any user
        front = Authority(datetime.now(UTC))
        front_certificate, front_key = front.issue(_FRONT_PROXY)
        self._tokens = {user: secrets.token_urlsafe(24) for user in _USERS}
        lines = [f'{token},{user},{user},"{_USERS[user]}"' for user, token in self._tokens.items()]
        self.ca = write_private(directory / "ca.pem", self._ca)
        self.certificate = write_private(directory / "apiserver.pem", certificate)
        self.key = write_private(directory / "apiserver-key.pem", key)
        self.account_key = write_private(directory / "accounts-key.pem", private)
        self.account_public = write_private(directory / "accounts.pem", public)
        self.front_ca = write_private(directory / "front-ca.pem", front.certificate)
        self.front_certificate = write_private(directory / "front.pem", front_certificate)
        self.front_key = write_private(directory / "front-key.pem", front_key)
        self.tokens = write_private(directory / "tokens.csv", "\n".join(lines) + "\n")

    def access(self, user: str, server: str) -> ClusterAccess:
        return ClusterAccess(server, ca=self._ca, token=self._tokens[user])

    def kubeconfig(self, user: str) -> Path:
        name = "kubeconfig" if user == ADMIN else f"{user.removeprefix('system:')}.kubeconfig"
        return self._directory / name


def _etcd(assets: ClusterBinaries, directory: Path, port: int, peer: int) -> list[str]:
    url, peers = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
    return [
        # as kubeadm's: without it watches of kinds that never changed get no bookmark, and clients reopen them. Not as
        # a flag, because etcd before 3.6 refuses to start with it.
        *("env", "ETCD_WATCH_PROGRESS_NOTIFY_INTERVAL=5s"),
        str(assets.binary(ETCD)),
        *("--name", "bench", "--data-dir", str(directory / "etcd"), "--log-level", "warn"),
        *("--listen-client-urls", url, "--advertise-client-urls", url),
        *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", f"bench={peers}"),
        "--unsafe-no-fsync",  # the data need not outlive the machine
    ]


def _api_server(
    assets: ClusterBinaries, files: _Files, port: int, etcd: int, options: ControlPlaneOptions
) -> list[str]:
    # without controllers no service account is created, and pods must not wait for them
    without = [] if options.controllers else ["--disable-admission-plugins=ServiceAccount"]
    return [
        str(assets.binary(API_SERVER)),
        f"--etcd-servers=http://127.0.0.1:{etcd}",
        f"--secure-port={port}",
        f"--bind-address={options.address}",
        f"--advertise-address={options.address}",
        "--endpoint-reconciler-type=none",  # EndpointSlices refuse loopback addresses
        f"--tls-cert-file={files.certificate}",
        f"--tls-private-key-file={files.key}",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
        "--authorization-mode=RBAC",
        f"--token-auth-file={files.tokens}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={files.account_public}",
        f"--service-account-signing-key-file={files.account_key}",
        "--allow-privileged=true",
        # forwards requests to other API servers, which authenticate it by a ConfigMap
        f"--requestheader-client-ca-file={files.front_ca}",
        f"--requestheader-allowed-names={_FRONT_PROXY}",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={files.front_certificate}",
        f"--proxy-client-key-file={files.front_key}",
        "--kubelet-preferred-address-types=InternalIP",  # the names of nodes are in no DNS
        *without,
    ]


def _controller_manager(assets: ClusterBinaries, files: _Files, options: ControlPlaneOptions) -> list[str]:
    chosen = "*" if options.node_lifecycle else "*,-node-lifecycle-controller"
    return [
        str(assets.directory / CONTROLLERS),
        f"--kubeconfig={files.kubeconfig('system:kube-controller-manager')}",
        "--leader-elect=false",
        "--secure-port=0",
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
        f"--controllers={chosen}",
        f"--node-monitor-grace-period={options.node_grace_s}s",
        "--node-monitor-period=1s",
        "--horizontal-pod-autoscaler-sync-period=1s",
        f"--service-account-private-key-file={files.account_key}",
        f"--root-ca-file={files.ca}",
        "--use-service-account-credentials=true",
    ]


def _scheduler(assets: ClusterBinaries, files: _Files) -> list[str]:
    return [
        str(assets.directory / SCHEDULER),
        f"--kubeconfig={files.kubeconfig('system:kube-scheduler')}",
        "--leader-elect=false",
        "--secure-port=0",
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
    ]


class _Healthy:
    """Whether a page answers 200."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def __call__(self) -> bool:
        timeout = aiohttp.ClientTimeout(total=2.0)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as http, http.get(self._url) as answer:
                return answer.status == 200
        except (TimeoutError, aiohttp.ClientError):
            return False


class _HasAccounts:
    """Whether the controllers work: namespaces have their service account."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def __call__(self) -> bool:
        try:
            if await self._client.get_or_none(NAMESPACES, "default") is None:
                return False
            return await self._client.get_or_none(SERVICE_ACCOUNTS, "default", "default") is not None
        except ClusterError:  # on a busy machine an answer may be late
            return False


def _signal(pid: int, number: signal.Signals) -> None:
    os.kill(pid, number)

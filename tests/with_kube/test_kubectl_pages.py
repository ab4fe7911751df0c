# SPDX-License-Identifier: Apache-2.0
"""What pages show of kubectl is what it prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.with_kube.kubes import REAL, Kube
from tests.with_kube.managing import define_kinds
from tools.kubectl_pages import PAGES, collect, commands, with_output

if TYPE_CHECKING:
    from pathlib import Path

    from bench.cluster.kubernetes_binaries import ClusterBinaries
    from controller.kube.client import Client

pytestmark = REAL


async def test_what_pages_show_of_kubectl_is_what_it_prints(
    client: Client, kube: Kube, assets: ClusterBinaries, tmp_path: Path
) -> None:
    assert kube.plane is not None
    await define_kinds(client)
    outputs = await collect(kube.plane, assets, client, tmp_path)
    for page in PAGES:
        text = page.read_text()
        assert len(commands(text)) >= 3
        assert with_output(text, outputs) == text, "run python -m tools.kubectl_pages"

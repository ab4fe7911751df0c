# SPDX-License-Identifier: Apache-2.0
"""A Prometheus that scrapes the gateways of a site: the system's own binary."""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING, Final

import aiohttp
import yaml

from bench.processes import StartFailed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bench.cluster.scaling.site import Site

PROMETHEUS: Final = "prometheus"


def in_flight(namespace: str, server: str) -> str:
    """A query: requests of a ModelServer at its engines, of all gateways."""
    return f'sum(attache_in_flight{{server="{namespace}/{server}"}})'


@contextlib.asynccontextmanager
async def running_prometheus(site: Site) -> AsyncIterator[None]:
    """At ``site.prometheus``. Raises StartFailed where there is no such program."""
    binary = shutil.which(PROMETHEUS)
    if binary is None:
        raise StartFailed("there is no prometheus; apt-get install --no-install-recommends prometheus")
    targets = [{"targets": [one.pages for one in site.gateways]}]
    scraped = {"job_name": "extproc", "static_configs": targets}
    config = site.folder / "prometheus.yaml"
    config.write_text(
        yaml.safe_dump({"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": [scraped]})
    )
    command = [
        binary,
        f"--config.file={config}",
        f"--web.listen-address={site.prometheus}",
        f"--storage.tsdb.path={site.folder / 'prometheus'}",
    ]
    await site.processes.start(PROMETHEUS, command)
    try:

        async def answers() -> bool:
            with contextlib.suppress(aiohttp.ClientError):
                async with aiohttp.ClientSession() as http, http.get(f"http://{site.prometheus}/-/ready") as answer:
                    return answer.status == 200
            return False

        await site.processes.wait_ready(PROMETHEUS, answers)
        yield
    finally:
        if site.processes.is_running(PROMETHEUS):
            await site.processes.end(PROMETHEUS)

# SPDX-License-Identifier: Apache-2.0
"""What the Prometheus Operator makes of our monitors: scrape configurations of a Prometheus."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import yaml

from tests.programs import program

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from controller.kube.api_resources import Object

# Fields of an endpoint that are understood here; a test that ignores one shows nothing.
_KNOWN = {"port", "interval", "honorLabels", "path", "scheme", "authorization", "tlsConfig"}


def endpoints_of(monitor: Object) -> list[dict[str, Any]]:
    """Of a PodMonitor or ServiceMonitor."""
    spec = monitor["spec"]
    found: list[dict[str, Any]] = spec["podMetricsEndpoints" if monitor["kind"] == "PodMonitor" else "endpoints"]
    return found


def job_name(monitor: Object, number: int) -> str:
    kind, metadata = monitor["kind"], monitor["metadata"]
    return f"{kind[0].lower()}{kind[1:]}/{metadata.get('namespace', 'default')}/{metadata['name']}/{number}"


def scrape_configs(
    monitor: Object, targets: Mapping[str, str], secrets: Mapping[tuple[str, str], Path] | None = None
) -> list[dict[str, Any]]:
    """``targets``: ``ip:port`` by the name of the port. ``secrets``: files, by name and key of a Secret.

    Labels of targets are those that the operator makes of pods; intervals are a second, whatever the monitor says.
    """
    return [
        _scrape_config(job_name(monitor, number), one, targets[one["port"]], secrets or {})
        for number, one in enumerate(endpoints_of(monitor))
    ]


def _scrape_config(
    job: str, endpoint: dict[str, Any], target: str, secrets: Mapping[tuple[str, str], Path]
) -> dict[str, Any]:
    assert endpoint.keys() <= _KNOWN
    labels = {"namespace": "attache-system", "pod": "pod-0", "container": "c", "job": job, "endpoint": endpoint["port"]}
    made: dict[str, Any] = {
        "job_name": job,
        "honor_labels": endpoint.get("honorLabels", False),
        "metrics_path": endpoint.get("path", "/metrics"),
        "scheme": endpoint.get("scheme", "http"),
        "scrape_interval": "1s",
        "scrape_timeout": "1s",
        "static_configs": [{"targets": [target], "labels": labels}],
    }
    if "authorization" in endpoint:
        place = endpoint["authorization"]["credentials"]
        made["authorization"] = {"credentials_file": str(secrets[place["name"], place["key"]])}
    if "tlsConfig" in endpoint:
        place = endpoint["tlsConfig"]["ca"]["secret"]
        made["tls_config"] = {
            "ca_file": str(secrets[place["name"], place["key"]]),
            "server_name": endpoint["tlsConfig"]["serverName"],
        }
    return made


def checked(folder: Path, what: str, content: Mapping[str, Any]) -> Path:
    """Written, and taken by promtool. ``what``: ``config`` or ``rules``."""
    file = folder / f"{what}.yaml"
    file.write_text(yaml.safe_dump(dict(content)))
    done = subprocess.run([program("promtool"), "check", what, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return file


def configuration(jobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"scrape_configs": [dict(one) for one in jobs]}

# SPDX-License-Identifier: Apache-2.0
"""The images that ``make test-image`` builds, each as a container with a read-only root."""

from __future__ import annotations

import json
import os
import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from attache import __version__
from tests.programs import program
from tests.with_image.conftest import BUILT, Container

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = """
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec:
  model: meta-llama/Llama-3.1-8B-Instruct
  endpoints: [{address: "127.0.0.1:8001"}]
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: llama}
spec: {modelName: llama, rules: [{targetModels: [{modelServerName: llama}]}]}
"""
# llm-d's file discovery: endpoints without a cluster.
PICKER = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: file-discovery
  parameters: {path: /mnt/endpoints.yaml}
- type: random-picker
schedulingProfiles:
- name: default
  plugins: [{pluginRef: random-picker}]
dataLayer:
  discovery: {pluginRef: file-discovery}
"""
ENDPOINTS = "endpoints:\n- {name: one, address: 127.0.0.1, port: 8001}\n"
ASK = json.dumps({"model": "llama", "max_tokens": 5, "messages": [{"role": "user", "content": "Who are you?"}]})
# Waits up to two minutes for an answer, and prints it. Words: a URL, and what is posted, if anything.
FETCH = """
import sys, time, urllib.request
url, data = sys.argv[1], sys.argv[2].encode() if sys.argv[2:] else None
request = urllib.request.Request(url, data, {"content-type": "application/json"})
for left in reversed(range(600)):
    try:
        print(urllib.request.urlopen(request, timeout=30).read().decode())
        break
    except OSError:
        if not left:
            raise
        time.sleep(0.2)
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    """Mounts the configuration at /config, where the image looks for it, and other files at /mnt."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config/attache.yaml").write_text(CONFIG)
    others = {"fetch.py": FETCH, "ask.json": ASK, "epp.yaml": PICKER, "endpoints.yaml": ENDPOINTS}
    (tmp_path / "other").mkdir()
    for name, text in others.items():
        (tmp_path / "other" / name).write_text(text)
    return f"""
        mkdir -p "$ROOT/config"
        for to in config mnt; do mount -t tmpfs tmpfs "$ROOT/$to"; done
        cp {tmp_path}/config/* "$ROOT/config"; cp {tmp_path}/other/* "$ROOT/mnt"
    """


def test_a_container_runs_as_its_user_on_a_root_that_it_cannot_write(containers: dict[str, Container]) -> None:
    done = containers["attache"].run(
        'id -u; touch /opt/attache/x 2>&1 || true; attache --version; python -c "import grpc, numpy, redis, tokenizers"'
    )
    assert done.returncode == 0, done.stderr
    user, touched, version = done.stdout.splitlines()
    assert (user, version) == ("65532", f"attache {__version__}")
    assert "Read-only file system" in touched


def test_the_bundles_directory_belongs_to_the_images_user(containers: dict[str, Container]) -> None:
    found = (containers["attache"].root / "bundle").stat()
    assert (found.st_uid, found.st_gid) == (65532, 65532)


def test_no_module_is_compiled_at_the_start(containers: dict[str, Container]) -> None:
    """A container cannot keep what Python compiles, and would compile it at each start."""
    script = "import attache.serve, controller.commands.bundle, extproc.cli.serve"
    done = containers["attache"].run(f'python -v -c "{script}"')
    assert done.returncode == 0, done.stderr[-2000:]
    # Python writes quotation marks around the names of files with compiled modules
    assert re.findall(r"^# code object from (/.*)", done.stderr, re.MULTILINE) == []
    assert "# code object from '/opt/attache/lib/python3.11/site-packages/extproc/" in done.stderr


def test_a_directory_is_checked_and_extproc_gets_ready(containers: dict[str, Container], config: str) -> None:
    done = containers["attache"].run(
        """
        attache check /config
        attache extproc --config /config --listen 127.0.0.1:9002 --metrics 127.0.0.1:9003 &
        python /mnt/fetch.py http://127.0.0.1:9003/readyz
        kill $!; wait $!
        """,
        config,
    )
    assert done.returncode == 0, (done.stdout, done.stderr[-2000:])


def test_the_picker_reads_its_endpoints_from_a_file(containers: dict[str, Container], config: str) -> None:
    image = containers["attache-epp"]
    assert image.config["config"]["Entrypoint"] == ["attache", "epp"]
    done = image.run(
        """
        attache epp --config-file /mnt/epp.yaml --secure-serving=false &
        python /mnt/fetch.py http://127.0.0.1:9090/metrics
        kill $!; wait $! || true
        """,
        config,
    )
    assert done.returncode == 0, (done.stdout[-500:], done.stderr[-2000:])
    assert "attache_" in done.stdout


def test_envoy_serves_a_request_with_a_simulated_engine(containers: dict[str, Container], config: str) -> None:
    image = containers["attache-serve"]
    words = " ".join([*image.config["config"]["Entrypoint"], *image.config["config"]["Cmd"]])
    assert words == "attache serve --config /config"
    done = image.run(
        f"""
        attache engine --port 8001 >/dev/null 2>&1 &
        {words} >/tmp/log 2>&1 &
        serve=$!
        python /mnt/fetch.py http://127.0.0.1:8080/v1/chat/completions "$(cat /mnt/ask.json)" ||
          {{ cat /tmp/log >&2; exit 1; }}
        kill $serve; wait $serve
        """,
        config,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["usage"]["completion_tokens"] == 5


def test_a_registrys_client_reads_the_archive(tmp_path: Path) -> None:
    archive = BUILT / "attache.oci.tar"
    copied = subprocess.run(
        [program("skopeo"), "--insecure-policy", "copy", f"oci-archive:{archive}", f"dir:{tmp_path}/copy"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert copied.returncode == 0, copied.stderr
    manifest = json.loads((tmp_path / "copy/manifest.json").read_text())
    assert len(manifest["layers"]) == 4

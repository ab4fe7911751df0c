# SPDX-License-Identifier: Apache-2.0
"""Where engines find their weights, and of which format they are."""

from __future__ import annotations

import pytest

from controller.api.model import ModelFormat, WeightsCache
from controller.models.runtimes.engine_settings import model_format, weights_from_uri


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("hf://org/model", "huggingface"),
        ("https://x/model.gguf", "gguf"),
        ("https://x/m.gguf?sig=a.b", "gguf"),
        ("s3://b/model.onnx", "onnx"),
    ],
)
def test_a_format_that_is_not_written_is_told_by_the_suffix(uri: str, name: str) -> None:
    assert model_format(uri, None).name == name
    assert model_format(uri, ModelFormat(name="other")).name == "other"


@pytest.mark.parametrize(
    ("cache", "source"),
    [
        (WeightsCache(), {"emptyDir": {}}),
        (WeightsCache(claim="c"), {"persistentVolumeClaim": {"claimName": "c"}}),
        (WeightsCache(host_path="/w"), {"hostPath": {"path": "/w", "type": "DirectoryOrCreate"}}),
    ],
)
def test_downloads_go_to_the_cache(cache: WeightsCache, source: dict[str, object]) -> None:
    found = weights_from_uri("hf://org/model", cache)
    assert found.is_downloaded
    assert found.volumes[1] == {"name": "weights", **source}
    assert found.path == "/mnt/models"


def test_a_single_file_is_found_by_its_name() -> None:
    assert weights_from_uri("https://x/dir/m.gguf?sig=a/b", WeightsCache()).path == "/mnt/models/m.gguf"


@pytest.mark.parametrize(
    ("uri", "path", "volume", "mount"),
    [
        (
            "pvc://c/a/b",
            "/mnt/models",
            {"persistentVolumeClaim": {"claimName": "c", "readOnly": True}},
            {"subPath": "a/b"},
        ),
        ("pvc://c/", "/mnt/models", {"persistentVolumeClaim": {"claimName": "c", "readOnly": True}}, {}),
        (
            "pvc://c/a/m.gguf",
            "/mnt/models/m.gguf",
            {"persistentVolumeClaim": {"claimName": "c", "readOnly": True}},
            {"subPath": "a"},
        ),
        ("file:///models/x", "/mnt/models", {"hostPath": {"path": "/models/x"}}, {}),
        ("file:///models/m.gguf", "/mnt/models/m.gguf", {"hostPath": {"path": "/models"}}, {}),
    ],
)
def test_what_is_there_is_mounted_and_not_copied(
    uri: str, path: str, volume: dict[str, object], mount: dict[str, object]
) -> None:
    found = weights_from_uri(uri, WeightsCache())
    assert not found.is_downloaded
    assert found.path == path
    assert found.volumes == ({"name": "models", **volume},)
    assert found.mounts == ({"name": "models", "mountPath": "/mnt/models", "readOnly": True, **mount},)

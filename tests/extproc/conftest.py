"""A small configuration and a pipeline over it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from extproc.config.load import load
from extproc.core.pipeline import Pipeline

if TYPE_CHECKING:
    from extproc.config.types import Snapshot

CONFIG = b"""
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec:
  model: llama-3.1-8b
  scrapeInterval: 0s
  endpoints: [{address: "10.0.0.1:8000"}, {address: "10.0.0.2:8000"}, {address: "10.0.0.3:8000"}]
---
apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: chat}
spec:
  modelName: chat
  loraAdapters: [sql]
  rules: [{targetModels: [{modelServerName: llama}]}]
"""


@pytest.fixture
def snapshot() -> Snapshot:
    return load({"all.yaml": CONFIG})


@pytest.fixture
def pipeline(snapshot: Snapshot) -> Pipeline:
    return Pipeline(snapshot, rng=random.Random(0), ticket_prefix="t")

# SPDX-License-Identifier: Apache-2.0
"""Answers that Envoy's routes give by themselves, as error objects that OpenAI's clients parse."""

from __future__ import annotations

import json

from envoy_data_plane.envoy.config.core.v3 import DataSource
from envoy_data_plane.envoy.config.route.v3 import DirectResponseAction


def error_answer(status: int, message: str, kind: str, code: str) -> DirectResponseAction:
    """An error of OpenAI's form; the listener's local replies say that it is JSON."""
    error = {"message": message, "type": kind, "param": None, "code": code}
    return DirectResponseAction(status=status, body=DataSource(inline_string=json.dumps({"error": error})))

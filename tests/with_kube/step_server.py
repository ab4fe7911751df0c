# SPDX-License-Identifier: Apache-2.0
"""A transformer and an explainer with the arguments of KServe's SDK, and nothing of it: run in a pod."""

from __future__ import annotations

import argparse
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.request import urlopen


class Step(BaseHTTPRequestHandler):
    """Adds 1 to each prediction, or explains it."""

    predictor: str
    name: str

    def do_POST(self) -> None:
        """Ask the predictor first."""
        body = self.rfile.read(int(self.headers["content-length"]))
        with urlopen(f"http://{self.predictor}/v1/models/{self.name}:predict", data=body, timeout=60) as answer:
            sums: list[float] = json.load(answer)["predictions"]
        if self.path == f"/v1/models/{self.name}:explain":
            self._answer({"explanations": [f"sum {one}" for one in sums]})
        else:
            self._answer({"predictions": [one + 1 for one in sums]})

    def _answer(self, content: Any) -> None:  # noqa: ANN401 - any JSON
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    for flag in ("model_name", "http_port", "predictor_host", "predictor_protocol", "predictor_use_ssl"):
        parser.add_argument(f"--{flag}", required=True)
    parser.add_argument("--predictor_request_timeout_seconds", type=int, required=True)
    chosen = parser.parse_args()
    if (chosen.predictor_protocol, chosen.predictor_use_ssl) != ("v1", "false"):
        sys.exit("not what a Model of V1 gives")
    Step.predictor, Step.name = chosen.predictor_host, chosen.model_name
    ThreadingHTTPServer((chosen.host, int(chosen.http_port)), Step).serve_forever()

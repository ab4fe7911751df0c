# SPDX-License-Identifier: Apache-2.0
"""A transformer and an explainer of KServe's SDK, as its users write them. Run by the Python that has KServe."""

import argparse
import asyncio
from typing import Any

from kserve import Model, ModelServer, model_server  # type: ignore[import-not-found]


class Centimetres(Model):  # type: ignore[misc]
    """Clients send millimetres, and get names of classes. ``instances`` may be a word instead, to misbehave."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.ready = True

    async def preprocess(self, payload: Any, headers: Any = None) -> Any:  # noqa: ANN401, ARG002 - KServe's
        """To the predictor's units."""
        if payload["instances"] == "hang":
            await asyncio.sleep(3600)
        return {"instances": [[value / 10 for value in row] for row in payload["instances"]]}

    async def postprocess(self, result: Any, headers: Any = None, response_headers: Any = None) -> Any:  # noqa: ANN401, ARG002 - KServe's
        """From the predictor's numbers."""
        return {"predictions": [("setosa", "versicolor", "virginica")[one] for one in result["predictions"]]}


class Occlusion(Model):  # type: ignore[misc]
    """Which inputs decide: those without which the predictor answers otherwise."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.ready = True

    async def explain(self, payload: Any, headers: Any = None) -> Any:  # noqa: ANN401 - KServe's
        """Ask the predictor for each input without one of its numbers."""
        found = []
        for row in payload["instances"]:
            without = [[0.0 if place == one else value for place, value in enumerate(row)] for one in range(len(row))]
            (own, *others) = (await self.predict({"instances": [row, *without]}, headers))["predictions"]
            found.append([number for number, other in enumerate(others) if other != own])
        return {"explanations": found}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(parents=[model_server.parser])
    parser.add_argument("--step", choices=("transformer", "explainer"), required=True)
    chosen, _ = parser.parse_known_args()
    step = Centimetres if chosen.step == "transformer" else Occlusion
    ModelServer().start([step(chosen.model_name)])

# SPDX-License-Identifier: Apache-2.0
"""KServe's SDK server with one scikit-learn model, as its sklearnserver, which the index does not have. Run by the
Python that has KServe, not by ours.
"""

import argparse
from typing import Any

import joblib  # type: ignore[import-not-found]
from kserve import Model, ModelServer, model_server  # type: ignore[import-not-found]
from kserve.utils.utils import get_predict_input, get_predict_response  # type: ignore[import-not-found]


class SklearnModel(Model):  # type: ignore[misc]
    """The classes of a classifier; of a transformer, what it makes."""

    def __init__(self, name: str, directory: str) -> None:
        super().__init__(name)
        model = joblib.load(f"{directory}/model.joblib")
        self._answer = model.predict if hasattr(model, "predict") else model.transform
        self.ready = True

    async def predict(self, payload: Any, headers: Any = None, response_headers: Any = None) -> Any:  # noqa: ANN401, ARG002 - KServe's
        """In the protocol of the request."""
        return get_predict_response(payload, self._answer(get_predict_input(payload)), self.name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(parents=[model_server.parser])
    parser.add_argument("--model_dir", required=True)
    chosen = parser.parse_args()
    ModelServer().start([SklearnModel(chosen.model_name, chosen.model_dir)])

# SPDX-License-Identifier: Apache-2.0
"""KServe's SDK server with one model, as its sklearnserver, xgbserver and lgbserver, which the index does not have. Run
by the Python that has KServe, not by ours.
"""

import argparse
from pathlib import Path
from typing import Any

from kserve import Model, ModelServer, model_server  # type: ignore[import-not-found]
from kserve.utils.utils import get_predict_input, get_predict_response  # type: ignore[import-not-found]


class OneModel(Model):  # type: ignore[misc]
    """The classes of a classifier; of a transformer, what it makes; of trees, what they say."""

    def __init__(self, name: str, file: Path, threads: int) -> None:
        super().__init__(name)
        self._answer = _loaded(file, threads)
        self.ready = True

    async def predict(self, payload: Any, headers: Any = None, response_headers: Any = None) -> Any:  # noqa: ANN401, ARG002 - KServe's
        """In the protocol of the request."""
        return get_predict_response(payload, self._answer(get_predict_input(payload)), self.name)


def _loaded(file: Path, threads: int) -> Any:  # noqa: ANN401 - a function of a library
    """Loaded as that server loads a file of this suffix."""
    if file.suffix == ".joblib":
        import joblib  # type: ignore[import-not-found]  # noqa: PLC0415 - of the format alone

        model = joblib.load(file)
        return model.predict if hasattr(model, "predict") else model.transform
    if file.suffix == ".bst":
        import lightgbm  # type: ignore[import-not-found]  # noqa: PLC0415 - of the format alone

        return lightgbm.Booster(params={"nthread": threads}, model_file=str(file)).predict
    import xgboost  # type: ignore[import-not-found]  # noqa: PLC0415 - of the format alone

    booster = xgboost.Booster(params={"nthread": threads}, model_file=bytearray(file.read_bytes()))
    return lambda rows: booster.predict(xgboost.DMatrix(rows, nthread=threads))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(parents=[model_server.parser])
    parser.add_argument("--model_dir", required=True)
    parser.add_argument("--nthread", type=int, default=1)
    chosen = parser.parse_args()
    (only,) = Path(chosen.model_dir).iterdir()
    ModelServer().start([OneModel(chosen.model_name, only, chosen.nthread)])

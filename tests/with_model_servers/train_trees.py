# SPDX-License-Identifier: Apache-2.0
"""Boosted trees of irises as XGBoost and LightGBM write them, each in a directory of its own below the first argument.
Run by the Python that has KServe, not by ours.
"""

import sys
from pathlib import Path

import lightgbm  # type: ignore[import-not-found]
import xgboost  # type: ignore[import-not-found]
from sklearn.datasets import load_iris  # type: ignore[import-not-found]


def main(directory: Path) -> None:
    """Write both; their answer is the number of the class."""
    inputs, classes = load_iris(return_X_y=True)
    for name in ("xgboost", "lightgbm"):
        (directory / name).mkdir()
    settings = {"objective": "multi:softmax", "num_class": 3, "nthread": 1}
    xgboost.train(settings, xgboost.DMatrix(inputs, classes), 5).save_model(directory / "xgboost" / "model.ubj")
    trees = lightgbm.train(
        {"objective": "regression", "num_threads": 1, "verbose": -1}, lightgbm.Dataset(inputs, classes)
    )
    trees.save_model(directory / "lightgbm" / "model.bst")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

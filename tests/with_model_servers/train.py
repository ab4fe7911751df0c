# SPDX-License-Identifier: Apache-2.0
"""Small scikit-learn models, each in a directory of its own below the first argument: two classifiers of irises, and
one that gives back what it gets. Run by the Python that has MLServer, not by ours.
"""

import sys
from pathlib import Path

import joblib  # type: ignore[import-not-found]
from sklearn.datasets import load_iris  # type: ignore[import-not-found]
from sklearn.linear_model import LogisticRegression  # type: ignore[import-not-found]
from sklearn.preprocessing import FunctionTransformer  # type: ignore[import-not-found]
from sklearn.tree import DecisionTreeClassifier  # type: ignore[import-not-found]


def main(directory: Path) -> None:
    """Write all of them."""
    inputs, classes = load_iris(return_X_y=True)
    models = {
        "tree": DecisionTreeClassifier(random_state=7).fit(inputs, classes),
        "logistic": LogisticRegression(max_iter=500).fit(inputs, classes),
        "identity": FunctionTransformer().fit(inputs),
    }
    for name, model in models.items():
        (directory / name).mkdir()
        joblib.dump(model, directory / name / "model.joblib")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

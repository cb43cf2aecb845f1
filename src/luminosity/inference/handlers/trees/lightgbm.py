"""``LightGBMModelHandler``: models of LightGBM on columns of a table."""

from __future__ import annotations

from typing import Any

import numpy as np

from luminosity.extras import require
from luminosity.inference.blocks import Block
from luminosity.inference.handlers.trees.features import Features
from luminosity.inference.handlers.trees.tree_handler import TreeHandler, classes_of_two, no_probabilities
from luminosity.inference.threads import limit_threads

__all__ = ["LightGBMModelHandler"]

_ONE_OF_MANY = ("multiclass", "multiclassova")


class LightGBMModelHandler(TreeHandler):
    """Predicts with a model of LightGBM, on columns of a table by their names.

    ::

        table | Enrich(score=Column(LightGBMModelHandler("churn.txt"), ["age", "city", "income"]))

    Columns are matched with the features by name, whatever their order, before the run starts if the model's file is
    on this machine. Null and NaN are missing values. Features that are categories take the values of the column, which
    the file of a model has that was trained on pandas; for others pass ``categories``, or columns of codes. A value
    that is no category of the model counts as missing, as in LightGBM itself.

    Args:
        path: a file that ``save_model`` has written, on any file system that Beam knows.
        method: ``"predict"`` gives what ``predict`` of LightGBM's estimators does: a class of a classifier as its
            number, otherwise a value. ``"predict_proba"`` gives the probability of each class, ``"raw"`` the sums of
            the leaves before they are transformed, ``"leaf"`` the leaf of each tree.
        categories: for a feature, its categories in the order of their codes, if the file has only codes.
        options: those of Beam's ``ModelHandler``: ``max_batch_size``, ``model_copies`` and so on.
    """

    def read(self, path: str) -> Any:
        """Return the model in a file of this machine."""
        return require("lightgbm", "lightgbm").Booster(model_file=path)

    def features_of(self, model: Any) -> Features:
        """Return the features that a model's file describes."""
        names = tuple(model.feature_name())
        is_named = names != tuple(f"Column_{place}" for place in range(len(names)))
        places = model.params.get("categorical_feature") or []
        known = [tuple(values) for values in model.pandas_categorical or ()]
        # The file has the values of pandas in the order of the columns, if it has any.
        values = known if len(known) == len(places) else [None] * len(places)
        categories = dict(zip((names[place] for place in places), values, strict=True))
        return Features(len(names), names if is_named else None, categories)

    def collate(self, prepared: Block) -> Any:
        """Return the features as a matrix."""
        return self.features.matrix(prepared, np.float64, new_are_missing=True)

    def predict(self, model: Any, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        """Return a prediction for each row; ``inference_args`` go to ``Booster.predict``."""
        arguments: dict[str, Any] = {"num_threads": limit_threads(), **(inference_args or {})}
        if self._method == "leaf":
            return model.predict(batch, pred_leaf=True, **arguments).astype(np.int32).reshape(len(batch), -1)
        if self._method == "raw":
            return model.predict(batch, raw_score=True, **arguments)
        found = model.predict(batch, **arguments)
        objective = model.params.get("objective")
        if objective == "binary":
            return classes_of_two(found, self._method)
        if objective in _ONE_OF_MANY:
            return found.argmax(axis=1) if self._method == "predict" else found
        if self._method == "predict_proba":
            raise no_probabilities(self.model_id, objective)
        return found

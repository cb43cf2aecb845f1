"""``XGBoostModelHandler``: models of XGBoost on columns of a table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from luminosity.extras import require
from luminosity.inference.blocks import Block
from luminosity.inference.handlers.trees.features import Features
from luminosity.inference.handlers.trees.tree_handler import TreeHandler, classes_of_two, no_probabilities, softmax
from luminosity.inference.threads import limit_threads

__all__ = ["XGBoostModelHandler"]

_CATEGORY = "c"  # the type of a feature


@dataclass
class _Model:
    booster: Any
    objective: str
    trees: tuple[int, int]
    """The rounds that predict: those up to the best one of an early stop, (0, 0) for all."""


class XGBoostModelHandler(TreeHandler):
    """Predicts with a model of XGBoost, on columns of a table by their names.

    ::

        table | Enrich(score=Column(XGBoostModelHandler("churn.ubj"), ["age", "city", "income"]))

    Columns are matched with the features by name, whatever their order, before the run starts if the model's file is
    on this machine. Null and NaN are missing values. Features that are categories take the values of the column: files
    of XGBoost 3.1 and later have the values, for others pass ``categories``. A value that is no category of the model
    fails its row, as in XGBoost itself.

    Args:
        path: a file that ``save_model`` has written (``.json``, ``.ubj``), on any file system that Beam knows.
        method: ``"predict"`` gives what ``predict`` of XGBoost's estimators does: a class of a classifier as its
            number, otherwise a value. ``"predict_proba"`` gives the probability of each class, ``"raw"`` the sums of
            the leaves before they are transformed, ``"leaf"`` the leaf of each tree.
        categories: for a feature, its categories in the order of their codes, if the file has only codes.
        options: those of Beam's ``ModelHandler``: ``max_batch_size``, ``model_copies`` and so on.

    If training stopped early, the trees up to the best round predict, as with XGBoost's estimators.
    """

    def read(self, path: str) -> Any:
        """Return the model in a file of this machine."""
        xgboost = require("xgboost", "xgboost")
        booster = xgboost.Booster({"nthread": limit_threads()})
        booster.load_model(path)
        settings = json.loads(booster.save_config())
        best = booster.attr("best_iteration")
        trees = (0, 0) if best is None else (0, int(best) + 1)
        return _Model(booster, settings["learner"]["objective"]["name"], trees)

    def features_of(self, model: _Model) -> Features:
        """Return the features that a model's file describes."""
        booster = model.booster
        names = None if booster.feature_names is None else tuple(booster.feature_names)
        kinds = booster.feature_types or []
        categories: dict[str, tuple[Any, ...] | None] = {
            name: None for name, kind in zip(names or (), kinds, strict=False) if kind == _CATEGORY
        }
        if categories and hasattr(booster, "get_categories"):  # since 3.1
            found = booster.get_categories(export_to_arrow=True).to_arrow() or []
            categories |= {name: tuple(values.to_pylist()) for name, values in found if values is not None}
        return Features(booster.num_features(), names, categories)

    def collate(self, prepared: Block) -> Any:
        """Return the features as a matrix."""
        return self.features.matrix(prepared, np.float32, new_are_missing=False)

    def predict(self, model: _Model, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        """Return a prediction for each row; ``inference_args`` go to ``Booster.predict``."""
        booster, threads = model.booster, limit_threads()
        booster.set_param({"nthread": threads})
        matrix = require("xgboost", "xgboost").DMatrix(
            batch,
            feature_names=booster.feature_names,
            feature_types=booster.feature_types,
            enable_categorical=True,
            nthread=threads,
        )
        arguments = {"iteration_range": model.trees, **(inference_args or {})}
        if self._method == "leaf":
            leaves = booster.predict(matrix, pred_leaf=True, **arguments).astype(np.int32)
            return leaves.reshape(len(batch), -1)
        if self._method == "raw":
            return booster.predict(matrix, output_margin=True, **arguments)
        if model.objective == "multi:softmax" and self._method == "predict_proba":
            return softmax(booster.predict(matrix, output_margin=True, **arguments))
        found = booster.predict(matrix, **arguments)
        return self._of_classes(model, found)

    def _of_classes(self, model: _Model, found: Any) -> Any:
        """Return probabilities as the classes or the probabilities of all classes; other values unchanged."""
        if model.objective == "binary:logistic":
            return classes_of_two(found, self._method)
        if model.objective == "multi:softprob":
            return found.argmax(axis=1) if self._method == "predict" else found
        if self._method == "predict_proba":
            raise no_probabilities(self.model_id, model.objective)
        return found.astype(np.int64) if model.objective == "multi:softmax" else found

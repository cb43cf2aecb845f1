"""What the handlers of boosted trees share: rows of columns by name, files, versions and what they return."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from apache_beam.io.filesystems import FileSystems
from apache_beam.ml.inference.base import PredictionResult
from typing_extensions import Unpack

from luminosity._shared.text import first_line
from luminosity.errors import InvalidArgument, ModelUnavailable
from luminosity.inference.blocks import Block, rows
from luminosity.inference.files.local import check_exists, local_copy
from luminosity.inference.handler import Handler, HandlerOptions
from luminosity.inference.handlers.trees.features import Features

__all__ = ["Method", "TreeHandler", "classes_of_two", "no_probabilities", "softmax"]

Method: TypeAlias = Literal["predict", "predict_proba", "raw", "leaf"]
_HALF = 0.5
_SHOWN_CHARACTERS = 300  # of an error of a library


class TreeHandler(Handler[Any, PredictionResult, Any]):
    """A handler of a model of trees in a file.

    Examples are dicts, or columns of a table by name; a model that was trained on a matrix also takes vectors.
    """

    columnar = True
    takes_nulls = True
    takes_names = True
    """``Enrich`` passes columns by their names."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        method: Method = "predict",
        categories: Mapping[str, Sequence[Any]] | None = None,
        **options: Unpack[HandlerOptions],
    ) -> None:
        super().__init__(**options)
        if method not in get_args(Method):
            raise InvalidArgument(f"found method={method!r}, expected one of {', '.join(get_args(Method))}")
        self._path = os.fspath(path)
        self._method: Method = method
        self._categories = {name: tuple(values) for name, values in (categories or {}).items()}
        self._features: tuple[str, Features] | None = None

    @abstractmethod
    def read(self, path: str) -> Any:
        """Return the model in a file of this machine."""

    @abstractmethod
    def features_of(self, model: Any) -> Features:
        """Return the features that a model's file describes."""

    @property
    def model_id(self) -> str:
        """The path of the model's file."""
        return self._path

    @property
    def accelerators(self) -> tuple[str, ...]:
        """None: the model computes on the CPU."""
        return ()

    def check_files(self) -> None:
        """Raise ``ModelUnavailable`` if the model's file is not on this machine."""
        check_exists(self._path)

    def update_model_path(self, model_path: str | None = None) -> None:
        """Switch to another version of the model."""
        self._path = model_path or self._path

    def check_input_type(self, kind: pa.DataType) -> None:
        """Raise ``InvalidType`` unless rows have all features; reads the model's file if it is on this machine.

        A file that is not there, or the name of a model in a registry, is not looked at: ``check_files`` tells.
        """
        if FileSystems.get_scheme(self._path) in (None, "file") and os.path.isfile(local_copy(self._path)):
            self.features.check(kind, repr(self._path))

    def check_prepares_like(self, first: TreeHandler) -> None:
        """Raise if this version takes features that the first version did not take: they were not passed on."""
        before, now = first.features, self.features
        missing = set(now.names or ()) - set(before.names or ())
        if (
            missing
            or (now.names is None) != (before.names is None)
            or (now.names is None and now.count != before.count)
        ):
            raise ModelUnavailable(
                f"{self._path!r} takes other features than {first.model_id!r}, with which the pipeline started: "
                f"{', '.join(sorted(missing)) or now.count}",
                fix="start a new run for a model with other features",
            )

    @property
    def features(self) -> Features:
        """The features of the model at the current path. Reads its file once in a process."""
        if self._features is None or self._features[0] != self._path:
            self.load_model()
        assert self._features is not None
        return self._features[1]

    def load_model(self) -> Any:
        """Read the model. Raises ``ModelUnavailable`` for a file that has none."""
        path = local_copy(self._path)
        check_exists(path)
        try:
            model = self.read(path)
        except Exception as error:  # each library has its own errors for a file that it can't read
            reason = first_line(str(error), _SHOWN_CHARACTERS)  # XGBoost adds its stack
            raise ModelUnavailable(f"{self._path!r} can't be read by {type(self).__name__}: {reason}") from error
        found = self.features_of(model)
        unknown = set(self._categories) - set(found.names or self._categories)
        if unknown:
            raise InvalidArgument(
                f"found categories= for {sorted(unknown)}, expected features of {self._path!r}: "
                f"{', '.join(found.names or ())}"
            )
        categories = {**found.categories, **self._categories}
        self._features = self._path, Features(found.count, found.names, categories)
        return model

    def prepare(self, block: Block) -> Block:
        """Return columns by name as a record batch, and vectors as a matrix."""
        if isinstance(block, pa.RecordBatch):
            return block
        if isinstance(block, pa.StructArray):
            return pa.RecordBatch.from_struct_array(block)
        examples = rows(block)
        if len(examples) and isinstance(examples[0], dict):
            return pa.RecordBatch.from_pylist(cast("list[dict[str, Any]]", list(examples)))
        return np.asarray(examples, np.float64)

    def get_num_bytes(self, batch: Any) -> int:
        """Return the bytes of the matrix."""
        return int(batch.nbytes)


def classes_of_two(found: Any, method: Method) -> Any:
    """Return probabilities of one of two classes as the classes, or as the probabilities of both.

    A model of several labels gives one probability for each of them.
    """
    if method == "predict":
        return (found > _HALF).astype(np.int64)
    return found if found.ndim > 1 else np.stack([1 - found, found], axis=1)


def no_probabilities(model: str, objective: object) -> InvalidArgument:
    """Return the error for ``method="predict_proba"`` of a model of values."""
    return InvalidArgument(
        f"found method='predict_proba', but {model!r} has the objective {objective}, which gives no probabilities of "
        "classes",
        fix="use method='predict'",
    )


def softmax(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the probabilities of classes, for each row."""
    shifted = np.exp(values - values.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)

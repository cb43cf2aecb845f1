"""Beam's fake handlers for a host that holds a shared model itself, where Beam's holds a proxy to it.

They look at the class of their model for the name of Beam's module; here a model that is to be shared has that name.
"""

from __future__ import annotations

from typing import Any

from apache_beam.ml.inference import base_test


class FakeModelHandler(base_test.FakeModelHandler):
    def load_model(self) -> Any:
        return _renamed(super().load_model(), self._multi_process_shared)


class FakeModelHandlerReturnsPredictionResult(base_test.FakeModelHandlerReturnsPredictionResult):
    def load_model(self) -> Any:
        return _renamed(super().load_model(), self._multi_process_shared)


def _renamed(model: Any, is_shared: bool) -> Any:
    if is_shared:
        model.__class__ = type(f"multi_process_shared_{type(model).__name__}", (type(model),), {})
    return model

"""Twenty models of which five fit, eight threads: our host, Beam's model manager, Beam's KeyedModelHandler.

Every thread asks one model after another, some more often than others or all alike, for a few predictions. A model is a
matrix that is read from a file. Counted are loads, beside those of a cache that evicts what was used longest ago and
gets the same requests one after another; how many models were in memory at once; and requests that failed or gave a
wrong answer. Beam's manager asks nvidia-smi how full a device is; here it is told what the matrices take.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import _measure
import numpy as np
from apache_beam.ml.inference.base import KeyedModelHandler, KeyModelMapping

from luminosity import Handler

_MODELS = 20
_FIT = 5
_THREADS = 8
_REQUESTS = 100  # of each thread
_ROWS = 16  # of a request
_SIZE = 1000  # of a matrix
_BYTES = 8 * _SIZE * _SIZE
_WALL_S = 120


class Matrix:
    """A model: what it answers tells which one it was. Counts how many there are."""

    lock = threading.Lock()
    loads = here = most_here = 0

    def __init__(self, path: str) -> None:
        self.weights: Any = np.load(path)
        with Matrix.lock:
            Matrix.loads += 1
            Matrix.here += 1
            Matrix.most_here = max(Matrix.most_here, Matrix.here)
        weakref.finalize(self.weights, Matrix.gone)

    @classmethod
    def gone(cls) -> None:
        with cls.lock:
            cls.here -= 1

    def mock_model_unsafe_hard_delete(self) -> None:
        """Beam's manager calls this in place of what ends the model's process: whoever still uses it, fails."""
        self.weights = None

    def answers(self, rows: list[float]) -> list[float]:
        return (self.weights[: len(rows), :].sum(1) * rows).tolist()


class MatrixHandler(Handler[float, Any, Matrix]):
    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def load_model(self) -> Matrix:
        return Matrix(self._path)

    def memory(self, model: Matrix) -> int:
        return _BYTES

    def predict(self, model: Matrix, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        return model.answers(list(batch))


Ask = Callable[[int, list[float]], list[float]]


def our_host(paths: list[str]) -> Ask:
    from luminosity.inference.host.host import ModelHost
    from luminosity.inference.host.interface import LaneSettings

    host = ModelHost(budget=_FIT * _BYTES)
    lanes = [host.enter(name, lambda path=path: MatrixHandler(path), LaneSettings()) for name, path in enumerate(paths)]

    def ask(name: int, rows: list[float]) -> list[float]:
        session = host.open()
        session.submit(lanes[name], rows, np.ones(len(rows)), None)
        answers: dict[int, float] = {}
        for outcomes in session.finish():
            for outcome in outcomes:
                if outcome.error is not None:
                    raise outcome.error
                answers.update(zip(outcome.places.tolist(), outcome.values or [], strict=True))
        session.close()
        return [answers[place] for place in range(len(rows))]

    return ask


def model_manager(paths: list[str]) -> Ask:
    from apache_beam.ml.inference.model_manager import GPUMonitor, ModelManager

    class Monitor(GPUMonitor):
        """Knows at once what a device's would know half a second later."""

        def start(self) -> None:
            pass

        def refresh(self) -> None:
            pass

        def reset_peak(self) -> None:
            pass

        def get_stats(self) -> tuple[float, float, float]:
            used = Matrix.here * _BYTES / 1e6
            return used, used, (_FIT + 0.5) * _BYTES / 1e6

    manager = ModelManager(monitor=Monitor(), slack_percentage=0.0, wait_timeout_seconds=_WALL_S)

    def ask(name: int, rows: list[float]) -> list[float]:
        model = manager.acquire_model(str(name), partial(Matrix, paths[name]))
        try:
            return model.answers(rows)
        finally:
            manager.release_model(str(name), model)

    return ask


def keyed_handler(paths: list[str]) -> Ask:
    mappings = [KeyModelMapping([str(name)], MatrixHandler(path)) for name, path in enumerate(paths)]
    handler = KeyedModelHandler(mappings, max_models_per_worker_hint=_FIT)
    handler.override_metrics("benchmark")
    manager = handler.load_model()

    def ask(name: int, rows: list[float]) -> list[float]:
        return [result.inference for _, result in handler.run_inference([(str(name), row) for row in rows], manager)]

    return ask


def measured(make: Callable[[list[str]], Ask], skewed: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/{name}.npy" for name in range(_MODELS)]
        for name, path in enumerate(paths):
            np.save(path, np.full((_SIZE, _SIZE), float(name)))
        return asked_by_threads(make(paths), skewed)


def asked_by_threads(ask: Ask, skewed: bool) -> dict[str, float]:
    weights = [1 / (name + 1) if skewed else 1.0 for name in range(_MODELS)]
    requests: list[int] = []
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(_REQUESTS):
            name = rng.choices(range(_MODELS), weights)[0]
            rows = [rng.random() for _ in range(_ROWS)]
            requests.append(name)
            try:
                right = np.allclose(ask(name, rows), [name * _SIZE * row for row in rows])
            except Exception:
                right = False
            if not right:
                wrong.append(name)

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(_THREADS)]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, begun + _WALL_S - time.monotonic()))
    ideal = lru_loads(requests)
    return {
        "seconds": time.monotonic() - begun,
        "unanswered": _THREADS * _REQUESTS - len(requests) + sum(thread.is_alive() for thread in threads),
        "wrong": len(wrong),
        "most here": Matrix.most_here,
        "loads": Matrix.loads,
        "ideal loads": ideal,
        "loads/ideal": Matrix.loads / ideal,
    }


def lru_loads(requests: list[int]) -> int:
    here: OrderedDict[int, None] = OrderedDict()
    loads = 0
    for name in requests:
        if name not in here:
            loads += 1
            if len(here) == _FIT:
                here.popitem(last=False)
        here[name] = None
        here.move_to_end(name)
    return loads


def report(results: _measure.Results) -> None:
    _measure.print_table(results)
    for access in ("uniform", "skewed"):
        ours = results[f"our host, {access}"]
        _measure.print_figure(f"{access}: loads, of an ideal cache's", ours["loads/ideal"], at_most=1.2)
        _measure.print_figure(f"{access}: wrong or unanswered", ours["wrong"] + ours["unanswered"], at_most=0)
        _measure.print_figure(f"{access}: models in memory", ours["most here"], at_most=_FIT)


if __name__ == "__main__":
    kinds = {"our host": our_host, "model manager": model_manager, "KeyedModelHandler": keyed_handler}
    _measure.main(
        {
            f"{kind}, {access}": partial(measured, make, access == "skewed")
            for kind, make in kinds.items()
            for access in ("uniform", "skewed")
        },
        report,
    )

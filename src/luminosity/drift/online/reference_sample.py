"""The rows that a stream is compared with: a bounded sample of the reference, prepared for the kernel."""

from __future__ import annotations

from functools import cache, cached_property
from typing import Any

import numpy as np

from luminosity.drift.distances import SAMPLE_ROWS
from luminosity.drift.kernels import BlockKernel, Kernel
from luminosity.drift.pair import centre_of
from luminosity.drift.rows import as_rows, same_width
from luminosity.errors import DriftError

__all__ = ["MOST_AT_ONCE", "Reference"]

_SIZES = (1, 16, 256)  # numbers of new rows that code is compiled for; other numbers are filled up
MOST_AT_ONCE = _SIZES[-1]


class Reference:
    """Centred rows of the reference, and the mean kernel of all their pairs."""

    def __init__(self, rows: Any, centre: Any, kernel: Kernel, mean_kernel: float) -> None:
        self.rows = rows
        self.kernel = kernel
        self.mean_kernel = mean_kernel
        self._centre = centre

    @classmethod
    def sampled(cls, values: Any, kernel: Kernel, most: int, seed: int) -> tuple[Reference, Any]:
        """Return at most ``most`` rows in random order, and the matrix of their kernels, with zeros on its diagonal."""
        if isinstance(kernel, BlockKernel) or not isinstance(kernel, Kernel):  # type: ignore[redundant-expr]
            raise DriftError(
                f"found kernel={type(kernel).__name__}, expected one kernel of rows of numbers: RBF, Laplacian, "
                "Linear, Polynomial or RowKernel"
            )
        rows = as_rows(values, "the reference")
        rows = rows[np.random.default_rng((seed, 4)).permutation(len(rows))[:most]]
        sample = rows[:SAMPLE_ROWS].astype(np.float64)
        centre = centre_of([kernel], sample)
        found = cls((rows - centre).astype(np.float32), centre, kernel.resolved(sample - centre), 0.0)
        gram = np.concatenate(
            [
                found.values(found.rows[start : start + MOST_AT_ONCE], found._held)
                for start in range(0, len(rows), MOST_AT_ONCE)
            ]
        )
        np.fill_diagonal(gram, 0)
        return found, gram

    def first(self, count: int, gram: Any) -> Reference:
        """Return the first ``count`` of these rows as a reference."""
        mean_kernel = float(gram[:count, :count].sum(dtype=np.float64) / (count * (count - 1)))
        return Reference(self.rows[:count].copy(), self._centre, self.kernel, mean_kernel)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def width(self) -> int:
        """The numbers of a row."""
        return self.rows.shape[1]

    def prepared(self, batch: Any) -> Any:
        """Return one row or many, checked and centred like the reference's rows."""
        rows = as_rows([batch] if self._is_one(batch) else batch, "the batch", least=0)
        if len(rows) == 0:
            return self.rows[:0]
        same_width(self.rows, rows)
        return (rows - self._centre).astype(np.float32)

    def _is_one(self, batch: Any) -> bool:
        try:
            dimensions = np.ndim(batch)
        except ValueError:  # rows of several widths
            return False
        return dimensions == 0 or (dimensions == 1 and self.width > 1 and len(batch) > 0)

    def witness(self, rows: Any) -> Any:
        """Return the mean kernel of each row with the reference."""
        return self.values(rows, self._held).mean(axis=1, dtype=np.float64)

    def values(self, rows: Any, others: Any) -> Any:
        """Return the kernel of each of a few rows with each of the others."""
        filled = np.zeros((_size(len(rows)), self.width), dtype=np.float32)
        filled[: len(rows)] = rows
        parameters = tuple(map(np.float32, self.kernel.parameters()))
        return np.asarray(_compiled()(self.kernel.form(), parameters, filled, others))[: len(rows)]

    def values_in_window(self, rows: Any, window: Any, most: int) -> Any:
        """Return the kernel of each new row with the rows in a window of at most ``most``, then with all new rows."""
        filled = np.zeros((most + _size(len(rows)), self.width), dtype=np.float32)
        filled[: len(window)], filled[most : most + len(rows)] = window, rows
        found = self.values(rows, filled)
        return np.concatenate([found[:, : len(window)], found[:, most : most + len(rows)]], axis=1)

    @cached_property
    def _held(self) -> Any:
        """The rows on the device where compiled code runs."""
        import jax

        return jax.device_put(self.rows)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_held"}


def _size(rows: int) -> int:
    return next(size for size in _SIZES if size >= rows)


@cache
def _compiled() -> Any:
    import jax

    def values(form: Kernel, parameters: Any, x: Any, y: Any) -> Any:
        return form.values(parameters, x, y)

    return jax.jit(values, static_argnums=0)

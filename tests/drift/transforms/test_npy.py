"""Arrays in files, read some rows at a time."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from luminosity.cli.common.table_options import TableReader
from luminosity.cli.drift.sources import open_source, read_sample
from luminosity.drift.transforms.reference_source import npy_rows
from luminosity.errors import DriftError

_ROWS = np.random.default_rng(0).normal(size=(1000, 3))


def saved(array: Any) -> io.BytesIO:
    file = io.BytesIO()
    np.save(file, array)
    return io.BytesIO(file.getvalue())


def test_no_more_is_read_than_requested() -> None:
    file = saved(_ROWS)
    pieces = npy_rows("x.npy", file, 100)
    assert np.array_equal(next(pieces), _ROWS[:100])
    assert file.tell() == 128 + 100 * 3 * 8  # the header and the requested rows
    assert np.array_equal(np.concatenate(list(pieces)), _ROWS[100:])


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(_ROWS),
        _ROWS[:, 0],
        _ROWS.astype(np.float16),
        (10 * _ROWS).astype(">i4"),
        _ROWS > 0,
        _ROWS[:0],
        _ROWS[:, :0],
    ],
)
def test_all_types_of_numbers(array: Any) -> None:
    found = list(npy_rows("x.npy", saved(array), 300))
    assert all(len(piece) <= 300 for piece in found)
    expected = array.reshape(len(array), -1) if array.ndim == 1 else array
    assert np.array_equal(np.concatenate(found) if found else expected[:0], expected)


@pytest.mark.parametrize(
    ("file", "match"),
    [
        (saved(np.array([{}, None])), r"x\.npy holds Python objects, which are not unpickled, expected numbers"),
        (saved(np.zeros(3, [("a", "f4")])), r"x\.npy holds \[\('a', '<f4'\)\], expected numbers"),
        (saved(_ROWS.reshape(10, 100, 3)), r"x\.npy has 3 dimensions, expected 2"),
        (
            io.BytesIO(saved(_ROWS).getvalue()[:-1]),
            r"x\.npy as an array: it is cut off, its header announces 1,000 rows",
        ),
        (io.BytesIO(b"text"), r"can't read x\.npy as an array: "),
        (io.BytesIO(b"\x93NUMPY\x09\x00"), r"can't read x\.npy as an array: it is of version 9\.0"),
    ],
)
def test_files_without_a_matrix_of_numbers_are_errors(file: Any, match: str) -> None:
    with pytest.raises(DriftError, match=match):
        list(npy_rows("x.npy", file, 300))


def test_the_command_does_not_copy_rows_of_a_single_file(tmp_path: Path) -> None:
    def read(pattern: str, most: int | None = None) -> Any:
        return read_sample(
            open_source(str(tmp_path / pattern), [], TableReader("drift")), most, 0, False, lambda _: None
        ).rows

    np.save(tmp_path / "whole.npy", _ROWS)
    np.save(tmp_path / "whole-numbers.npy", (10 * _ROWS).astype(int))
    for name, expected in (("whole.npy", _ROWS), ("whole-numbers.npy", (10 * _ROWS).astype(int))):
        rows = read(name)
        assert np.array_equal(rows, expected)
        assert rows.flags.writeable == (name == "whole-numbers.npy")  # A mapped file is not writeable.
    assert read("whole.npy", 10).flags.writeable
    for part in range(2):
        np.save(tmp_path / f"part-{part}.npy", _ROWS[part::2])
    assert np.array_equal(read("part-*.npy"), np.concatenate([_ROWS[::2], _ROWS[1::2]]))

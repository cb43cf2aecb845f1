"""The accumulator of an evaluation: mergeable counts of distinct rows, for the whole table and for each slice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from luminosity.errors import EvaluationError, Fix
from luminosity.evaluation.columns import RowCollector, codes_of, column_of, is_boolean, is_number, is_text, numbers_of
from luminosity.evaluation.distinct_rows import DistinctRows
from luminosity.evaluation.metrics import query_metrics
from luminosity.evaluation.result import Task
from luminosity.evaluation.settings import Settings
from luminosity.evaluation.texts import text_metrics, texts_of

__all__ = ["ABSENT_BITS", "WHOLE", "EvaluationState", "split_groups"]

WHOLE = (-1, None)  # the key of the whole table; slices have the number of their columns and a value
ABSENT_BITS = 2  # of a metric's group: whether the number of the first and of the second model is not there
_CODE_BITS = 20  # of each class in a group
_MOST_CLASSES = 10_000  # more are numbers or ids


def split_groups(group: Any) -> tuple[Any, Any, Any]:
    """Return the codes of the label and of both predictions from packed groups."""
    mask = (1 << _CODE_BITS) - 1
    return group >> (2 * _CODE_BITS), (group >> _CODE_BITS) & mask, group & mask


def _packed(label: Any, first: Any, second: Any) -> Any:
    return (label << (2 * _CODE_BITS)) | (first << _CODE_BITS) | second


class EvaluationState(RowCollector):
    """Collects what an evaluation needs from record batches or rows.

    States of parts of a table can be merged in any order; the result is the same. Rankings need all rows of a query in
    one state, until ``finish_queries`` is called.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.columns)
        self.settings = settings
        self.task: Task | None = "ranking" if settings.query is not None else settings.task
        self.rows = 0
        self.skipped = 0
        self.missing: Counter[str] = Counter()
        self.tables: dict[tuple[int, Any], DistinctRows] = {}
        self.classes: dict[Any, int] = {}
        self.has_numbers = False  # among the classes, not only True and False
        self._origin: dict[bool, str] = {}  # whether classes are texts: the column and its type
        self._ranked: list[pa.RecordBatch] = []

    def merge(self, other: EvaluationState) -> None:
        """Add what another state has collected."""
        self.flush()
        other.flush()
        self._set_task(other.task)
        self.rows += other.rows
        self.skipped += other.skipped
        self.missing.update(other.missing)
        self.has_numbers = self.has_numbers or other.has_numbers
        for text, origin in other._origin.items():
            self._check_kind(text, origin)
        codes = np.array([self._code(value) for value in other.classes] or [0], dtype=np.int64)
        is_same = np.array_equal(codes, np.arange(len(codes)))
        for key, table in other.tables.items():
            if self.task == "classes" and not is_same:
                again = DistinctRows(table.width, table.limit)
                again.merge(table)
                again.regroup(lambda group: self._recoded(group, codes))
                table = again
            self._table(key, table.width).merge(table)
        self._ranked += other._ranked

    def _recoded(self, group: Any, codes: Any) -> Any:
        """Replace the codes of classes in packed groups. Columns that there are not stay 0."""
        settings = self.settings
        columns = settings.label, settings.prediction, settings.prediction_b
        parts = zip(columns, split_groups(group), strict=True)
        return _packed(*(part if name is None else codes[part] for name, part in parts))

    def finish_queries(self) -> None:
        """Compute the metrics of each query. After this, no rows may be added."""
        self.flush()
        if not any(batch.num_rows for batch in self._ranked):
            return
        batches, self._ranked = self._ranked, []
        whole = pa.Table.from_batches(batches).combine_chunks()
        settings = self.settings
        query, _ = codes_of(whole["query"].combine_chunks(), "query")
        relevance = whole["relevance"].to_numpy()
        scores = [whole[f"score{at}"].to_numpy() for at in range(len(settings.ranked_by))]
        for key, at in self._slices(whole.to_batches()[0], [f"slice{n}" for n in range(len(settings.slices))]):
            found = np.concatenate(
                [query_metrics(query[at], relevance[at], score[at], settings.k) for score in scores], 1
            )
            self._table(key, found.shape[1]).add(np.zeros(len(found), np.int64), found)

    def add_batch(self, batch: pa.RecordBatch) -> None:
        """Add the rows of a batch."""
        settings = self.settings
        columns = {name: column_of(batch, name) for name in settings.columns}
        if not batch.num_rows:
            return
        self.rows += batch.num_rows
        task = self.task or self._guess_task(columns)
        if task is None:
            self._skip_all(columns)
            return
        self._set_task(task)
        missing: dict[str, Any] = {}
        if task == "texts":
            group, values = self._texts(columns, missing)
        else:
            group, values = self._numbers(task, columns, missing)
        good = self._good(missing, batch.num_rows)
        if good is not None:
            batch, group, values = batch.filter(pa.array(good)), group[good], values[good]
            columns = {name: column_of(batch, name) for name in settings.columns}
        if task == "ranking":
            self._keep_ranked(columns, values)
            return
        for key, at in self._slices(batch, settings.slices):
            groups, width = group[at].reshape(-1), values.shape[-1]  # of texts, each metric of a row has its own
            self._table(key, width).add(groups, values[at].reshape(len(groups), width))

    def _numbers(self, task: Task, columns: dict[str, Any], missing: dict[str, Any]) -> tuple[Any, Any]:
        """Return the group and the numbers of each row; add masks of what is missing in a column."""
        settings, rows = self.settings, len(columns[self.settings.label])
        group = np.zeros(rows, dtype=np.int64)
        if task == "classes":
            group = self._groups(columns, missing)
            names = [name for name in (settings.score, settings.score_b) if name is not None]
        elif task == "numbers":
            names = [n for n in (settings.label, settings.prediction, settings.prediction_b) if n is not None]
        else:
            names = [settings.label, *settings.ranked_by]
        values = np.zeros((rows, len(names)))
        for at, name in enumerate(names):
            values[:, at], missing[name] = numbers_of(columns[name], name)
        if task == "ranking" and settings.query is not None:
            missing[settings.query] = columns[settings.query].is_null().to_numpy(zero_copy_only=False)
        return group, values

    def _texts(self, columns: dict[str, Any], missing: dict[str, Any]) -> tuple[Any, Any]:
        """Return a group and numbers for each row and metric: the group is the metric's number, and what is absent."""
        settings = self.settings
        expected, missing[settings.label] = texts_of(columns[settings.label], settings.label)
        values: list[Any] = []
        absent: list[Any] = []
        for name, measures in ((settings.prediction, settings.measures), (settings.prediction_b, settings.measures_b)):
            if name is None:
                continue
            found, missing[name] = texts_of(columns[name], name)
            own, is_absent = text_metrics(expected, found)
            numbers = [numbers_of(columns[each], each) for each in measures]
            values.append(np.column_stack([own, *(each for each, _ in numbers)]))
            absent.append(np.column_stack([is_absent, *(mask for _, mask in numbers)]))
        if settings.preference is not None:  # a metric that is 0 for the first model
            both = numbers_of(columns[settings.preference], settings.preference)
            for parts, column in zip((values, absent), both, strict=True):
                parts[:] = [np.column_stack(each) for each in zip(parts, (np.zeros_like(column), column), strict=True)]
        group = np.tile(np.arange(absent[0].shape[1]) << ABSENT_BITS, (len(expected), 1))
        for at, is_absent in enumerate(absent):
            group |= is_absent.astype(np.int64) << at
        return group, np.stack(values, axis=2)

    def _good(self, missing: dict[str, Any], rows: int) -> Any:
        """Count rows with missing values, and return a mask of the others, or None if there is nothing missing."""
        bad = np.zeros(rows, dtype=bool)
        for name, mask in missing.items():
            if mask.any():
                self.missing[name] += int(mask.sum())
                bad |= mask
        self.skipped += int(bad.sum())
        return ~bad if bad.any() else None

    def _skip_all(self, columns: dict[str, Any]) -> None:
        """Count rows of which the label or the prediction is always null, so that the task is not known yet."""
        rows = 0
        for name, column in columns.items():
            if pa.types.is_null(column.type):
                self.missing[name] += len(column)
                rows = len(column)
        self.skipped += rows

    def _guess_task(self, columns: dict[str, Any]) -> Task | None:
        """Return the task by the columns' types, or None if one of them has only nulls."""
        settings = self.settings
        if settings.prediction is None or settings.score is not None:
            return "classes"
        kinds = [columns[name].type for name in (settings.label, settings.prediction)]
        if any(map(pa.types.is_null, kinds)):
            return None
        are_numbers = all(is_number(kind) for kind in kinds)
        return "numbers" if are_numbers and not all(map(pa.types.is_integer, kinds)) else "classes"

    def _set_task(self, task: Task | None) -> None:
        if self.task is None:
            self.task = task
        elif task is not None and task != self.task:
            raise EvaluationError(
                f"found labels and predictions that look like {task} in some rows and like {self.task} in others",
                fix=Fix(
                    f"pass task={task!r} or task={self.task!r}", command=f"add --task {task} or --task {self.task}"
                ),
            )

    def _groups(self, columns: dict[str, Any], missing: dict[str, Any]) -> Any:
        settings = self.settings
        codes: list[Any] = []
        for name in (settings.label, settings.prediction, settings.prediction_b):
            if name is None:
                codes.append(np.int64(0))
                continue
            kind = columns[name].type
            if not pa.types.is_null(kind):
                self._check_kind(is_text(kind), f"{name!r} holds {kind}")
                self.has_numbers = self.has_numbers or not (is_text(kind) or is_boolean(kind))
            indices, values = codes_of(columns[name], name)
            of_values = np.array([-1 if value is None else self._code(value) for value in values] or [-1])
            found = of_values[indices]
            missing[name] = found < 0
            codes.append(np.where(found < 0, 0, found))
        return _packed(*codes)

    def _check_kind(self, text: bool, origin: str) -> None:
        self._origin.setdefault(text, origin)
        if len(self._origin) > 1:
            raise EvaluationError(
                f"the column {self._origin[True]}, but the column {self._origin[False]}, expected the same type",
                fix="cast one of them",
            )

    def _code(self, value: Any) -> int:
        code = self.classes.setdefault(value, len(self.classes))
        if code >= _MOST_CLASSES:
            raise EvaluationError(
                f"found more than {_MOST_CLASSES:,} classes in the column {self.settings.label!r}, expected fewer",
                fix=Fix("pass task='numbers' if these are numbers", command="add --task numbers if these are numbers"),
            )
        return code

    def _keep_ranked(self, columns: dict[str, Any], values: Any) -> None:
        settings = self.settings
        if (values[:, 0] < 0).any():
            raise EvaluationError(
                f"the column {settings.label!r} has the relevance {values[:, 0].min():g}, expected 0 or more"
            )
        kept = {"query": columns[settings.query or ""], "relevance": values[:, 0]}
        kept |= {f"score{at}": values[:, at + 1] for at in range(len(settings.ranked_by))}
        for at, by in enumerate(settings.slices):
            arrays = [columns[name] for name in by]
            kept[f"slice{at}"] = arrays[0] if len(by) == 1 else pa.StructArray.from_arrays(arrays, names=list(by))
        self._ranked.append(pa.record_batch(kept))

    def _slices(self, batch: pa.RecordBatch, slices: Any) -> Iterator[tuple[tuple[int, Any], Any]]:
        """Yield the key and the rows of the whole batch, and of each value of each slice."""
        yield WHOLE, slice(None)
        for number, by in enumerate(slices):
            names = [by] if isinstance(by, str) else list(by)
            codes, keys = _slice_codes(batch, names)
            order = np.argsort(codes, kind="stable")
            starts = np.searchsorted(codes[order], np.arange(len(keys) + 1))
            for at, key in enumerate(keys):
                if starts[at] < starts[at + 1]:
                    yield (number, key), order[starts[at] : starts[at + 1]]

    def _table(self, key: tuple[int, Any], width: int) -> DistinctRows:
        if key not in self.tables:
            if len(self.tables) > self.settings.most_slices:
                names = ", ".join(self.settings.slices[key[0]])
                raise EvaluationError(
                    f"found more than {self.settings.most_slices:,} slices, such as {names}={key[1]!r}; expected fewer",
                    fix="slice by columns of fewer values",
                )
            self.tables[key] = DistinctRows(width, self.settings.most_distinct)
        return self.tables[key]


def _slice_codes(batch: pa.RecordBatch, names: list[str]) -> tuple[Any, list[Any]]:
    """Return the number of the slice that each row belongs to, and the slices' values: tuples, for several columns."""
    column = column_of(batch, names[0])
    if len(names) == 1 and pa.types.is_struct(column.type):
        fields = [column.type.field(at).name for at in range(column.type.num_fields)]
        return _slice_codes(pa.RecordBatch.from_arrays(column.flatten(), names=fields), fields)
    codes, keys = codes_of(column, names[0])
    if len(names) == 1:
        return codes, keys
    combined: list[Any] = [(key,) for key in keys]
    for name in names[1:]:
        more, values = codes_of(column_of(batch, name), name)
        distinct, codes = np.unique(codes * len(values) + more, return_inverse=True)
        combined = [(*combined[each // len(values)], values[each % len(values)]) for each in distinct.tolist()]
    return codes, combined

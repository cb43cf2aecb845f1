"""From merged counts to the evaluation of rankings and texts, whose metrics are means over queries or rows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from luminosity.evaluation.bootstrap import Combiner, ModelMetrics
from luminosity.evaluation.distinct_rows import DistinctRows
from luminosity.evaluation.evaluation import Evaluation
from luminosity.evaluation.metrics import query_names
from luminosity.evaluation.result import Metric, Outcomes
from luminosity.evaluation.settings import PREFERENCE
from luminosity.evaluation.state import ABSENT_BITS
from luminosity.evaluation.texts import SHARES

__all__ = ["Ranking", "Texts"]

_ROUGES = ("rouge1", "rouge2", "rougeL")
_NO_WORDS = "no expected text has enough words"
_LACKING = {
    "rouge1": "no words: rouge1 and rougeL leave",
    "rouge2": "fewer than two words: rouge2 leaves",
}


class _Means(Combiner):
    """Computes means of columns over the rows in which they are defined, and replicates of these means."""

    def means(self, values: Any, is_defined: Any, counts: Any) -> tuple[Any, Any]:
        """Return the mean of each column, and by column its replicates (None without intervals)."""
        columns = np.concatenate([np.where(is_defined, values, 0.0), is_defined], axis=1).T
        drawn = self.resampler.sums(columns, counts)
        exact = _ratios((columns * counts).sum(axis=1, keepdims=True))
        return exact, None if drawn is None else _ratios(drawn[0])


def _ratios(sums: Any) -> Any:
    """Divide the first half of the rows by the second."""
    totals, rows = np.split(sums, 2)
    return np.divide(totals, rows, out=np.full(totals.shape, np.nan), where=rows > 0)


class Ranking(_Means):
    """Evaluates rankings: means over queries, of which replicates are drawn."""

    def evaluate(self, table: DistinctRows) -> Evaluation:
        """Return the evaluation of the whole table or of a slice. ``rows`` of the result are queries."""
        names = query_names(self.settings.k)
        values, counts = table.values, table.counts
        exact, again = self.means(values, values >= 0, counts)
        reasons = dict.fromkeys(names, "no query has relevant rows")
        models: list[ModelMetrics] = []
        for first in range(0, table.width, len(names)):
            of_model = dict(zip(names, exact[first:], strict=False))
            replicates = {} if again is None else dict(zip(names, again[first:], strict=False))
            models.append(ModelMetrics(of_model, replicates, of_model, reasons))
        found = self.pair(models)
        without = int(counts[values[:, 0] < 0].sum())
        notes = self.notes(table)
        if without:
            notes.append(f"{without:,} of {table.rows:,} queries have no relevant rows: recall leaves them out")
        return Evaluation("ranking", table.rows, notes=notes, **found)


@dataclass(frozen=True)
class _Column:
    """The numbers of a metric of one model or two: distinct ones, what is there, and in how many rows."""

    values: Any
    is_there: Any
    counts: Any

    def absent(self, model: int = 0) -> int:
        """Return in how many rows the number of a model is not there."""
        return int(self.counts[~self.is_there[:, model]].sum())


class Texts(_Means):
    """Evaluates texts: means over rows, and in how many rows the second of two models is better.

    Each metric has replicates of its own; both models of a metric have the same.
    """

    def evaluate(self, table: DistinctRows) -> Evaluation:
        """Return the evaluation of the whole table or of a slice."""
        settings, width = self.settings, table.width
        names = settings.text_metrics
        columns = self._columns(table)
        rows = int(columns[names[0]].counts.sum())
        reasons = {**dict.fromkeys(names, "no row has a number"), **dict.fromkeys(_ROUGES, _NO_WORDS)}
        models = [ModelMetrics(reasons=reasons) for _ in range(width)]
        rates = ModelMetrics(reasons=dict.fromkeys(columns, "no row has both numbers"))
        for name, column in columns.items():
            means = self._with_wins(column) if width > 1 else self.means(column.values, column.is_there, column.counts)
            for at, model in enumerate([*models, rates] if width > 1 else models):
                if model is rates or name in names:
                    model.exact[name] = model.of_cells[name] = means[0][at]
                    if means[1] is not None:
                        model.replicates[name] = means[1][at]
        found = self.pair(models)
        for metrics, share in itertools.product(("metrics", "metrics_b")[:width], SHARES):
            found[metrics][share] = self.widened(found[metrics][share], rows)
        if width > 1:
            won = self.metrics(rates, "win rate of ")
            found["outcomes"] = {name: self._outcomes(columns[name], metric) for name, metric in won.items()}
        return Evaluation("texts", rows, notes=self.notes(table) + self._absent(columns, rows), **found)

    def _columns(self, table: DistinctRows) -> dict[str, _Column]:
        settings = self.settings
        names = [*settings.text_metrics, *([] if settings.preference is None else [PREFERENCE])]
        ends = np.searchsorted(table.group >> ABSENT_BITS, np.arange(len(names) + 1))
        is_there = (table.group[:, None] >> np.arange(table.width)) & 1 == 0
        at = [slice(*each) for each in itertools.pairwise(ends)]
        return {
            name: _Column(table.values[each], is_there[each], table.counts[each])
            for name, each in zip(names, at, strict=True)
        }

    def _with_wins(self, column: _Column) -> tuple[Any, Any]:
        """Return the means of both models and the share of rows in which the second is better; a tie is a half."""
        both = column.is_there.all(axis=1, keepdims=True)
        values = np.concatenate([column.values, _won(column)[:, None]], axis=1)
        return self.means(values, np.concatenate([column.is_there, both], axis=1), column.counts)

    def _outcomes(self, column: _Column, win_rate: Metric) -> Outcomes:
        won, both = _won(column), column.is_there.all(axis=1)
        wins, ties, losses = (int(column.counts[both & (won == each)].sum()) for each in (1.0, 0.5, 0.0))
        return Outcomes(wins, ties, losses, self.widened(win_rate, wins + ties + losses))

    def _absent(self, columns: dict[str, _Column], rows: int) -> list[str]:
        """Say how many rows a mean leaves out: numbers that are not there, and expected texts without words."""
        settings = self.settings
        left_out = [(name, columns[name].absent()) for name in settings.measures]
        left_out += [(b, columns[a].absent(1)) for a, b in zip(settings.measures, settings.measures_b, strict=False)]
        left_out += [] if settings.preference is None else [(settings.preference, columns[PREFERENCE].absent(1))]
        notes = [
            f"{absent:,} of {rows:,} rows have no number in {name!r}, and its mean leaves them out"
            for name, absent in left_out
            if absent
        ]
        for name, lacking in _LACKING.items():
            if absent := columns[name].absent():
                notes.append(f"{absent:,} of {rows:,} expected texts have {lacking} them out")
        return notes


def _won(column: _Column) -> Any:
    """Return 1 where the second model is better, 0.5 for a tie, and 0 where it is worse."""
    return (np.sign(column.values[:, 1] - column.values[:, 0]) + 1) / 2

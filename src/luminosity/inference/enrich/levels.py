"""Which models go first: a model may take another one's column."""

from __future__ import annotations

from collections.abc import Mapping

from luminosity.inference.enrich.column import Column

__all__ = ["levels"]


def levels(columns: Mapping[str, Column]) -> list[list[str]]:
    """Names of columns by level: none takes a column of its own level, or of one that comes after.

    >>> from luminosity import Handler
    >>> class Model(Handler):
    ...     def predict(self, model, batch, inference_args=None): ...
    >>> levels({"topic": Column(Model(), "vector"), "vector": Column(Model(), "text"), "mood": Column(Model(), "text")})
    [['vector', 'mood'], ['topic']]
    """
    left = dict(columns)
    found: list[list[str]] = []
    while left:
        ready = [name for name, column in left.items() if not any(each in left for each in column.names)]
        if not ready:
            raise ValueError(_circle(left))
        found.append(ready)
        for name in ready:
            del left[name]
    return found


def _circle(left: Mapping[str, Column]) -> str:
    path = [next(iter(left))]
    while path[-1] not in path[:-1]:
        path.append(next(each for each in left[path[-1]].names if each in left))
    path = path[path.index(path[-1]) :]
    if len(path) == 2:
        return f"the column {path[0]!r} takes itself; a new column needs a name that the table does not have yet"
    return "columns that take each other: " + " takes ".join(map(repr, path))

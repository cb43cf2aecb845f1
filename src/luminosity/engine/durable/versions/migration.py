"""Changes the state in a checkpoint as a function of the user says, before a new version of the pipeline continues."""

from __future__ import annotations

import importlib
import marshal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from apache_beam.coders import Coder, coder_impl
from apache_beam.portability.api import beam_fn_api_pb2
from apache_beam.runners.pipeline_context import PipelineContext

from luminosity._shared.text import did_you_mean, list_some
from luminosity.engine.durable.shape import coder_structure
from luminosity.engine.durable.store import CheckpointFolder
from luminosity.engine.durable.stored_values import Undecoded, ValueReader, key_of
from luminosity.errors import CheckpointError, OptionError

__all__ = ["META_KEY", "Migration", "load_migration", "migrated_rows", "migrated_shape"]

META_KEY = "migrated"  # of a checkpoint: the function that has changed it
_ALL_VALUES = (
    "read modify write",
    "bag",
    "combining",
    "set",
)  # kinds of state whose cells are values, one after another
_SHOWN = 3  # so many values that can't be converted are named


@dataclass
class _Change:
    """What happens to one cell of state of a step."""

    name: str | None  # the new one; None: it is dropped
    convert: Callable[[Any], Any] | None = None
    old_coder: Coder | None = None
    new_coder: Coder | None = None


class Migration:
    """Says how a checkpoint's state becomes that of a new version of a pipeline.

    A function with such an object as its argument is named with ``--migrate=MODULE:FUNCTION``:

    >>> from apache_beam.coders import VarIntCoder
    >>> def to_cents(migration: Migration) -> None:
    ...     migration.convert("Total", "euros", lambda euros: round(100 * euros), coder=VarIntCoder())
    ...     migration.rename("Total", "euros", "cents")
    ...     migration.drop("Total", "last_seen")

    ``step`` is the name that the step has in the checkpoint, and ``state`` the name in its ``StateSpec``. All values
    are converted before the first one is written, and all are written at once.
    """

    def __init__(self, steps: dict[str, Any]) -> None:
        """Change the state of ``steps``, as the shape of a pipeline describes them. The runner does this."""
        self._names = {details["name"]: name for name, details in steps.items() if "state" in details}
        self._steps = steps
        self.changes: dict[str, dict[str, _Change]] = {}  # by durable name of the step, and old name of the state

    def convert(
        self,
        step: str,
        state: str,
        function: Callable[[Any], Any],
        *,
        coder: Coder,
        old_coder: Coder | None = None,
    ) -> None:
        """Replace each value of a state by what ``function`` makes of it.

        ``coder`` is that of the new values, as in the new ``StateSpec``. ``old_coder`` is only needed for values that
        a program of the user wrote, such as those of classes. A ``CombiningValueState`` has accumulators, often several
        for a key.
        """
        change = self._change(step, state)
        kind = self._steps[self._names[step]]["state"][state]["kind"]
        if kind not in _ALL_VALUES:
            raise CheckpointError(
                f"the state {state!r} of step {step!r} is a {kind}, expected one of: {', '.join(_ALL_VALUES)}",
                fix="forget it with migration.drop(), or all state of the step with --drop_state",
            )
        change.convert, change.new_coder, change.old_coder = function, coder, old_coder

    def rename(self, step: str, state: str, name: str) -> None:
        """Give a state another name."""
        names = self._steps[self._names[step]]["state"] if step in self._names else {}
        if name in names and name != state:
            raise CheckpointError(f"step {step!r} has a state {name!r} already, expected a new name for {state!r}")
        self._change(step, state).name = name

    def drop(self, step: str, state: str) -> None:
        """Forget a state of all keys."""
        self._change(step, state).name = None

    def _change(self, step: str, state: str) -> _Change:
        if step not in self._names:
            hint = did_you_mean(step, self._names) or f"the steps with state are {list_some(sorted(self._names), 5)}"
            raise CheckpointError(f"the checkpoint has no state of a step {step!r}", fix=hint)
        durable_name = self._names[step]
        specs = self._steps[durable_name]["state"]
        if state not in specs:
            hint = did_you_mean(state, specs) or f"its states are {list_some(sorted(specs), 5)}"
            raise CheckpointError(f"the step {step!r} has no state {state!r} in the checkpoint", fix=hint)
        return self.changes.setdefault(durable_name, {}).setdefault(state, _Change(state))


def load_migration(given: str) -> Callable[[Migration], object]:
    """Return the function that ``--migrate`` names. Raises :class:`OptionError` if there is none."""
    module_name, colon, name = given.partition(":")
    if not (module_name and colon and name):
        raise OptionError(f"--migrate={given}: expected MODULE:FUNCTION, such as migrations:to_cents")
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except ImportError as error:
        raise OptionError(
            f"--migrate={given}: {error}", fix="put the module beside the script, or install it"
        ) from error
    if not callable(found):
        raise OptionError(f"--migrate={given}: found no function {name!r} in {module_name}")
    return found


def migrated_shape(shape: dict[str, Any], migration: Migration) -> dict[str, Any]:
    """Return the shape of a checkpoint after a migration."""
    steps = dict(shape["steps"])
    for step, changes in migration.changes.items():
        specs: dict[str, dict[str, str]] = {}
        for state, spec in steps[step]["state"].items():
            change = changes.get(state, _Change(state))
            if change.name is None:
                continue
            now = dict(spec)
            if change.new_coder is not None:
                context = PipelineContext()
                coder_id = context.coders.get_id(change.new_coder)
                text = coder_structure(context.to_runner_api(), coder_id)
                now = {part: text if part.endswith("coder") else value for part, value in spec.items()}
            specs[change.name] = now
        steps[step] = {**steps[step], "state": specs}
    return {**shape, "steps": steps}


def migrated_rows(
    folder: CheckpointFolder, shape: dict[str, Any], migration: Migration
) -> Iterator[tuple[str, bytes, bytes, bytes | None]]:
    """Yield what a migration makes of the rows of state: owner, old key, new key, new value or None.

    Raises :class:`CheckpointError` if values can't be converted.
    """
    failed: list[str] = []
    for step, changes in migration.changes.items():
        details = shape["steps"][step]
        for cell_key, row in folder.rows(f"state/{step}"):
            state_key: Any = beam_fn_api_pb2.StateKey.FromString(cell_key)
            place = getattr(state_key, str(state_key.WhichOneof("type")))
            change = changes.get(place.user_state_id)
            if change is None:
                continue
            spec = details["state"][place.user_state_id]
            try:
                value = row if change.convert is None else _converted(change, spec, row)
            except Exception as error:
                key = key_of(place.key, details["key"])
                failed.append(
                    f"  {details['name']!r}, {place.user_state_id!r}, key {key}: {type(error).__name__}: {error}"
                )
                if len(failed) == _SHOWN:
                    break
                continue
            if change.name is not None:
                place.user_state_id = change.name
            yield f"state/{step}", cell_key, state_key.SerializeToString(), None if change.name is None else value
    if failed:
        lines = "\n".join(failed)
        raise CheckpointError(
            f"values of the checkpoint in {folder.path} can't be migrated:\n{lines}",
            fix="mend the function that --migrate names; the checkpoint is as it was",
        )


def _converted(change: _Change, spec: dict[str, str], row: bytes) -> bytes:
    """Return a cell with its values converted."""
    assert change.convert is not None
    assert change.new_coder is not None
    data = b"".join(marshal.loads(row))
    text = next(value for part, value in spec.items() if part.endswith("coder"))
    values = ValueReader(text).values(data) if change.old_coder is None else _decoded(change.old_coder, data)
    impl = change.new_coder.get_impl()
    stream = coder_impl.create_OutputStream()
    for value in values:
        if isinstance(value, Undecoded):
            raise ValueError(f"values of {value.coder} can only be read with old_coder=")
        impl.encode_to_stream(change.convert(value), stream, True)
    return marshal.dumps([stream.get()])


def _decoded(coder: Coder, data: bytes) -> Iterator[Any]:
    impl, stream = coder.get_impl(), coder_impl.create_InputStream(data)
    while stream.size() > 0:
        yield impl.decode_from_stream(stream, True)

"""Compares the pipeline of a checkpoint with the pipeline that is to continue from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from luminosity._shared.text import did_you_mean
from luminosity.engine.durable.names import plain_step, quoted, unquoted
from luminosity.engine.durable.shape import describe
from luminosity.engine.plan.graph import Graph
from luminosity.errors import CheckpointError

__all__ = ["Comparison", "compare", "fit"]

_OF_COMBINERS = ("Precombine", "Group", "Merge", "ExtractOutputs")  # what the plan makes of one Combine
_FIX = (
    'name renamed steps with --transform_name_mapping=\'{"old": "new"}\', forget what a step has stored with '
    "--drop_state=STEP, or forget the whole checkpoint with --restart"
)


@dataclass
class Comparison:
    """What to do with the rows of a checkpoint before a pipeline continues from it.

    Apply ``dropped`` first, then ``moves``: copy the rows of each owner to its new owners and remove the old ones. An
    owner that is in neither stays. Then every part restores the rows that have its name in the new plan.
    """

    moves: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    dropped: set[str] = field(default_factory=set[str])  # owners whose rows no step can take
    notes: list[str] = field(default_factory=list[str])  # sentences for the log
    renamed: dict[str, str] = field(default_factory=dict[str, str])  # unique names of steps, old → new
    new_sources: set[str] = field(default_factory=set[str])  # reads of an impulse that has not been sent yet
    # Steps that must start a stage, so that only they get the elements that wait for them. After `compare`, plan again
    # with these; after `fit`, the plan has them.
    roots: set[str] = field(default_factory=set[str])


def fit(
    plan: Callable[[frozenset[str]], Graph],
    old: dict[str, Any],
    mapping: Mapping[str, str],
    dropped: Collection[str],
    has_data: Collection[str],
) -> tuple[Graph, Comparison]:
    """Plan a pipeline so that it can continue from a checkpoint whose shape is ``old``.

    ``plan`` gets the names of steps that must start a stage. For the other arguments and errors see :func:`compare`.
    """
    roots: frozenset[str] = frozenset()
    while True:
        graph = plan(roots)
        comparison = compare(old, describe(graph), mapping, dropped, has_data)
        if not comparison.roots:
            comparison.roots = set(roots)
            return graph, comparison
        if comparison.roots <= roots:
            steps = ", ".join(repr(step) for step in sorted(comparison.roots))
            raise CheckpointError(
                f"elements wait for one of the steps {steps}, which can't run apart any more", fix=_FIX
            )
        roots |= comparison.roots


def compare(
    old: dict[str, Any],
    new: dict[str, Any],
    mapping: Mapping[str, str],
    dropped: Collection[str],
    has_data: Collection[str],
) -> Comparison:
    """Return how a pipeline of the shape ``new`` can continue from a checkpoint of the shape ``old``.

    ``mapping`` has the names of steps, or of composites, that were renamed. ``dropped`` are steps, or composites, whose
    rows are forgotten. ``has_data`` are the owners that have rows: only what belongs to those is compared.

    Raises :class:`CheckpointError` with a list of all differences.
    """
    comparing = _Comparing(old, new, {plain_step(k): plain_step(v) for k, v in mapping.items()}, dropped)
    comparing.check_arguments(mapping)
    for owner in sorted(has_data):
        comparing.place(owner)
    if comparing.problems:
        lines = "\n".join(f"  {problem}" for problem in dict.fromkeys(comparing.problems))
        raise CheckpointError(f"the pipeline does not match its checkpoint:\n{lines}", fix=_FIX)
    return comparing.result


class _Comparing:
    """One comparison: finds the new owners of rows, and collects what prevents it."""

    def __init__(
        self, old: dict[str, Any], new: dict[str, Any], mapping: dict[str, str], dropped: Collection[str]
    ) -> None:
        self._old = old
        self._new = new
        self._mapping = mapping
        self._dropped = [plain_step(step) for step in dropped]
        self.problems: list[str] = []
        self.result = Comparison()
        self._arrived = {self._rename(step) for step in old["steps"]}
        for step, details in old["steps"].items():
            after = new["steps"].get(self._rename(step))
            if after is not None and after["name"] != details["name"]:
                self.result.renamed[details["name"]] = after["name"]
        producers = {self._rename(read["producer"]) for read in old["reads"].values()}
        for name, read in new["reads"].items():
            if read["is_impulse"] and read["producer"] not in producers:
                self.result.new_sources.add(name)

    def check_arguments(self, mapping: Mapping[str, str]) -> None:
        """Note arguments that name no step."""
        steps = {
            "checkpoint": [s["name"] for s in self._old["steps"].values()],
            "pipeline": [s["name"] for s in self._new["steps"].values()],
        }
        given = [("--transform_name_mapping", step, "checkpoint") for step in mapping]
        given += [("--transform_name_mapping", step, "pipeline") for step in mapping.values()]
        given += [("--drop_state", step, "checkpoint") for step in self._dropped]
        for option, step, where in given:
            if where == "checkpoint" and self._is_known(steps[where], mapping.get(step, "")):
                continue  # the start before this one has renamed it
            if not self._is_known(steps[where], step):
                self.problems.append(f"{option}: the {where} has no step {step!r}{_or(step, steps[where])}")

    def _is_known(self, names: list[str], step: str) -> bool:
        return any(_is_within(quoted(plain_step(name)), plain_step(step)) for name in names)

    def place(self, owner: str) -> None:
        """Find the new owners of one owner's rows."""
        kind, _, rest = owner.partition("/")
        name, slash, more = rest.partition("/")
        place = {
            "state": self._place_state,
            "timers": self._place_timers,
            "queue": self._place_read,
            "gate": self._place_read,
            "grouping": self._place_grouping,
            "side": self._place_side_input,
            "metrics": self._place_stage,
            "stage": self._place_stage,
        }.get(kind)
        if place is None:
            return
        places = place(name, more)
        if places is None:
            self.result.dropped.add(owner)
        elif (owners := tuple(f"{kind}/{each}{slash}{more}" for each in places)) != (owner,):
            self.result.moves[owner] = owners

    # Each of the next methods returns the new names, or None if the rows are dropped.

    def _place_state(self, name: str, _: str) -> list[str] | None:
        if self._is_dropped([name]) or (target := self._step(name, "state")) is None:
            return None
        before, after = self._old["steps"][name], self._new["steps"].get(target, {})
        shown = self._shown(name)
        if not after:
            return [target]  # `_step` has noted that it is missing
        if "state" not in after:
            self.problems.append(f"step {shown}: had state, and has no state or timers now")
            return [target]
        self._compare_keys(shown, before, after)
        for state, spec in before["state"].items():
            if (now := after["state"].get(state)) is None:
                self.problems.append(f"step {shown}: the state {state!r} is missing{_or(state, after['state'])}")
                continue
            for part in {**spec, **now}:
                self._compare(shown, f"the {part} of the state {state!r}", spec.get(part), now.get(part))
        return [target]

    def _place_timers(self, name: str, family: str) -> list[str] | None:
        if self._is_dropped([name]) or (target := self._step(name, "timers")) is None:
            return None
        before, after = self._old["steps"][name], self._new["steps"].get(target, {})
        if not after:
            return [target]
        shown, timer = self._shown(name), family.removeprefix("ts-")
        if family not in (now := after.get("timers", {})):
            self.problems.append(
                f"step {shown}: the timer {timer!r} is missing{_or(timer, [each.removeprefix('ts-') for each in now])}"
            )
            return [target]
        self._compare_keys(shown, before, after)
        self._compare(shown, f"the time domain of the timer {timer!r}", before["timers"].get(family), now[family])
        return [target]

    def _place_read(self, name: str, _: str) -> list[str] | None:
        read = self._old["reads"][name]
        consumers: list[str] = list(read["consumers"])
        if self._is_dropped(consumers):
            return None
        producer = self._rename(read["producer"])
        wanted = {self._rename(step): step for step in consumers}
        targets: dict[str, Any] = {}
        for step, old_step in wanted.items():
            if step not in self._new["steps"]:
                continue
            found = {
                target: each
                for target, each in self._new["reads"].items()
                if each["producer"] == producer and step in each["consumers"]
            }
            if not found:
                self._place_moved_input(step, old_step, read["producer"], producer)
            targets |= found
        for each in targets.values():
            # Elements wait for some steps only. Others that took them before must not get them again.
            others = [step for step in each["consumers"] if step not in wanted and step in self._arrived]
            if others:
                self.result.roots |= {
                    each["consumers"][step] for step in [*others, *(wanted.keys() & each["consumers"])]
                }
            if read["coder"] != each["coder"]:
                for step in sorted(wanted.keys() & each["consumers"]):
                    self._compare(self._shown(wanted[step]), "the coder of its input", read["coder"], each["coder"])
        missing = [old_step for step, old_step in wanted.items() if step not in self._new["steps"]]
        if targets or self.problems or len(missing) < len(consumers):
            return sorted(targets) if targets else [name]
        removed = [self._is_removed(step, "elements that wait for it") for step in missing]
        return None if all(removed) else [name]

    def _place_moved_input(self, step: str, old_step: str, old_producer: str, producer: str) -> None:
        """Handle elements that wait for a step which is there, but does not read them at the start of a stage."""
        before = [self._rename(each) for each in self._old["steps"][old_step]["after"]]
        if producer.partition(":")[0] in (after := self._new["steps"][step]["after"]):
            self.result.roots.add(self._new["steps"][step]["name"])
            return
        names = ", ".join(repr(self._new["steps"][each]["name"]) for each in after) or "nothing"
        old_names = self._shown(old_producer) if before else "nothing"
        self.problems.append(
            f"step {self._shown(old_step)}: elements of {old_names} wait for it, and it reads {names} now"
        )

    def _place_grouping(self, name: str, _: str) -> list[str] | None:
        if self._is_dropped([name]) or (target := self._step(name, "groups")) is None:
            return None
        before, after, shown = self._old["buffers"][name], self._new["buffers"].get(target), self._shown(name)
        if after is None or after["kind"] != "group":
            self.problems.append(f"step {shown}: was grouped by key in another way, and its groups have no reader now")
            return [target]
        self._compare(shown, "the coder of its input", before["coder"], after["coder"])
        self._compare(shown, "being unbounded", before["is_unbounded"], after["is_unbounded"])
        self._compare_windowing(shown, before, after)
        return [target]

    def _place_side_input(self, name: str, _: str) -> list[str] | None:
        before = self._old["buffers"][name]
        readers = {(self._rename(step), tag): step for step, tag in before["side_inputs"]}
        if self._is_dropped([name]) or self._is_dropped(list(readers.values())):
            return None
        targets = [
            target
            for target, each in self._new["buffers"].items()
            if any((step, tag) in readers for step, tag in each["side_inputs"])
        ]
        if not targets:
            removed = [self._is_removed(step, "its side input") for step in dict.fromkeys(readers.values())]
            return None if all(removed) else [name]
        shown = self._shown(next(iter(readers.values())))
        for target in targets:
            after = self._new["buffers"][target]
            self._compare(shown, "the coder of its side input", before["coder"], after["coder"])
            self._compare_windowing(shown, before, after)
        return sorted(targets)

    def _place_stage(self, name: str, _: str) -> list[str] | None:
        """Return the new stage that reads for one of the same steps. A stage that is gone has nothing to keep."""
        steps = {
            self._rename(s) for read in self._old["stages"].get(name, ()) for s in self._old["reads"][read]["consumers"]
        }
        for target, reads in sorted(self._new["stages"].items()):
            if any(steps & self._new["reads"][read]["consumers"].keys() for read in reads):
                return [target]
        return None

    def _compare(self, shown: str, what: str, before: Any, after: Any) -> None:
        if before != after:
            self.problems.append(f"step {shown}: {what} was {before}, and is {after} now")

    def _compare_keys(self, shown: str, before: dict[str, Any], after: dict[str, Any]) -> None:
        self._compare(shown, "the key", before["key"], after["key"])
        self._compare(shown, "the windows", before["windows"], after["windows"])

    def _compare_windowing(self, shown: str, before: dict[str, Any], after: dict[str, Any]) -> None:
        for part in {**before["windowing"], **after["windowing"]}:
            self._compare(
                shown, f"the {part} of its input", before["windowing"].get(part), after["windowing"].get(part)
            )

    def _step(self, name: str, what: str) -> str | None:
        """Return the new name of a step, also if rows have no place there; None if the step was removed."""
        target = self._rename(name)
        if target in self._new["steps"]:
            return target
        return None if self._is_removed(name, what) else target

    def _is_removed(self, name: str, what: str) -> bool:
        """Return whether a step was removed on purpose, and not renamed. Notes what is lost."""
        shown = self._shown(name)
        if (whole := self._whole(name)) != name and self._rename(whole) in self._new["steps"]:
            change = (
                "is no longer splittable" if "restriction" in self._old["steps"][name] else "now combines otherwise"
            )
            self.problems.append(f"step {shown}: {change}")
            return False
        if survivors := sorted(set(self._descendants(name)) & self._new["steps"].keys()):
            reader = self._new["steps"][survivors[0]]["name"]
            self.problems.append(f"step {shown}: is missing, but {reader!r}, which read its output, is there")
            return False
        candidates = self._new_siblings(name)
        if candidates:
            renamed = json.dumps({self._old["steps"][name]["name"]: candidates[0]})
            self.problems.append(
                f"step {shown}: is missing, and {candidates[0]!r} is new there; if it was renamed, pass "
                f"--transform_name_mapping='{renamed}'"
            )
            return False
        self.result.notes.append(f"step {shown} was removed from the pipeline: {what} in the checkpoint are dropped")
        return True

    def _descendants(self, name: str) -> Iterator[str]:
        """Yield the new names of all steps of the old pipeline that come after a step."""
        steps, reached = self._old["steps"], {name}
        has_grown = True
        while has_grown:
            more = {step for step, each in steps.items() if step not in reached and reached & set(each["after"])}
            has_grown = bool(more)
            reached |= more
        for step in reached - {name}:
            if not _is_within(step, unquoted(name)):
                yield self._rename(step)

    def _new_siblings(self, name: str) -> list[str]:
        """Return the new steps that read what the nearest steps before a removed step make, which are still there."""
        survivors: set[str] = set()
        seen, waiting = {name}, [name]
        while waiting:
            before = self._old["steps"].get(waiting.pop(), {"after": []})["after"]
            for step in before:
                if (target := self._rename(step)) in self._new["steps"]:
                    survivors.add(target)
                elif step not in seen:
                    seen.add(step)
                    waiting.append(step)
        return sorted(
            each["name"]
            for step, each in self._new["steps"].items()
            if step not in self._arrived and (survivors & set(each["after"]) or (not survivors and not each["after"]))
        )

    def _is_dropped(self, names: Iterable[str]) -> bool:
        """Return whether the rows of all these steps are to be forgotten."""
        return all(any(_is_within(name, given) for given in self._dropped) for name in names)

    def _rename(self, name: str) -> str:
        """Return the new durable name of a step or PCollection."""
        step, colon, tag = name.partition(":")
        parts = [quoted(self._rename_plain(part)) for part in unquoted(step).split("@")]
        return "@".join(parts) + colon + tag

    def _rename_plain(self, name: str) -> str:
        for old in sorted(self._mapping, key=len, reverse=True):
            if name == old or name.startswith(f"{old}/"):
                return self._mapping[old] + name[len(old) :]
        return name

    def _shown(self, name: str) -> str:
        """Return the name of an old step as its author knows it."""
        step = self._whole(name.partition(":")[0])
        return repr(self._old["steps"][step]["name"] if step in self._old["steps"] else unquoted(name))

    def _whole(self, name: str) -> str:
        """Return the old step that a part in the plan was made from, or ``name`` itself."""
        parent, _, last = unquoted(name).rpartition("/")
        is_part = "restriction" in self._old["steps"].get(name, {}) or last in _OF_COMBINERS
        return quoted(parent) if is_part and quoted(parent) in self._old["steps"] else name


def _is_within(name: str, given: str) -> bool:
    """Return whether a durable name is that of the step ``given``, or of a part of it."""
    plain = unquoted(name).split("@")[0]
    return plain == given or plain.startswith(f"{given}/")


def _or(name: str, choices: Collection[str]) -> str:
    hint = did_you_mean(name, choices)
    return f"; {hint}" if hint else ""

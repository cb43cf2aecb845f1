"""Names of a plan's parts that outlive a change of the pipeline's program.

Beam numbers PCollections, coders and stages in the order in which a program builds them, so another branch changes all
numbers after it. A checkpoint uses names made of the unique names of steps and of the tags of their outputs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import TypeVar

from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.runners.portability.fn_api_runner import translations
from apache_beam.runners.worker import bundle_processor

from luminosity.engine.plan.graph import Buffer, BufferKind, Graph, Read, Stage
from luminosity.engine.plan.translate import MOVE_URNS

__all__ = ["SOURCES", "Names", "plain_step", "quoted", "side_input_tags", "unquoted", "written_buffer"]

SOURCES = "source/"  # owners of what sources without an end have left to read: it stays when a drained run has ended

_Key = TypeVar("_Key", bound=Hashable)

_IO_URNS = (bundle_processor.DATA_INPUT_URN, bundle_processor.DATA_OUTPUT_URN)
_TRUNCATE_URN = common_urns.sdf_components.TRUNCATE_SIZED_RESTRICTION.urn
_LAMBDA = re.compile(r"<lambda at [^>]*>")
_WRITE = re.compile(r"/Write(/\d+)?$")
_MAIN_TAGS = frozenset(["None", "out", ""])  # what Beam calls the main output of a step
_RESERVED = re.compile("[%/|&:]")


def plain_step(name: str) -> str:
    """Return the name of a step without the places of lambdas in the source, which change with every edit.

    >>> plain_step("Read/Map(<lambda at pipeline.py:12>)")
    'Read/Map(<lambda>)'
    """
    return _LAMBDA.sub("<lambda>", name)


def quoted(name: str) -> str:
    """Return a name without the characters that separate the parts of a durable name and of a row's owner.

    >>> quoted("Read/Map"), unquoted("Read%2FMap")
    ('Read%2FMap', 'Read/Map')
    """
    return _RESERVED.sub(lambda found: f"%{ord(found[0]):02X}", name)


def unquoted(name: str) -> str:
    """Return the name that :func:`quoted` was called with."""
    return re.sub("%([0-9A-F]{2})", lambda found: chr(int(found[1], 16)), name)


def side_input_tags(transform: beam_runner_api_pb2.PTransform) -> set[str]:
    """Return the tags of a step's inputs that are side inputs."""
    if transform.spec.urn not in translations.PAR_DO_URNS:
        return set()
    return set(beam_runner_api_pb2.ParDoPayload.FromString(transform.spec.payload).side_inputs)


def written_buffer(transform: beam_runner_api_pb2.PTransform) -> str:
    """Return the name of a transform, or of the GroupByKey, Reshuffle or Flatten that it writes the input of."""
    is_write = transform.spec.urn == bundle_processor.DATA_OUTPUT_URN
    return _WRITE.sub("", transform.unique_name) if is_write else transform.unique_name


class Names:
    """The durable names of a plan's steps, reads, buffers and stages.

    Each kind of name is unique within a plan. None contains a slash, so that ``queue/NAME/more`` can be taken apart.
    A name stays the same if other parts of the pipeline change, if steps are built in another order, or if the code of
    a step changes. If a new step reads the same PCollection in the same stage, the name of their read changes:
    :func:`luminosity.engine.durable.comparison.compare` then says where its rows belong.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._planned = [t for stage in graph.stages for t in stage.transforms]
        self._makers = self._find_makers()
        self._steps = self._name_steps()
        self._buffers = _unique((b.id, self._name_buffer(b)) for b in graph.buffers.values())
        reads = [(stage, read) for stage in graph.stages for read in stage.reads]
        self._reads = _unique(((s.id, r.transform_id), self._name_read(s, r)) for s, r in reads)
        self._stages = _unique(
            (s.id, "&".join(sorted(self._reads[s.id, r.transform_id] for r in s.reads))) for s in graph.stages
        )

    def of_step(self, transform_id: str) -> str:
        """Return the name of a transform of the plan or of the pipeline."""
        return quoted(self._steps.get(transform_id) or plain_step(transform_id))

    def of_read(self, stage: Stage, read: Read) -> str:
        """Return the name of what a stage reads: the step that makes the elements, and the steps that take them."""
        return self._reads[stage.id, read.transform_id]

    def of_gates(self, stage: Stage) -> dict[str, str]:
        """Return the owners of the elements of a stage that wait for side inputs, by the ids of their reads."""
        return {read.transform_id: f"gate/{self.of_read(stage, read)}" for read in stage.reads}

    def of_buffer(self, buffer_id: bytes) -> str:
        """Return the name of a buffer: the GroupByKey, Reshuffle or Flatten, or else the step that writes it."""
        return self._buffers[buffer_id]

    def of_stage(self, stage: Stage) -> str:
        """Return the name of a stage, made of the names of its reads."""
        return self._stages[stage.id]

    def of_pcollection(self, pcollection_id: str) -> str:
        """Return the name of a PCollection: the step that makes it and, unless it is the main one, the output's tag."""
        maker, tag = self._makers.get(pcollection_id, (pcollection_id, ""))
        return self.of_step(maker) + ("" if tag in _MAIN_TAGS else f":{quoted(tag)}")

    def consumers(self, stage: Stage, read: Read) -> list[str]:
        """Return the unique names of the steps that take the elements of a read as their main input."""
        (pcollection,) = self._transform(stage, read.transform_id).outputs.values()
        return sorted(self._takers(stage, pcollection))

    def pcollection(self, stage: Stage, read: Read) -> str:
        """Return the id of the PCollection that a stage reads."""
        (pcollection,) = self._transform(stage, read.transform_id).outputs.values()
        return pcollection

    def makers(self) -> dict[str, str]:
        """Return the unique name of the step that makes each PCollection, by the PCollection's id."""
        return {pcollection: maker for pcollection, (maker, _) in self._makers.items()}

    def _transform(self, stage: Stage, transform_id: str) -> beam_runner_api_pb2.PTransform:
        return next(t for t in stage.transforms if t.unique_name == transform_id)

    def _find_makers(self) -> dict[str, tuple[str, str]]:
        """Return the step and the tag of the output that make each PCollection."""
        makers: dict[str, tuple[str, str]] = {}
        # The plan's own PCollections, such as the restrictions of a splittable step, are read but are no step's output.
        for transform in self._planned:
            if transform.spec.urn == bundle_processor.DATA_INPUT_URN:
                for pcollection in transform.outputs.values():
                    makers[pcollection] = (transform.unique_name.removesuffix("/Read"), "")
        # A composite has the PCollections of its parts as outputs: parts are named after it, so their names are longer.
        originals = sorted(self._graph.components.transforms.values(), key=lambda t: len(t.unique_name))
        moves: set[str] = set()
        for transform in originals:
            for tag, pcollection in transform.outputs.items():
                if pcollection not in moves and pcollection not in transform.inputs.values():
                    makers[pcollection] = (transform.unique_name, tag)
                    # The plan has a Reshuffle instead of its parts.
                    if transform.spec.urn in MOVE_URNS:
                        moves.add(pcollection)
        for transform in self._planned:
            if transform.spec.urn not in _IO_URNS:
                makers |= {p: (transform.unique_name, tag) for tag, p in transform.outputs.items()}
        return makers

    def _name_steps(self) -> dict[str, str]:
        """Return the name of each step, made unique if it has a lambda."""
        names: dict[str, str] = {}
        transforms = {t.unique_name: t for t in (*self._graph.components.transforms.values(), *self._planned)}
        for name in sorted(transforms, key=_natural):
            plain = plain_step(name)
            if plain != name:
                # Steps with lambdas are told apart by what they read: their order changes with the program.
                transform = transforms[name]
                sides = side_input_tags(transform)
                inputs = (p for tag, p in transform.inputs.items() if tag not in sides)
                sources = {plain_step(self._makers[p][0]) for p in inputs if p in self._makers}
                plain = "@".join([plain, *sorted(sources)])
            names[name] = plain
        return _unique(names.items(), separator="~")

    def _name_buffer(self, buffer: Buffer) -> str:
        if buffer.kind is BufferKind.IMPULSE:
            return "impulse"
        if buffer.kind is BufferKind.GROUP:
            return self.of_step(buffer.step)
        _, name = translations.split_buffer_id(buffer.id)
        return self.of_pcollection(name) if name in self._graph.components.pcollections else self.of_step(name)

    def _name_read(self, stage: Stage, read: Read) -> str:
        takers = "&".join(self.of_step(step) for step in self.consumers(stage, read))
        return f"{self.of_pcollection(self.pcollection(stage, read))}|{takers}"

    def _takers(self, stage: Stage, pcollection: str) -> set[str]:
        found: set[str] = set()
        for transform in stage.transforms:
            sides = side_input_tags(transform)
            if not any(p == pcollection and tag not in sides for tag, p in transform.inputs.items()):
                continue
            if transform.spec.urn == _TRUNCATE_URN:  # only in the plan of a drain
                found |= self._takers(stage, next(iter(transform.outputs.values())))
            else:
                name = written_buffer(transform)
                # A buffer that is named after a PCollection has the same elements, for other stages.
                found.add(self._makers[name][0] if name in self._makers else name)
        return found


def _unique(names: Iterable[tuple[_Key, str]], separator: str = "&&") -> dict[_Key, str]:
    """Return the names by key, with a number at all but the first of equal ones."""
    seen: Counter[str] = Counter()
    unique: dict[_Key, str] = {}
    for key, name in names:
        seen[name] += 1
        unique[key] = name if seen[name] == 1 else f"{name}{separator}{seen[name]}"
    return unique


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key under which line 9 comes before line 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]

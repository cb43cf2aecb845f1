"""The paths of the driver's machine that the nodes of a cluster see: workers must read and write the same files.

A node is asked with marks: empty folders with a name that no other folder has, which the driver makes for the moment of
the question. Readers of files don't see them. The folder of a checkpoint, in which workers write blocks, is asked for
with a file, which stays.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from luminosity._shared.text import list_some
from luminosity.engine.cluster.agent.agent import SHARE_CHECKPOINT
from luminosity.engine.cluster.driver import ray_calls
from luminosity.engine.resources.machine import Node
from luminosity.errors import OptionError, PathNotShared
from luminosity.runs.manifest.files import files_of
from luminosity.runs.manifest.places import Effects, Place

__all__ = ["SHARE_PATHS", "SharedPaths", "check_nodes", "mark"]

_LOGGER = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
_ANSWER_S = 30.0  # for all nodes together; the agent of a node that has not answered looks again
_SHOWN_NODES = 5  # in a message about the folder of a checkpoint
_MACHINE = ""  # stands for the driver's temporary folder, which only its own machine sees
_MOST_FILES = 1000  # of all sources, for which nodes are asked: each is one look at a disk or a server
_SHOWN = 3  # of nodes and files in a message
_NOT_A_PATH = "ValueProvider("  # how Beam shows a path that is known when the pipeline runs
SHARE_PATHS = "use a folder that all nodes mount at the same path, such as NFS, or a bucket (gs://, s3://)"


def mark(folder: str) -> str:
    """Leave a file in the folder that no other folder has. Returns its path."""
    path = os.path.join(folder, f"seen-by-nodes-{secrets.token_hex(8)}")
    with open(path, "x"):
        return path


def check_nodes(marker: str, nodes: Sequence[Node]) -> None:
    """Raise :class:`OptionError` with the names of the nodes that do not see the folder. Waits for their answers."""
    answers = _ask_nodes(nodes, _sees, marker)
    blind = [f"{node.address} ({node.id[:8]})" for node in nodes if not answers.get(node.id, True)]
    if blind:
        raise OptionError(
            f"--checkpoint_dir: found {len(blind)} of {len(answers)} nodes that do not see the folder, or can't write "
            f"there: {list_some(sorted(blind), _SHOWN_NODES)}; on a cluster, workers of all nodes write blocks there",
            fix=SHARE_CHECKPOINT,
        )


def _sees(marker: str) -> bool:
    return os.path.exists(marker) and os.access(os.path.dirname(marker), os.W_OK)


def _ask_nodes(nodes: Sequence[Node], question: Callable[..., _Answer], *arguments: Any) -> dict[str, _Answer]:
    """Call a function on each node. Returns the answers, by the ids of the nodes that have answered in time.

    Those that are gone, or have another version, say so when their agent starts.
    """
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask: Any = ray.remote(question)
    asked: dict[Any, str] = {}
    for node in nodes:
        place = NodeAffinitySchedulingStrategy(node.id, soft=False)
        asked[ask.options(num_cpus=0, max_retries=0, scheduling_strategy=place).remote(*arguments)] = node.id
    answered, late = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S)
    for reference in late:
        ray.cancel(reference)
    answers: dict[str, _Answer] = {}
    for reference in answered:
        try:
            answers[asked[reference]] = ray.get(reference)
        except RayError as error:
            _LOGGER.debug("node %s does not answer: %s", asked[reference][:8], error)
    return answers


class SharedPaths:
    """The paths that a pipeline names, and what the nodes see of them. Any thread may use it."""

    def __init__(self, effects: Effects, folder: str, sent: Collection[str]) -> None:
        """Look at what the pipeline reads here.

        ``folder`` is the driver's working folder, ``sent`` the files of the copy that each node gets, relative to it.
        """
        self._folder = folder
        self._sent = sent
        self._reads = {
            place: _files(place.path) for place in effects.reads if _is_local(place) and place.kind == "files"
        }
        self._writes = {place: _nearest_folder(place.path) for place in effects.writes if _is_local(place)}
        self._lock = threading.Lock()
        self._unseen: dict[str, frozenset[str]] = {}  # by node that has answered
        self._why_not: dict[str, str] = {}  # by node that has workers
        self.is_in_place = True
        """Whether workers run in the driver's working folder itself, which all nodes see, and not in a copy."""

    def check(self, found: Sequence[Node]) -> None:
        """Ask all nodes, before the run. Waits for their answers.

        Raises :class:`PathNotShared` if a node would read or write other files than those that the pipeline means.
        """
        others = {node.id: node for node in found if not node.is_driver and (node.cores or node.accelerators)}
        if not others:
            return
        with self._lock:
            self._unseen = self._ask([*others.values()])
            self.is_in_place = all(map(self._sees_folder, self._unseen.values()))
        names = {node_id: f"{others[node_id].address} ({node_id[:8]})" for node_id in self._unseen}
        if problem := next(self._problems(names, len(found)), None):
            raise PathNotShared(f"--ray_address: {problem}", fix=SHARE_PATHS)

    def why_not(self, node_id: str) -> str:
        """Return why workers can't run on a node; empty if they can. Asks a node that has not answered yet, once."""
        with self._lock:
            if node_id not in self._why_not:
                self._why_not[node_id] = self._look_at(node_id)
            return self._why_not[node_id]

    def _look_at(self, node_id: str) -> str:
        node = next((node for node in ray_calls.nodes() if node.id == node_id and not node.is_driver), None)
        answer = {} if node is None or node_id in self._unseen else self._ask([node])
        self._unseen |= answer
        if node is None or not answer:
            return ""  # it was asked before the run; or it does not answer, and its agent says why
        if self.is_in_place and not self._sees_folder(answer[node_id]):
            return f"it does not see the working folder {self._folder}, in which the workers of the other nodes run"
        return next(self._problems({node_id: node.address}, 1), "")

    def is_apart(self, node_id: str) -> bool:
        """Return whether a node is another machine than the driver's, as far as it has answered."""
        return _MACHINE in self._unseen.get(node_id, ())

    @property
    def shared(self) -> list[str]:
        """The folders that are known to be the same on all nodes."""
        return sorted({*self._writes.values(), *([self._folder] if self.is_in_place else [])})

    def _ask(self, asked: Sequence[Node]) -> dict[str, frozenset[str]]:
        files = dict(islice(((file, size) for found in self._reads.values() for file, size in found), _MOST_FILES))
        with _marked({_MACHINE, self._folder, *self._writes.values()}) as marks:
            return _ask_nodes(asked, _unseen, marks, files)

    def _sees_folder(self, unseen: frozenset[str]) -> bool:
        return self._folder not in unseen

    def _problems(self, names: Mapping[str, str], count: int) -> Iterator[str]:
        """Yield what some nodes, named by their ids, see differently."""
        for place, files in self._reads.items():
            if place.is_relative and not self.is_in_place:
                lost = [file for file, _ in files if os.path.relpath(file, self._folder) not in self._sent]
                if lost:
                    yield (
                        f"step {place.step!r} reads {list_some(lost, _SHOWN)}, and the copy of the working folder "
                        f"{self._folder} that nodes get does not have it: only what lies in that folder is copied, "
                        "without hidden files, linked folders and files above 100 MB"
                    )
                continue
            blind = [node_id for node_id in names if any(file in self._unseen[node_id] for file, _ in files)]
            if blind:
                missing = [file for file, _ in files if file in self._unseen[blind[0]]]
                yield (
                    f"step {place.step!r} reads {list_some(missing, _SHOWN)}, and {_some(blind, names, count)} not see "
                    "the same there"
                )
        for place, folder in self._writes.items():
            if place.is_relative and not self.is_in_place:
                yield (
                    f"step {place.step!r} writes to {place.path}, in or beside the working folder of the driver, which "
                    "not all nodes see: workers would write into a copy, which is removed with the run"
                )
                continue
            blind = [node_id for node_id in names if folder in self._unseen[node_id]]
            if blind:
                yield (
                    f"step {place.step!r} writes to {place.path}, and {_some(blind, names, count)} not see the "
                    f"driver's folder {folder}, or can't write there: what workers write would stay on their node"
                )


def _some(blind: Sequence[str], names: Mapping[str, str], count: int) -> str:
    verb = "does" if len(blind) == 1 else "do"
    shown = list_some(sorted(names[node_id] for node_id in blind), _SHOWN)
    return f"{len(blind)} of {count} nodes ({shown}) {verb}"


def _is_local(place: Place) -> bool:
    return os.path.isabs(place.path) and "://" not in place.path and _NOT_A_PATH not in place.path


def _files(path: str) -> list[tuple[str, int]]:
    """Return the files that a pattern means here, with their sizes."""
    with contextlib.suppress(OSError):  # then the source says why it can't be read
        return [(file, os.path.getsize(file)) for file in files_of(path)]
    return []


def _nearest_folder(path: str) -> str:
    """Return the nearest folder that exists: the path itself, or one above it.

    >>> _nearest_folder("/usr/bin/none/such-*-of-*.txt")
    '/usr/bin'
    """
    folder = path
    while glob.has_magic(folder) or not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder


@contextlib.contextmanager
def _marked(folders: Collection[str]) -> Generator[dict[str, str]]:
    """Within the context, the folders have marks, whose paths it gives, by folder; those that can't be written none."""
    marks: dict[str, str] = {}
    try:
        for folder in folders:
            path = os.path.join(folder or tempfile.gettempdir(), f".luminosity-seen-by-nodes-{secrets.token_hex(8)}")
            with contextlib.suppress(OSError):
                os.mkdir(path)
                marks[folder] = path
        yield {folder: marks.get(folder, "") for folder in folders}
    finally:
        for path in marks.values():
            with contextlib.suppress(OSError):  # somebody has removed it, or the whole folder
                os.rmdir(path)


def _unseen(marks: Mapping[str, str], files: Mapping[str, int]) -> frozenset[str]:
    """Return which folders of the driver, given with their marks, and which files, with their sizes, are not here.

    A folder that the driver can't write to has no mark. On the driver's own machine it is seen.
    """
    seen = {folder for folder, mark in marks.items() if mark and os.path.isdir(mark) and os.access(mark, os.W_OK)}
    if _MACHINE in seen:
        seen |= {folder for folder, mark in marks.items() if not mark}
    return frozenset({*marks} - seen) | {path for path, size in files.items() if _size(path) != size}


def _size(path: str) -> int | None:
    try:
        return os.path.getsize(path)
    except OSError:
        return None

"""The folder of a checkpoint as the nodes of a cluster see it: workers write blocks there, so all must see the same."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from luminosity._shared.text import list_some
from luminosity.engine.resources.nodes import Node
from luminosity.errors import OptionError, WorkerStartFailed

__all__ = ["ask_nodes", "check_here", "check_nodes", "mark"]

_LOGGER = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_ANSWER_S = 30.0  # for all nodes together; the agent of a node that has not answered looks again
_SHOWN = 5  # nodes in a message
_FIX = (
    "pass a folder of a file system that all nodes mount at the same path, such as NFS, or leave out --checkpoint_dir"
)


def mark(folder: str) -> str:
    """Leave a file in the folder that no other folder has. Returns its path."""
    path = os.path.join(folder, f"seen-by-nodes-{secrets.token_hex(8)}")
    with open(path, "x"):
        return path


def check_here(marker: str) -> str:
    """Return the folder of the marker. Raises :class:`WorkerStartFailed` if this node sees it not, or another one."""
    folder = os.path.dirname(marker)
    if not os.path.exists(marker):
        host = socket.gethostname()
        raise WorkerStartFailed(f"node {host} does not see the checkpoint's folder {folder} of the driver", fix=_FIX)
    if not os.access(folder, os.W_OK):
        host = socket.gethostname()
        raise WorkerStartFailed(f"node {host} can't write into the checkpoint's folder {folder}", fix=_FIX)
    return folder


def check_nodes(marker: str, nodes: Sequence[Node]) -> None:
    """Raise :class:`OptionError` with the names of the nodes that do not see the folder. Waits for their answers."""
    answers = ask_nodes(nodes, _sees, marker)
    blind = [f"{node.address} ({node.id[:8]})" for node in nodes if not answers.get(node.id, True)]
    if blind:
        raise OptionError(
            f"--checkpoint_dir: found {len(blind)} of {len(answers)} nodes that do not see the folder, or can't write "
            f"there: {list_some(sorted(blind), _SHOWN)}; on a cluster, workers of all nodes write blocks there",
            fix=_FIX,
        )


def _sees(marker: str) -> bool:
    return os.path.exists(marker) and os.access(os.path.dirname(marker), os.W_OK)


def ask_nodes(nodes: Sequence[Node], question: Callable[..., Answer], *arguments: Any) -> dict[str, Answer]:
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
    answers: dict[str, Answer] = {}
    for reference in answered:
        try:
            answers[asked[reference]] = ray.get(reference)
        except RayError as error:
            _LOGGER.debug("node %s does not answer: %s", asked[reference][:8], error)
    return answers

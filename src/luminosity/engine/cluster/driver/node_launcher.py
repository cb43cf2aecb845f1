"""Starts and ends the workers of a run on the nodes of a cluster, and handles the loss of workers and nodes."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity._shared.text import LOST_WITH_NODE, shorten
from luminosity.core import THREAD_VARIABLES, WorkerShare
from luminosity.engine.cluster.agent.agent import RunOnNodes
from luminosity.engine.cluster.agent.forked_workers import Exit
from luminosity.engine.cluster.agent.node_load import NodeSample
from luminosity.engine.cluster.driver import ray_calls
from luminosity.engine.cluster.driver.agents import Agent, Agents, RemoteAgent
from luminosity.engine.cluster.driver.leases import KILLED, Leases, NodeProcess, bundle_of
from luminosity.engine.cluster.driver.node_watch import NodeSamples, NodeWatch
from luminosity.engine.cluster.driver.objects import ObjectTable, object_keys
from luminosity.engine.cluster.driver.ray_calls import Calls, Threads
from luminosity.engine.cluster.driver.shared_paths import SHARE_PATHS, SharedPaths
from luminosity.engine.cluster.security import RunSecurity
from luminosity.engine.cluster.worker.local_paths import LocalPaths
from luminosity.engine.cluster.worker.node_worker import NodeWorker
from luminosity.engine.resources.machine import Node, visibility
from luminosity.engine.workers.launcher import OnExit
from luminosity.engine.workers.request import WorkerRequest
from luminosity.errors import BlockLost, WorkerStartFailed
from luminosity.events import DeviceView, NodeView

__all__ = ["NodeLauncher"]

_LOGGER = logging.getLogger(__name__)

_SURE_S = 15.0  # for a node to answer after its agent has ended; then Ray knows for certain whether it is dead
_MOST_WORDS = 1000  # characters of an error of Ray's, which may have a long traceback
_EMPTY_S = 2.0  # for which a node must have no worker before it is given back: one may be about to start there
_AGAIN_S = 30.0  # until blocks that could not be copied from such a node are tried again
_GIVE_BACK_S = 60.0  # for a worker to wait until its node, which was given back just now, can have a new agent
_THREADS = 16  # of each kind of work: the start of a hundred nodes must not take one after the other


class NodeLauncher:
    """The workers of a run. The loop's thread starts them; other threads report what happens to them."""

    def __init__(
        self,
        run: RunOnNodes,
        sent: bytes,
        paths: SharedPaths,
        *,
        url: str,
        security: RunSecurity,
        driver_node: str,
        read_by_driver: Sequence[str],
    ) -> None:
        """Make a launcher.

        ``sent`` is the archive of the user's code. ``paths`` knows which nodes see the files that steps read and write.
        ``read_by_driver`` are the outputs of steps whose elements the driver reads itself.
        """
        self._paths = paths
        self._url = url
        self._security = security
        self._driver_node = driver_node
        self._read_by_driver = read_by_driver
        self._processes: dict[str, NodeProcess] = {}
        self._lock = threading.Lock()
        self._calls = Calls()
        self._submit = self._calls.submit
        self._refusal: WorkerStartFailed | None = None  # why no worker can start
        self._avoided: frozenset[str] = frozenset()  # nodes that are gone, frozen, leaving or blind
        self._arriving: Counter[str] = Counter()  # workers that are about to start, by node
        self._empty_since: dict[str, float] = {}  # by node with an agent and no worker
        self._given_back: dict[str, threading.Event] = {}  # by node that is being given back; set when that is done
        self.objects = ObjectTable(driver_node)
        self._agents = Agents(
            run,
            sent,
            driver_node,
            on_exits=lambda exits: self._submit(self._reports, self._exited, exits),
            on_lost=lambda node_id: self._submit(self._losses, self._agent_lost, node_id),
        )
        self._leases = Leases()
        self._samples = NodeSamples(self._agents)
        # Starts wait for agents, which may install packages for minutes, and losses wait for copies of blocks. Neither
        # may keep the other, or the report that a worker has ended, waiting.
        self._starts, self._losses, self._reports = (Threads(_THREADS, "luminosity-nodes") for _ in range(3))
        self._watch = NodeWatch(
            self._agents,
            on_frozen=lambda node_id: self._submit(self._losses, self._forget_node, node_id),
            on_leaving=lambda node_id: self._submit(self._losses, self._leave_node, node_id),
            on_look=self._look_for_empty,
        )

    # Starting

    def start(self, request: WorkerRequest, on_exit: OnExit) -> NodeProcess:
        """Ask the cluster for a worker. Does not wait for it. Raises why an earlier one was refused, if it was."""
        if self._refusal is not None:
            raise self._refusal
        needs = request.lease
        assert needs is not None
        process = NodeProcess(
            request.worker_id,
            needs,
            on_exit=on_exit,
            on_killed=lambda process: self._submit(self._reports, self._kill, process),
            on_ended=lambda process: self._submit(self._reports, self._ended, process),
        )
        with self._lock:
            self._processes[request.worker_id] = process
        self._submit(self._starts, self._lease, process, request)
        return process

    def _lease(self, process: NodeProcess, request: WorkerRequest) -> None:
        needs = process.needs
        if not bundle_of(needs):
            self._placed(process, request, self._node_without_lease(needs.node))
            return
        avoided = self._avoided
        try:
            self._leases.ask(
                process.worker_id,
                needs,
                avoided,
                lambda node_id: self._submit(self._starts, self._placed, process, request, node_id),
            )
        except Exception as error:  # Ray raises various ones if its head does not answer
            if not self._calls.closed.is_set():
                _LOGGER.warning("the cluster gives no place to a worker: %s", shorten(f"{error}", _MOST_WORDS))
            process.ended(KILLED)
        if avoided - self._avoided:
            self._leases.ask_again(self._avoided)  # a node has answered meanwhile
        if process.has_ended:
            self._leases.release(process.worker_id)  # its end came first

    def _node_without_lease(self, wanted: str) -> str:
        """Return a node for a worker that needs nothing of its own: the wanted one, or that with the fewest workers."""
        if wanted and wanted not in self._avoided:
            return wanted
        with self._lock:
            workers = Counter(each.node_id for each in self._processes.values())
        known = [agent.node_id for agent in self._agents.all() if agent.node_id not in self._avoided]
        return min(known, key=lambda node_id: workers[node_id], default=self._driver_node)

    def _agent_at(self, node_id: str) -> Agent:
        """Return the agent of a node. Those of other nodes hold copies of blocks from then on."""
        agent = self._agents.at(node_id)
        if isinstance(agent, RemoteAgent):
            self.objects.add_keeper(agent)
        return agent

    def _begin_agent(self, node_id: str) -> None:
        """Start the agent of a node before it is needed. Workers that wait for it find out if it fails."""
        if self._agents.is_asked_for(node_id):
            return  # a node has many workers, and threads are few
        try:
            self._agents.at(node_id)
        except Exception as error:  # as in _placed
            _LOGGER.debug("node %s has no agent: %s", node_id[:8], error)

    def _placed(self, process: NodeProcess, request: WorkerRequest, node_id: str) -> None:
        """Let the agent of its node start a worker that has a place."""
        with self._lock:
            self._arriving[node_id] += 1
            given_back = self._given_back.get(node_id)
        if given_back is not None:
            given_back.wait(_GIVE_BACK_S)  # its agent ends, and a new one starts
        try:
            self._start_on_node(process, request, node_id)
        finally:
            with self._lock:
                self._arriving[node_id] -= 1

    def _start_on_node(self, process: NodeProcess, request: WorkerRequest, node_id: str) -> None:
        try:
            if self._is_blind(node_id):
                process.ended(LOST_WITH_NODE)  # another one starts elsewhere
                return
            if process.needs.gpus:
                self._submit(self._starts, self._begin_agent, node_id)  # meanwhile
            devices = self._leases.devices(process.worker_id, node_id, process.needs)
            agent = self._agent_at(node_id)
        except Exception as error:  # besides our own, those of a full disk and of Ray
            self._not_started(process, error, node_id)
            return
        process.node_id = node_id  # not earlier: the time limit for its start begins now, and packages take minutes
        share = WorkerShare.from_environment(request.environment)
        share = replace(share, devices=devices or share.devices)
        own = {name: value for name, value in request.environment.items() if name in THREAD_VARIABLES}
        request = replace(
            request,
            url=self._url,
            environment={**own, **visibility(share.devices), **share.to_environment()},
            memory_folder="",  # the agent knows the folders of its node
            spill_folder="",
            quota="",
            main_classes=os.path.basename(request.main_classes),
            load_ahead=os.path.basename(request.load_ahead),
            private_folders=[],
            prints={},
            lease=None,
        )
        if not (process.is_killed or process.has_ended):
            paths = LocalPaths(request.working_directory, self._paths.is_apart(node_id), self._paths.shared)
            agent.start(
                request, NodeWorker(asdict(self._security.access(request.worker_id)), paths, self._read_by_driver)
            )

    def _is_blind(self, node_id: str) -> bool:
        """Return whether a node, which may have come after the run's start, does not see files that steps need."""
        reason = self._paths.why_not(node_id)
        with self._lock:
            is_new = bool(reason) and node_id not in self._avoided
            self._avoided |= {node_id} if reason else set()
        if is_new:
            _LOGGER.warning("node %s gets no workers of this run: %s", node_id[:8], reason)
            if not any(node.cores or node.accelerators for node in self.usable_nodes()):
                # The run began without nodes that could be asked, and would wait for another one forever.
                message = f"no node can have workers; the first that could, {node_id[:8]}, was refused: {reason}"
                self._refusal = WorkerStartFailed(message, fix=SHARE_PATHS)
        return bool(reason)

    def _not_started(self, process: NodeProcess, error: Exception, node_id: str) -> None:
        is_lost = not ray_calls.is_alive(node_id)
        if isinstance(error, WorkerStartFailed):
            self._refusal = error  # another start would find the same
        elif not (process.is_killed or is_lost or self._calls.closed.is_set()):
            message = shorten(f"{error}", _MOST_WORDS)
            _LOGGER.warning("a worker on node %s did not start: %s", node_id[:8], message)
        process.ended(LOST_WITH_NODE if is_lost else KILLED)

    # Ends

    def _kill(self, process: NodeProcess) -> None:
        agent = self._agents.known(process.node_id)
        if agent is None:
            process.ended(KILLED)  # it has no place yet, or its node is given up
        else:
            agent.kill(process.worker_id)

    def _exited(self, exits: list[Exit]) -> None:
        for each in exits:
            with self._lock:
                process = self._processes.get(each.worker_id)
            if each.reason:
                _LOGGER.warning("a worker did not start: %s", each.reason)
            if process is not None:
                process.ended(each.code)

    def _ended(self, process: NodeProcess) -> None:
        self._leases.release(process.worker_id)

    def forget(self, worker_id: str) -> None:
        """Free what a worker has sent and the loop has not received. The loop has given it up, after its exit."""
        self.objects.worker_gone(worker_id)
        with self._lock:
            process = self._processes.pop(worker_id, None)
        if process is not None and (agent := self._agents.known(process.node_id)) is not None:
            agent.forget(worker_id)

    # What is known of the cluster

    def nodes(self) -> tuple[NodeView, ...]:
        """Return the nodes that have workers or agents of this run, as they were a moment ago."""
        with self._lock:
            living = [each for each in self._processes.values() if not each.has_ended]
        workers = Counter(process.node_id for process in living if process.node_id)
        samples, blocks = self._samples.newest, self.objects.bytes_on_nodes()
        return tuple(
            _view(node_id, workers[node_id], blocks.get(node_id, 0), samples.get(node_id))
            for node_id in sorted({*workers, *samples})
        )

    def usable_nodes(self) -> tuple[Node, ...]:
        """Return the nodes on which workers may run, as of a second ago. Does not wait."""
        return tuple(node for node in self._watch.alive if node.id not in self._avoided)

    def object_bytes(self) -> int:
        """Return the bytes of the blocks in the cluster's stores, without second copies."""
        return self.objects.bytes

    # Messages

    def secure(self, worker_id: str, elements: beam_fn_api_pb2.Elements) -> bool:
        """Take over the objects that a message names; return False if they are lost. Waits."""
        with self._lock:
            process = self._processes.get(worker_id)
        if process is None or process.is_killed or process.has_ended:
            # Its bundles are repeated. If one of its messages was dropped, a later one must not complete a bundle.
            return False
        keys = object_keys(elements)
        if not keys:
            return True
        with self._calls.one() as may_begin:
            if not may_begin:
                return False
            try:
                self._take(process, keys)
            except BlockLost as error:
                if not process.has_ended and not process.is_killed and not self._calls.closed.is_set():
                    _LOGGER.warning("a worker's output is lost, so that its bundles are repeated: %s", error.message)
                process.kill()
                return False
        return True

    def _take(self, process: NodeProcess, keys: Sequence[str]) -> None:
        agent = self._agents.known(process.node_id)
        if agent is None:
            raise BlockLost(f"node {process.node_id[:8]} is gone")
        take = functools.partial(agent.take, process.worker_id)
        self.objects.secure(process.worker_id, process.node_id, take, keys)

    def feed(self, worker_id: str, elements: beam_fn_api_pb2.Elements) -> None:
        """Send the agent of a worker's node the references to the objects that a message names. Does not wait.

        Raises :class:`BlockLost` if all copies of one of them are gone.
        """
        if not (keys := object_keys(elements)):
            return
        with self._lock:
            process = self._processes.get(worker_id)
        if process is not None and (agent := self._agents.known(process.node_id)) is not None:
            objects = {key: self.objects.copies(key) for key in keys}
            agent.feed(worker_id, elements.data[0].instruction_id, objects)

    # Losses

    def connection_lost(self, worker_id: str) -> None:
        """Give up a worker whose connection broke: it has died, or its node is frozen or out of reach."""
        with self._lock:
            process = self._processes.get(worker_id)
        if process is not None:
            process.kill()

    def _agent_lost(self, node_id: str) -> None:
        """Give up a node whose agent has ended, most likely with the node: Ray may say so seconds later.

        If only the agent has ended, the workers there and their folder are gone with it, and the node gets new ones,
        as soon as it answers. Workers that wait for a place since then may be placed there.
        """
        self._forget_node(node_id)
        if ray_calls.answers(node_id, _SURE_S, self._calls.closed):
            with self._lock:
                self._avoided -= {node_id}
            _LOGGER.warning("node %s is there; only this run's agent on it had ended, and starts again", node_id[:8])
            self._leases.ask_again(self._avoided)

    def _forget_node(self, node_id: str) -> None:
        """Give up a node that is gone or frozen: end its workers, and copy the blocks that it held."""
        _LOGGER.warning(
            "node %s is gone with %d workers of this run; what ran there is repeated elsewhere, and new workers start "
            "where the cluster has room",
            node_id[:8],
            len(self._on(node_id)),
        )
        self._avoided |= {node_id}
        self._agents.give_up(node_id)
        self._end_workers(node_id)
        self.objects.node_lost(node_id)

    def _end_workers(self, node_id: str) -> None:
        for process in self._on(node_id):
            process.ended(LOST_WITH_NODE)

    def _leave_node(self, node_id: str) -> None:
        """Let the workers of a node end after their bundles, and copy the blocks that it holds."""
        self._avoided |= {node_id}
        if self._on(node_id):
            _LOGGER.warning("node %s will leave the cluster; its workers get no more work", node_id[:8])
        for process in self._on(node_id):
            process.leave()
        self.objects.node_leaves(node_id)

    # Nodes without work

    def _look_for_empty(self) -> None:
        """Give back nodes that have had no worker for a while: as long as they have an agent, they count as busy."""
        now = time.monotonic()
        with self._lock:
            busy = {each.node_id for each in self._processes.values() if not each.has_ended} | set(+self._arriving)
        empty = {agent.node_id for agent in self._agents.on_other_nodes()} - busy
        self._empty_since = {node_id: self._empty_since.get(node_id, now) for node_id in empty}
        for node_id, since in self._empty_since.items():
            if now - since >= _EMPTY_S and node_id not in self._avoided:
                self._empty_since[node_id] = now + _AGAIN_S
                self._submit(self._losses, self._give_back, node_id)

    def _give_back(self, node_id: str) -> None:
        """Copy the blocks of a node without workers elsewhere, and end its agent. A later worker gets a new one."""
        with self._lock:
            living = any(each.node_id == node_id and not each.has_ended for each in self._processes.values())
            if living or self._arriving[node_id]:
                return
            done = self._given_back[node_id] = threading.Event()
        try:
            if self.objects.move_from(node_id):
                self._agents.release(node_id)
                _LOGGER.info("node %s is given back: it had no work of this run", node_id[:8])
        finally:
            with self._lock:
                del self._given_back[node_id]
            done.set()

    def _on(self, node_id: str) -> list[NodeProcess]:
        with self._lock:
            return [process for process in self._processes.values() if process.node_id == node_id]

    def close(self) -> None:
        """End all workers and agents. Waits a few seconds for the agents to remove their folders."""
        self._calls.close()
        with self._lock:
            left = list(self._processes.values())
        self._samples.stop()
        for process in left:
            process.ended(KILLED)
        self.objects.clear()
        self._agents.close()
        self._leases.close()
        self._watch.close()
        for threads in (self._starts, self._losses, self._reports):
            threads.close()
        self._calls.wait()


def _view(node_id: str, workers: int, blocks: int, sample: NodeSample | None) -> NodeView:
    if sample is None:
        return NodeView(node_id, workers=workers, blocks=blocks)
    load = sample.cpu_utilization
    return NodeView(
        node_id,
        sample.host,
        workers,
        None if load is None else round(load, 3),
        sample.ram_used,
        sample.ram_total,
        blocks,
        tuple(
            DeviceView(name, utilization=each.utilization, memory_used=each.memory_used, memory_total=each.memory_total)
            for name, each in sample.devices.items()
        ),
    )

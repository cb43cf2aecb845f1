"""Starts and ends the actors that are workers, and watches them and their nodes."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity._text import LOST_WITH_NODE, shorten
from luminosity.core import THREAD_VARIABLES, WorkerShare
from luminosity.engine.actors.agents import Agents
from luminosity.engine.actors.node_samples import NodeSamples
from luminosity.engine.actors.node_watch import NodeWatch
from luminosity.engine.actors.objects import ObjectTable, object_keys
from luminosity.engine.actors.worker_actor import Place, WorkerActor
from luminosity.engine.cluster import nodes, shipping
from luminosity.engine.fnapi.security import RunSecurity
from luminosity.engine.resources.nodes import ActorNeeds
from luminosity.engine.workers.launcher import OnExit
from luminosity.engine.workers.request import WorkerRequest
from luminosity.errors import BlockLost, WorkerStartFailed
from luminosity.events import NodeView
from luminosity.model_sizes import NODE_FOLDER_VARIABLE

__all__ = ["ActorLauncher", "ActorProcess"]

_LOGGER = logging.getLogger(__name__)

_KILLED = -9  # the exit code of a worker that is gone, as if a signal had killed it
_USUAL_START_S = 10.0  # of an actor that has a place, on a busy node
_KILL_TIMEOUT_S = 3.0  # for Ray to confirm the end of an actor; a frozen node never does
_CLOSE_S = 3.0  # for threads to leave their calls of Ray, before the connection to it is closed
_MAX_FAILED_SETUPS = 2  # of actors whose packages or imports fail: one may be chance, such as a package index
_NODE_DIED = "node has died"  # in Ray's message for an actor that was lost with its node
_MOST_WORDS = 1000  # characters of an error of Ray's, which may have a long traceback
_CONCURRENT_CALLS = 16  # of an actor: one runs the harness, the others hand blocks over
_AGENTS_AHEAD = 8  # nodes whose agents start with the run, before workers have places there
_MOST_NODES = 100  # in a snapshot
_THREADS = 16  # that bring actors up, so that the start of a hundred nodes does not take one after the other


class ActorProcess:
    """One worker's actor, in the driver."""

    pid = 0  # of another machine, so that nobody here may look at it or signal it

    def __init__(self, worker_id: str, actor: Any, needs: ActorNeeds, on_exit: OnExit) -> None:
        self.worker_id = worker_id
        self.actor = actor
        self.node_id = ""  # empty until it has a place
        self.is_killed = False
        self._asked_at = time.monotonic()
        self._is_leaving = False
        self._needs = needs
        self._on_exit: OnExit | None = on_exit
        self._has_ended = threading.Event()
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()

    def kill(self) -> None:
        """End the actor. Reports the end even if its node never confirms it: the worker is refused from then on."""
        import ray

        with self._lock:
            if self.is_killed:
                return
            self.is_killed = True
            if not self.has_ended:
                self._timer = threading.Timer(_KILL_TIMEOUT_S, self.ended, (_KILLED,))
                self._timer.daemon = True
                self._timer.start()
        ray.kill(self.actor, no_restart=True)  # takes long if the cluster is busy

    def waits_for(self) -> str:
        """Return the resources that the cluster has not given yet. The first seconds may be those of a usual start."""
        is_starting = self.node_id or time.monotonic() - self._asked_at < _USUAL_START_S
        return "" if is_starting else self._needs.words

    def node(self) -> str:
        """Return the id of its node; empty until it has a place."""
        return self.node_id

    def is_leaving(self) -> bool:
        """Return whether the worker's node will be gone soon."""
        return self._is_leaving

    def leave(self) -> None:
        """Note that the node will be gone soon."""
        self._is_leaving = True

    def ended(self, code: int) -> None:
        """Report the end, once."""
        with self._lock:
            if self.has_ended:
                return
            self._has_ended.set()
            # Ray and a timer may hold this object for seconds; they must not hold the run, and the files that it reads.
            on_exit, self._on_exit = self._on_exit, None
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        if on_exit is not None:
            on_exit(code)

    @property
    def has_ended(self) -> bool:
        """Whether the end was reported."""
        return self._has_ended.is_set()


class ActorLauncher:
    """The actors of a run. The loop's thread starts them; other threads report what happens to them."""

    def __init__(
        self,
        run_id: str,
        url: str,
        security: RunSecurity,
        files: Mapping[str, bytes],
        driver_node: str,
        first_nodes: Sequence[str],
        read_by_driver: frozenset[str],
        marker: str,
    ) -> None:
        """Make a launcher.

        ``files`` are for each node's folder. ``first_nodes`` are likely to get workers. ``marker`` is a file in the
        folder for blocks, if nodes share one.
        """
        import ray

        self._url = url
        self._security = security
        self._driver_node = driver_node
        self._read_by_driver = read_by_driver
        self._marker = marker
        self._processes: dict[str, ActorProcess] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._calls = 0  # of threads that may be inside Ray now
        self._failed_setups = 0
        self._refusal: WorkerStartFailed | None = None  # why no worker can start
        self._avoided: set[str] = set()  # nodes that are gone, frozen or leaving
        self.objects = ObjectTable(driver_node)
        self._agents = Agents(run_id, files, lambda node_id: self._submit(self._agent_ended, node_id))
        self._samples = NodeSamples(self._agents.all)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="luminosity-actors")
        made: Any = ray.remote(WorkerActor)
        self._make: Any = made
        # An agent takes as long to start as a worker, so those of the first nodes don't wait for their workers.
        for node_id in first_nodes[:_AGENTS_AHEAD]:
            self._submit(self._use_node, node_id)
        self._watch = NodeWatch(
            self._agents,
            on_frozen=lambda node_id: self._submit(self._forget_node, node_id),
            on_leaving=lambda node_id: self._submit(self._leave_node, node_id),
        )

    def _submit(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on a thread of the pool, unless the run has ended."""
        with self._lock:
            if not self._closed.is_set():
                self._threads.submit(self._call, function, *arguments)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        if not self._begin_call():
            return
        try:
            function(*arguments)
        except Exception:  # the pool would swallow it
            if not self._closed.is_set():
                _LOGGER.exception("the driver could not handle an event of the cluster")
        finally:
            self._end_call()

    def _begin_call(self) -> bool:
        with self._lock:
            self._calls += not self._closed.is_set()
            return not self._closed.is_set()

    def _end_call(self) -> None:
        with self._lock:
            self._calls -= 1

    # Starting

    def start(self, request: WorkerRequest, on_exit: OnExit) -> ActorProcess:
        """Ask the cluster for an actor. Does not wait for it. Raises why an earlier one was refused, if it was."""
        if self._refusal is not None:
            raise self._refusal
        needs = request.actor
        assert needs is not None
        is_gpu = needs.accelerator_kind == "gpu"
        options: dict[str, Any] = {"num_cpus": needs.cpus, "num_gpus": needs.gpus if is_gpu else 0}
        if needs.gpus and not is_gpu:
            options["resources"] = {needs.accelerator_kind.upper(): needs.gpus}  # as Ray names chips of TPUs
        if needs.memory:
            options["memory"] = needs.memory
        if needs.accelerator_type:
            options["accelerator_type"] = needs.accelerator_type
        actor = self._make.options(
            max_restarts=0,  # the loop decides what is repeated
            max_task_retries=0,
            max_concurrency=_CONCURRENT_CALLS,
            scheduling_strategy="SPREAD" if not needs.node or needs.node in self._avoided else nodes.near(needs.node),
            **options,
        ).remote()
        process = ActorProcess(
            request.worker_id, actor, needs, lambda code: self._exited(request.worker_id, on_exit, code)
        )
        with self._lock:
            self._processes[request.worker_id] = process
        self._when_done(actor.place.remote(), lambda future: self._placed(process, request, future))
        return process

    def _when_done(self, reference: Any, then: Callable[[Future[Any]], None]) -> None:
        """Call ``then`` on a thread of ours when a call has been answered."""
        reference.future().add_done_callback(lambda future: self._submit(then, future))

    def _use_node(self, node_id: str) -> None:
        """Start the agent of a node, which then holds copies of blocks."""
        try:
            self.objects.add_keeper(self._agents.at(node_id))
        except (BlockLost, WorkerStartFailed) as error:
            _LOGGER.debug("%s", error)  # a worker that starts there reports it

    def _placed(self, process: ActorProcess, request: WorkerRequest, future: Future[Place]) -> None:
        """Start the harness of an actor that has a place, with the folder of its node."""
        from ray.exceptions import RayError

        node_id = ""
        try:
            place = future.result()
            node_id = place.node_id
            agent = self._agents.at(node_id)
        except (RayError, BlockLost, WorkerStartFailed) as error:
            self._failed(process, error, node_id)
            return
        self.objects.add_keeper(agent)
        process.node_id = place.node_id
        folder = agent.folder
        share = WorkerShare.from_environment(request.environment)
        own = {name: value for name, value in request.environment.items() if name in THREAD_VARIABLES}
        request = replace(
            request,
            url=self._url,
            access=asdict(self._security.access(request.worker_id)),
            environment={**own, **share.to_environment(), NODE_FOLDER_VARIABLE: folder["memory"]},
            source_folder=request.working_directory,
            import_path=[folder["packages"]] if folder["packages"] else [],
            memory_folder=folder["memory"],
            spill_folder=folder["path"],
            quota="",
            main_classes=f"{folder['path']}/main-classes",
            load_ahead=f"{folder['path']}/{request.load_ahead.rpartition('/')[2]}" if request.load_ahead else "",
            private_folders=[],
            prints={},
            actor=None,
        )
        running = process.actor.run.remote(request, self._read_by_driver, self._marker, shipping.versions())
        self._when_done(running, lambda future: self._ran(process, future))

    def _ran(self, process: ActorProcess, future: Future[None]) -> None:
        error = future.exception()
        if error is None:
            process.ended(0)
            process.kill()  # its harness has nothing more to do
        else:
            self._failed(process, error, process.node_id)

    def _failed(self, process: ActorProcess, error: BaseException, node_id: str) -> None:
        """Report the end of an actor that died, or whose code raised."""
        from ray.exceptions import RayActorError, RuntimeEnvSetupError

        cause = getattr(error, "cause", error)  # of an exception in an actor
        is_lost = _NODE_DIED in f"{error}" or (bool(node_id) and not nodes.is_alive(node_id))
        if isinstance(cause, WorkerStartFailed):
            self._refusal = cause  # another start would find the same
        elif isinstance(error, RuntimeEnvSetupError) or (isinstance(error, RayActorError) and error.actor_init_failed):
            self._failed_setups += 1
            if self._failed_setups >= _MAX_FAILED_SETUPS:
                self._refusal = WorkerStartFailed(f"a worker can't start on the cluster: {error}")
        elif process.is_killed or is_lost or (process.node_id and isinstance(error, RayActorError)):
            _LOGGER.debug("worker %s on node %s: %r", process.worker_id, node_id[:8], error)
        else:
            _LOGGER.warning("a worker on node %s ended: %s", node_id[:8] or "?", shorten(f"{error}", _MOST_WORDS))
        process.ended(LOST_WITH_NODE if is_lost else _KILLED)
        process.kill()

    def _exited(self, worker_id: str, on_exit: OnExit, code: int) -> None:
        with self._lock:
            self._processes.pop(worker_id, None)
        on_exit(code)

    def forget(self, worker_id: str) -> None:
        """Free what a worker has sent and the loop has not received. The loop has given it up, after its exit."""
        self.objects.worker_gone(worker_id)

    # What is known of the cluster

    def nodes(self) -> tuple[NodeView, ...]:
        """Return the nodes that have workers or agents of this run, as they were a moment ago."""
        with self._lock:
            workers = Counter(process.node_id for process in self._processes.values() if process.node_id)
        samples = self._samples.newest
        return tuple(
            NodeView(node_id, sample.host, workers[node_id], sample.cpu_utilization, sample.ram_used, sample.ram_total)
            if (sample := samples.get(node_id)) is not None
            else NodeView(node_id, workers=workers[node_id])
            for node_id in sorted({*workers, *samples})[:_MOST_NODES]
        )

    def object_bytes(self) -> int:
        """Return the bytes of the blocks in the cluster's stores, without second copies."""
        return self.objects.bytes

    # Messages

    def secure(self, worker_id: str, elements: beam_fn_api_pb2.Elements) -> bool:
        """Take over the objects that a message names; return False if they are lost. Waits."""
        keys = object_keys(elements)
        if not keys:
            return True
        with self._lock:
            process = self._processes.get(worker_id)
        if process is None or not self._begin_call():
            return False

        def take(number: int) -> tuple[Any, Any]:
            block, size = process.actor.take.options(num_returns=2).remote(number)
            return block, size

        try:
            self.objects.secure(worker_id, process.node_id, take, keys)
        except BlockLost as error:
            if not process.has_ended and not process.is_killed and not self._closed.is_set():
                _LOGGER.warning("a worker's output is lost, so that its bundles are repeated: %s", error.message)
            process.kill()
            return False
        finally:
            self._end_call()
        return True

    def feed(self, worker_id: str, elements: beam_fn_api_pb2.Elements) -> None:
        """Send a worker the references to the objects that a message names. Does not wait.

        Raises :class:`BlockLost` if all copies of one of them are gone.
        """
        if not (keys := object_keys(elements)):
            return
        with self._lock:
            process = self._processes.get(worker_id)
        if process is not None:
            instruction_id = elements.data[0].instruction_id
            process.actor.feed.remote(instruction_id, {key: self.objects.copies(key) for key in keys})

    # Losses

    def connection_lost(self, worker_id: str) -> None:
        """Give up a worker whose connection broke: it has died, or its node is frozen or out of reach."""
        with self._lock:
            process = self._processes.get(worker_id)
        if process is not None and self._begin_call():
            try:
                process.kill()
            finally:
                self._end_call()

    def _agent_ended(self, node_id: str) -> None:
        """Give up a node whose agent has ended, most likely with the node: Ray may say so much later.

        If only the agent has ended, its folder is gone, and the workers there with it; new ones bring a new agent.
        """
        if node_id != self._driver_node:
            self._forget_node(node_id)
            return
        _LOGGER.warning("the agent of the driver's node has ended; it and the workers there start again")
        self.objects.remove_keeper(node_id)  # what the node holds stays there
        self._end_workers(node_id)
        self._use_node(node_id)

    def _forget_node(self, node_id: str) -> None:
        """Give up a node that is gone or frozen: end its workers, and copy the blocks that it held."""
        _LOGGER.warning("node %s is gone; what ran there is repeated elsewhere", node_id[:8])
        self._avoided.add(node_id)
        self._agents.give_up(node_id)
        self._end_workers(node_id)
        self.objects.node_lost(node_id)

    def _end_workers(self, node_id: str) -> None:
        for process in self._on(node_id):
            process.ended(LOST_WITH_NODE)
            process.kill()

    def _leave_node(self, node_id: str) -> None:
        """Let the workers of a node end after their bundles, and copy the blocks that it holds."""
        self._avoided.add(node_id)
        _LOGGER.warning("node %s will leave the cluster; its workers get no more work", node_id[:8])
        for process in self._on(node_id):
            process.leave()
        self.objects.node_leaves(node_id)

    def _on(self, node_id: str) -> list[ActorProcess]:
        with self._lock:
            return [process for process in self._processes.values() if process.node_id == node_id]

    def close(self) -> None:
        """End all actors and agents. Waits a few seconds for the agents to remove their folders."""
        with self._lock:
            self._closed.set()
            left = list(self._processes.values())
        self._samples.stop()
        for process in left:
            process.kill()
            process.ended(_KILLED)
        self.objects.clear()
        self._agents.close()
        self._watch.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        deadline = time.monotonic() + _CLOSE_S
        while self._calls and time.monotonic() < deadline:
            time.sleep(0.01)

"""Pipelines on a Ray cluster of three nodes give what they give on one machine, and leave nothing behind."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import pickle
import re
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import psutil
import pytest
from apache_beam.metrics import Metrics
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import CombiningValueStateSpec, TimerSpec, on_timer

from luminosity import LuminosityRunner, RunEnded, WorkerStarted
from luminosity.cli.main import main
from luminosity.engine.cluster.driver import leases, node_launcher, set_up
from luminosity.engine.cluster.driver.objects import ObjectTable, RemoteObject
from luminosity.engine.folders import RunFolders
from luminosity.errors import StepFailed
from luminosity.events import Event, NodeChanged
from tests.fake_cluster import FakeCluster, fake_cluster
from tests.processes import files_of_luminosity, wait_for
from tests.runners import IS_CLUSTER, collect_all, flags, new_pipeline, run

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(IS_CLUSTER, reason="starts a cluster of its own, and a process can be connected to only one"),
]

_LOGGER = logging.getLogger("tests.of_pipelines")
_PATIENCE_S = 60
_BLOCK = 300_000  # bytes of an element that travels as an object of the cluster
_LARGE = 12
_EMPTY = "Plasma memory usage 0 MiB, 0 objects"


@pytest.fixture(scope="module")
def cluster() -> Iterator[FakeCluster]:
    """Three nodes. That of the driver has no cores, so that all workers are on the others."""
    with fake_cluster((0, 2, 2)) as running:
        yield running


class Counted(beam.DoFn):
    """Sums the numbers of each key in state, and emits the sum when its timer fires."""

    _SUM = CombiningValueStateSpec("sum", sum)
    _END = TimerSpec("end", TimeDomain.WATERMARK)

    def process(
        self,
        element: tuple[str, int],
        total: Any = beam.DoFn.StateParam(_SUM),  # noqa: B008
        end: Any = beam.DoFn.TimerParam(_END),  # noqa: B008
    ) -> Iterable[Any]:
        total.add(element[1])
        end.set(1)
        return ()

    @on_timer(_END)
    def emit(
        self,
        key: str = beam.DoFn.KeyParam,  # type: ignore[assignment]
        total: Any = beam.DoFn.StateParam(_SUM),  # noqa: B008
    ) -> Iterable[tuple[str, int]]:
        yield key, total.read()


def _large(number: int) -> bytes:
    return bytes([number]) * _BLOCK


def _told(number: int) -> int:
    if number == 7:
        print("seven was printed")
        _LOGGER.warning("seven was logged")
    Metrics.counter("tests", "told").inc()
    return number


def _with_sides(number: int, names: dict[int, str], total: int) -> str:
    return f"{names[number % 3]} {number} of {total}"


def _build(pipeline: beam.Pipeline) -> dict[str, beam.PCollection]:
    numbers = pipeline | beam.Create(range(30)) | beam.Reshuffle() | "Told" >> beam.Map(_told)
    names = pipeline | "Names" >> beam.Create([(0, "no"), (1, "one"), (2, "two")])
    keyed = numbers | "Keyed" >> beam.Map(lambda number: (f"key {number % 4}", number))
    large = pipeline | "Large numbers" >> beam.Create(range(_LARGE)) | "Spread" >> beam.Reshuffle()
    return {
        "groups": keyed | beam.GroupByKey() | beam.MapTuple(lambda key, found: (key, sorted(found))),
        "with_sides": numbers
        | beam.Map(
            _with_sides, beam.pvalue.AsDict(names), beam.pvalue.AsSingleton(numbers | beam.CombineGlobally(sum))
        ),
        "sums": keyed | beam.ParDo(Counted()),
        "large": large
        | "Large" >> beam.Map(_large)
        | "Move" >> beam.Reshuffle()
        | "Look" >> beam.Map(lambda block: (block[0], len(set(block)), len(block))),
        "places": large | "Places" >> beam.Map(lambda _: tempfile.gettempdir()),
    }


class _Traffic:
    """What the driver sends to other nodes and gets from them, and what it keeps of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.private: list[str] = []  # folders of the driver
        self.sent: list[bytes] = []
        self.copies: list[set[str]] = []  # of each object that the loop took: the nodes that have it

        def spy(owner: Any, name: str, note: Any) -> None:
            real = getattr(owner, name)

            def noted(*arguments: Any, **named: Any) -> Any:
                result = real(*arguments, **named)
                note(result, *arguments)
                return result

            monkeypatch.setattr(owner, name, noted)

        def note_object(found: RemoteObject, *_: Any) -> None:
            self.copies.append(set(found.copies))

        spy(RunFolders, "__init__", lambda _, folders, *__: self.private.extend(folders.all))
        for name in ("replace", "NodeWorker"):
            spy(node_launcher, name, lambda made, *_: self.sent.append(pickle.dumps(made)))
        spy(ObjectTable, "find", note_object)
        for name in ("feed", "secure"):
            spy(
                node_launcher.NodeLauncher,
                name,
                lambda _, __, ___, message: self.sent.append(message.SerializeToString()),
            )
        real = set_up._NodeConnection

        class Noted(real):
            def __init__(connection, inner: Any, feed: Any) -> None:
                super().__init__(inner, feed)
                instruct = connection.instruct

                def noted(request: Any) -> None:
                    self.sent.append(request.SerializeToString())
                    instruct(request)

                connection.instruct = noted

        monkeypatch.setattr(set_up, "_NodeConnection", Noted)


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> _Traffic:
    return _Traffic(monkeypatch)


@contextlib.contextmanager
def _nothing_left(cluster: FakeCluster, traffic: _Traffic) -> Iterator[None]:
    """Fail if actors, leases, objects, folders or threads outlive the runs of the context."""
    before, files = _our_threads(), files_of_luminosity()
    yield
    assert wait_for(lambda: _our_threads() <= before, _PATIENCE_S), _our_threads() - before
    assert traffic.private
    assert wait_for(lambda: files_of_luminosity() <= files, _PATIENCE_S), files_of_luminosity() - files
    assert [os.listdir(cluster.temporary_folder(number)) for number in range(3)] == [[], [], []]
    import ray
    from ray._private import state
    from ray._private.internal_api import memory_summary
    from ray.util import placement_group_table

    is_first = not ray.is_initialized()
    if is_first:
        ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        alive = lambda: [actor for actor in state.actors().values() if actor["State"] != "DEAD"]  # noqa: E731
        assert state.actors()
        assert wait_for(lambda: not alive(), _PATIENCE_S), alive()
        leases = lambda: [each for each in placement_group_table().values() if each["state"] != "REMOVED"]  # noqa: E731
        assert placement_group_table()
        assert wait_for(lambda: not leases(), _PATIENCE_S), leases()
        assert wait_for(lambda: _EMPTY in memory_summary(cluster.address, stats_only=True), _PATIENCE_S), (
            memory_summary(cluster.address, stats_only=True)
        )
    finally:
        if is_first:
            ray.shutdown()


def _our_threads() -> set[threading.Thread]:
    """The threads of runs; the process keeps its fork server, which starts before a pipeline names a cluster."""
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("luminosity")]
    return {thread for thread in ours if thread.name != "luminosity-forkserver"}


def _counter(result: Any) -> int:
    (counter,) = result.metrics().query(beam.metrics.MetricsFilter().with_name("told"))["counters"]
    return counter.committed


def test_a_pipeline_gives_the_same_as_on_one_machine(
    cluster: FakeCluster,
    traffic: _Traffic,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)  # a small working folder; the tests are sent as modules
    here, result_here = collect_all(_build, tmp_path, new_pipeline("--cpu_workers=2"))
    capsys.readouterr()
    caplog.clear()
    for seen in (traffic.private, traffic.sent, traffic.copies):
        seen.clear()
    events: list[Event] = []
    with _nothing_left(cluster, traffic):
        options = PipelineOptions(flags(f"--ray_address={cluster.address}", "--cpu_workers=3"))
        there, result_there = collect_all(
            _build, tmp_path, beam.Pipeline(LuminosityRunner(on_event=events.append), options)
        )

    places = there.pop("places")
    here.pop("places")
    assert {name: sorted(found) for name, found in there.items()} == {
        name: sorted(found) for name, found in here.items()
    }
    assert Counter(there["large"]) == Counter((number, 1, _BLOCK) for number in range(_LARGE))
    assert _counter(result_there) == _counter(result_here) == 30
    assert capsys.readouterr().out.splitlines().count("seven was printed") == 1
    logged = [record for record in caplog.records if record.name == _LOGGER.name]
    assert [(record.getMessage(), record.levelname) for record in logged] == [("seven was logged", "WARNING")]
    assert logged[0].lineno == inspect.getsourcelines(_told)[1] + 3
    # Each worker has the temporary folder of its own node.
    assert len(places) == _LARGE
    assert set(places) <= {cluster.temporary_folder(number) for number in (1, 2)}
    # Large blocks were objects, which the loss of one node can't lose.
    assert traffic.copies
    assert all(len(copies) > 1 for copies in traffic.copies)
    # Nothing that crosses to another node names a folder of one.
    assert traffic.private
    assert len(traffic.sent) > 20
    crossed = [place for place in {*traffic.private} for message in traffic.sent if place.encode() in message]
    assert crossed == []
    # Events say which nodes the run used, and the process of each worker that has done something.
    came = {event.node for event in events if isinstance(event, NodeChanged) and event.change == "came"}
    assert came >= {event.node for event in events if isinstance(event, WorkerStarted)}
    ended = events[-1]
    assert isinstance(ended, RunEnded)
    busy = [worker for worker in ended.last.workers if worker.cpu_seconds]
    assert busy
    assert all(worker.pid and worker.node in came for worker in busy)


def _write_note(number: int) -> None:
    Path(f"note-{number}.txt").write_text(Path("here.txt").read_text())


def test_relative_paths_mean_the_files_of_the_driver(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("data/in1.txt", "data/in2.txt", "project/.hidden/a.txt", "project/here.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}\n")
    project = tmp_path / "project"
    (project / "linked").symlink_to("../data")
    monkeypatch.chdir(project)

    def build(pipeline: beam.Pipeline) -> None:
        patterns = ["../data/in*.txt", ".hidden/*", "linked/in1.txt", "here.txt"]
        lines = [pipeline | f"Read {each}" >> beam.io.ReadFromText(each) for each in patterns]
        matched = pipeline | beam.Create(["../data/*2.txt"]) | beam.io.ReadAllFromText()
        _ = (*lines, matched) | beam.Flatten() | beam.io.WriteToText("out/lines", shard_name_template="")
        _ = pipeline | "Notes" >> beam.Create([1, 2]) | beam.Map(_write_note)

    run(build, f"--ray_address={cluster.address}", "--cpu_workers=2")
    assert sorted((project / "out" / "lines").read_text().splitlines()) == [
        "data/in1.txt",
        "data/in1.txt",
        "data/in2.txt",
        "data/in2.txt",
        "project/.hidden/a.txt",
        "project/here.txt",
    ]
    assert sorted(os.listdir(project)) == [".hidden", "here.txt", "linked", "note-1.txt", "note-2.txt", "out"]
    assert (project / "note-2.txt").read_text() == "project/here.txt\n"


def _note_process(_: int, folder: str) -> None:
    """Note which process this is, and wait for the end."""
    Path(folder, str(os.getpid())).touch()
    wait_for(lambda: os.path.exists(os.path.join(folder, "end")), _PATIENCE_S)


def _is_agent(process: psutil.Process) -> bool:
    try:
        return "NodeAgent" in "".join(process.cmdline())
    except psutil.NoSuchProcess:  # Ray ends idle processes at any time
        return False


def test_the_workers_of_an_agent_that_dies_start_again_on_its_node(
    cluster: FakeCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    # Ray may report the agent's death later than the workers are lost; the test is about what is said then.
    monkeypatch.setattr(leases, "_KILL_TIMEOUT_S", float(_PATIENCE_S))
    (folder := tmp_path / "processes").mkdir()
    pipeline = new_pipeline(f"--ray_address={cluster.address}", "--cpu_workers=4", "--run_dir=runs")
    _ = pipeline | beam.Create(range(4)) | beam.Reshuffle() | beam.Map(_note_process, str(folder))
    result = pipeline.run()
    try:
        assert wait_for(lambda: len(os.listdir(folder)) == 4, _PATIENCE_S)
        raylet = next(each for each in cluster.nodes[1].live_processes() if each[0] == "raylet")[1]
        (agent,) = [each for each in psutil.Process(raylet.pid).children(recursive=True) if _is_agent(each)]
        agent.kill()
        assert wait_for(lambda: len(os.listdir(folder)) == 6, _PATIENCE_S), os.listdir(folder)
    finally:
        (folder / "end").touch()
    result.wait_until_finish()
    said = [record.getMessage() for record in caplog.records]
    assert sum("is gone with 2 workers of this run" in each for each in said) == 1
    assert sum("only this run's agent on it had ended" in each for each in said) == 1
    assert main(["show", "last", "--run_dir=runs"]) == 0
    node = cluster.nodes[1].node_id[:8]
    lost = re.compile(rf"worker w\d+ of pool 'cpu' on node {node} was lost with its node or the run's agent there")
    assert sum(bool(lost.match(each)) for each in said) == 2
    assert len(lost.findall(" ".join(capsys.readouterr().out.split()))) == 2


def _fail(block: bytes) -> None:
    if block[0] == 7:
        raise ValueError("no good")


def test_a_run_that_fails_names_the_line_and_leaves_nothing(cluster: FakeCluster, traffic: _Traffic) -> None:
    import ray

    ray.init(cluster.address, log_to_driver=False, logging_level=logging.ERROR)  # as a user's script may
    try:
        with _nothing_left(cluster, traffic):
            build = lambda p: (  # noqa: E731
                p
                | beam.Create(range(_LARGE))
                | "Spread" >> beam.Reshuffle()
                | beam.Map(_large)
                | "Move" >> beam.Reshuffle()
                | "Failing" >> beam.Map(_fail)
            )
            with pytest.raises(StepFailed, match="no good") as caught:
                run(build, f"--ray_address={cluster.address}", "--cpu_workers=2")
            assert ray.is_initialized()
        assert traffic.copies
        message = str(caught.value)
        assert "Failing" in message
        assert f"{Path(__file__).name}:{inspect.getsourcelines(_fail)[1] + 2}" in message
    finally:
        ray.shutdown()

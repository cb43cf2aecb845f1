"""Markers and fixtures that all tests share."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import luminosity  # noqa: F401  # adds its filter to logging now, before Beam warns of missing cloud libraries

# isort: split
import apache_beam as beam
import pytest
from hypothesis import HealthCheck, settings

from tests.both_runners import pipelines, runner_name
from tests.fake_cluster import fake_cluster
from tests.processes import nothing_left_behind
from tests.runners import IS_CLUSTER, RAY_VARIABLE, ray_address, run

__all__ = ["pipelines", "runner_name"]  # the fixtures of tests that run on both runners

# Beam's test files carry these; known here so that --strict-markers can be used.
_BEAM_MARKERS = (
    "examples_postcommit",
    "it_postcommit",
    "it_validatesrunner",
    "no_sickbay_batch",
    "no_sickbay_streaming",
    "no_xdist",
    "sickbay_dataflow",
    "sickbay_direct",
    "sickbay_flink",
    "uses_dill",
    "uses_gcp_java_expansion_service",
    "uses_pyarrow",
    "xlang_sql_expansion_service",
)


# What the files of most tests import. They are safe to fork: they start no threads.
_IMPORTED_AHEAD = ("hypothesis", "luminosity.engine.runner", "psutil", "pytest")

# On an accelerator, JAX takes three quarters of the memory for each process; tests run side by side.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# Neither the pace of the machine nor chance decides whether a test passes.
settings.register_profile(
    "steady", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")


def pytest_configure(config: pytest.Config) -> None:
    # A shell's background job ignores Ctrl-C, and so would all that it starts; some tests send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for marker in _BEAM_MARKERS:
        config.addinivalue_line("markers", f"{marker}: Beam's own")
    # Runs of tests, also of processes that tests start, are not recorded among the user's own.
    folder = os.environ["LUMINOSITY_RUN_DIR"] = tempfile.mkdtemp(prefix="runs-of-tests-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    # Tests run side by side: the pools of one must not depend on what another holds.
    claims = os.environ["LUMINOSITY_CLAIM_DIR"] = tempfile.mkdtemp(prefix="claims-of-tests-")
    config.add_cleanup(lambda: shutil.rmtree(claims, ignore_errors=True))
    if os.environ.get(RAY_VARIABLE) == "start":
        cluster = contextlib.ExitStack()
        config.add_cleanup(cluster.close)
        os.environ[RAY_VARIABLE] = cluster.enter_context(fake_cluster((0, 2, 2))).address  # also for xdist's workers


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files that don't name the marker if only tests with it run: importing all files takes half a minute."""
    marker = config.option.markexpr.partition(" ")[0]
    if marker not in ("alone", "thorough") or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    is_alone_here = marker == "alone" and IS_CLUSTER and "leaves_nothing" in text
    return None if f"pytest.mark.{marker}" in text or is_alone_here else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, those of this folder, so that no worker is left with them at the end.

    xdist keeps this order with ``--no-loadscope-reorder``; otherwise it begins with the files that have most tests.
    """
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)
    for item in items if IS_CLUSTER else ():
        if "leaves_nothing" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.alone)  # the runs of all processes leave folders on the same nodes
        if (marker := item.get_closest_marker("one_machine")) is not None:
            item.add_marker(pytest.mark.skip(reason=f"not on a cluster: {marker.args[0]}"))


@pytest.fixture(autouse=True)
def arguments_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the process its arguments back: commands change them, and Beam takes options of other tests from there."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))


@pytest.fixture(autouse=True)
def logging_stays() -> Iterator[None]:
    """Fail a test that leaves logging changed: tests that follow in the same process would not see their records."""
    before = _logging_now()
    yield
    assert _logging_now() == before, "the test left logging changed"


def _logging_now() -> dict[str, object]:
    """Return what decides whether a record of ours reaches the handlers of a test."""
    ours = [each for name, each in logging.root.manager.loggerDict.items() if name.split(".")[0] == "luminosity"]
    changed = [
        (each.name, each.level, each.disabled, each.propagate, list(each.filters))
        for each in ours
        if isinstance(each, logging.Logger) and (each.level or each.disabled or not each.propagate or each.filters)
    ]
    return {
        "disabled level": logging.root.manager.disable,
        "root": (logging.root.level, list(logging.root.filters)),
        "filters of handlers": [list(each.filters) for each in logging.root.handlers if each.filters],
        "our loggers": changed,
    }


@pytest.fixture(scope="session", autouse=True)
def connection() -> Iterator[None]:
    """Connect this process once to the cluster on which all tests run, if they do: each run would do it again."""
    if not IS_CLUSTER:
        yield
        return
    import ray

    ray.init(ray_address(), log_to_driver=False, logging_level=logging.WARNING)
    yield
    ray.shutdown()


@pytest.fixture(scope="session", autouse=True)
def imported_ahead() -> Iterator[None]:
    """Let the fork server import what each worker would: it imports the file of the test that it works for."""
    from luminosity.engine import assemble

    find = assemble.modules_to_preload
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "modules_to_preload", lambda: [*find(), *_IMPORTED_AHEAD])
        yield


@pytest.fixture(scope="session")
def warm_runner() -> None:
    """What lives as long as the process (the fork server) is there before a test looks around."""
    run(lambda pipeline: pipeline | beam.Create([0]), "--cpu_workers=1")


@pytest.fixture
def leaves_nothing(warm_runner: None) -> Iterator[None]:
    """Fail a test whose run leaves files or worker processes behind. Those of tests beside it do not count."""
    with nothing_left_behind():
        yield


@pytest.fixture
def no_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the machine's accelerators, so that ``--accelerators=1`` gives ``declared:0`` on every machine."""
    monkeypatch.setattr("luminosity.engine.resources.machine.detect_accelerators", lambda: ())


@pytest.fixture
def patient_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that write a file per bundle get all that comes in one, also where that takes the machine long."""
    monkeypatch.setattr("luminosity.engine.loop.sizing._GATHERING_S", 30.0)
    monkeypatch.setattr("luminosity.engine.loop.sizing._LONGEST_FIRST_OF_SINK_S", 30.0)
    monkeypatch.setattr("luminosity.engine.loop.splits._FIRST_TAKE_OF_SINK_S", 30.0)


@pytest.fixture
def one_megabyte(tmp_path: Path) -> Iterator[Path]:
    """A folder that takes 1 MB: a full disk, or shared memory as a container may have it."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a file system here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)

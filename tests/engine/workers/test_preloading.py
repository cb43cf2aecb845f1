"""Libraries that load OpenMP: workers share their memory if each has one thread, and have the right number anyway."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from luminosity.core import OPENMP_VARIABLES, usable_cores
from luminosity.engine.workers import launcher, preloading
from luminosity.engine.workers.launcher import ForkServer
from tests.runners import IS_CLUSTER, IS_REFERENCE

pytestmark = pytest.mark.thorough

_ONE: dict[str, str] = {**dict.fromkeys(OPENMP_VARIABLES, "1")}
_SKLEARN = "apache_beam.ml.inference.sklearn_inference"

_STEPS = """
import os, sys, threading

def numbers(_):
    # Whether the worker was forked with scikit-learn, and its threads: in this thread, in another one, of BLAS.
    before = "sklearn.base" in sys.modules
    import numpy as np
    from sklearn.cluster import KMeans
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.utils._openmp_helpers import _openmp_effective_n_threads as effective
    from threadpoolctl import threadpool_info
    if effective() == 1:  # more threads than idle cores wait for each other actively, which takes minutes
        rows = np.random.default_rng(0).normal(size=(400, 3))
        fitted = HistGradientBoostingRegressor(max_iter=3).fit(rows, rows[:, 0]).predict(rows)
        groups = KMeans(2, n_init=1, random_state=0).fit_predict(rows)
        assert len(fitted) == len(groups) == 400 and np.corrcoef(fitted, rows[:, 0])[0, 1] > 0.5
    other = []
    thread = threading.Thread(target=lambda: other.append(effective()))
    thread.start()
    thread.join()
    scipys = [each for each in threadpool_info() if "scipy.libs" in each["filepath"] and each["user_api"] == "blas"]
    return before, effective(), other[0], sorted({each["num_threads"] for each in scipys})
"""
_SCRIPT = """
import json
import steps
import apache_beam as beam
from apache_beam.ml.inference import sklearn_inference
from apache_beam.options.pipeline_options import PipelineOptions
from luminosity import LuminosityRunner
import os, sys

def show(found):
    print(json.dumps(found), flush=True)

def run(flags):
    with beam.Pipeline(LuminosityRunner(), PipelineOptions(["--progress=off", *flags])) as p:
        _ = p | beam.Create([0]) | beam.Map(steps.numbers) | beam.Map(show)

for flags in json.loads(sys.argv[1]):
    run(flags)
"""


def found(folder: Path, *flags: list[str], **variables: str) -> list[Any]:
    """Return what ``numbers`` finds in the worker of each of several runs of one process."""
    (folder / "steps.py").write_text(_STEPS)
    (folder / "script.py").write_text(_SCRIPT)
    plain = {name: value for name, value in os.environ.items() if name not in OPENMP_VARIABLES}
    done = subprocess.run(
        [sys.executable, "script.py", json.dumps(flags)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=folder,
        env={**plain, **variables},
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


engine = pytest.mark.skipif(IS_CLUSTER or IS_REFERENCE, reason="only workers of this machine share scikit-learn")


@engine
def test_each_run_of_a_process_has_its_number_of_threads(tmp_path: Path) -> None:
    cores = usable_cores()
    one, all_cores = [f"--cpu_workers={cores}"], [f"--resource_hint=cpu_count={cores}"]
    single, several = [True, 1, 1, [1]], [cores == 1, cores, cores, [cores]]
    assert found(tmp_path, one, all_cores, one) == [single, several, single]


@engine
@pytest.mark.skipif(usable_cores() == 1, reason="one worker has one thread here")
def test_a_fork_server_with_workers_of_several_threads_never_loads_openmp(tmp_path: Path) -> None:
    cores = usable_cores()
    expected = [[False, cores, cores, [cores]], [False, 1, 1, [1]]]
    assert found(tmp_path, [f"--resource_hint=cpu_count={cores}"], [f"--cpu_workers={cores}"]) == expected


@engine
@pytest.mark.parametrize(
    ("flags", "variables", "threads"),
    [
        ([], {"OMP_NUM_THREADS": "3"}, 3),
        ([], {"OMP_DYNAMIC": "false"}, 1),
        (["--model_threads=1"], {}, 1),
    ],
)
def test_a_number_or_a_variable_of_the_user_counts(
    flags: list[str], variables: dict[str, str], threads: int, tmp_path: Path
) -> None:
    ((before, here, there, _),) = found(tmp_path, [f"--cpu_workers={usable_cores()}", *flags], **variables)
    assert [before, here, there] == [False, threads, threads]


class Servers:
    """Stands for processes, and notes what they import."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def begin(server: Any, environment: Any = None) -> None:
            server._has_openmp = server._has_more_threads = False
            server.modules = []

        monkeypatch.setattr(ForkServer, "_shared", {})
        monkeypatch.setattr(ForkServer, "__init__", begin)
        monkeypatch.setattr(ForkServer, "is_alive", lambda _: True)
        monkeypatch.setattr(ForkServer, "preload", lambda server, modules, _: server.modules.extend(modules))
        monkeypatch.setattr(launcher.atexit, "register", lambda _: None)


def test_a_fork_server_has_openmp_or_workers_of_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    Servers(monkeypatch)
    warm: Any = ForkServer.shared()
    assert ForkServer.of_run(["sklearn"]) is ForkServer.of_run([]) is warm
    several: Any = ForkServer.of_run(None)
    assert several is ForkServer.of_run(None) is not warm
    assert ForkServer.of_run(["sklearn"]) is warm
    assert set(warm.modules) == {"sklearn"}
    assert several.modules == []


def test_a_fork_server_that_workers_of_several_threads_use_imports_no_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    Servers(monkeypatch)
    server: Any = ForkServer.of_run(None)
    assert ForkServer.of_run(["sklearn"]) is ForkServer.of_run(None) is server
    assert server.modules == []


def test_which_modules_load_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.startswith("sklearn.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, _SKLEARN, raising=False)
    assert preloading.modules_with_openmp([_ONE]) == []
    for name in ("sklearn.cluster", "sklearn.cluster._kmeans", "sklearn._config", _SKLEARN):
        monkeypatch.setitem(sys.modules, name, sys)
    used = ["sklearn.base", _SKLEARN, "sklearn.cluster"]
    assert preloading.modules_with_openmp([_ONE]) == used
    assert preloading.modules_with_openmp([_ONE | {"KMP_INIT_AT_FORK": "FALSE", "HOME": "/"}]) == used
    for other in ({}, _ONE | {"OMP_NUM_THREADS": "2"}, _ONE | {"GOMP_CPU_AFFINITY": "0"}):
        assert preloading.modules_with_openmp([_ONE, other]) is None

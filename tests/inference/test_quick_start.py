"""What starts before the first element, and what workers import. Workers import this module, so it imports little."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import (
    Column,
    Enrich,
    Handler,
    LuminosityRunner,
    RunInference,
    SentenceEmbedder,
    TextClassifier,
    TokenClassifier,
    WorkerShare,
)
from luminosity.inference.steps import sessions
from luminosity.inference.steps.dofns import InferDoFn
from luminosity.inference.steps.messages import StepSettings
from tests.inference.texts import MINILM
from tests.runners import IS_REFERENCE

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="only the engine starts workers in this way")

HEAVY = ("jax", "tensorflow", "torch", "transformers")
_WAIT_S = 60.0  # for a file that another process writes; far above what it takes


def pipeline(*flags: str) -> beam.Pipeline:
    return beam.Pipeline(LuminosityRunner(), PipelineOptions(["--progress=off", "--accelerators=1", *flags]))


def note(folder: str, name: str, text: str = "") -> None:
    Path(folder, f"{name}.{os.getpid()}.{time.monotonic_ns()}").write_text(text)


def notes(folder: Path, name: str) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob(f"{name}.*"))]


class Noting(SentenceEmbedder):
    """Notes what the process that prepares texts has imported by then."""

    folder = ""

    def prepare(self, block: Any) -> Any:
        prepared = super().prepare(block)
        if not WorkerShare.current().devices:
            note(self.folder, "prepared", " ".join(name for name in HEAVY if name in sys.modules))
        return prepared


def noting(folder: Path) -> Noting:
    handler = Noting(MINILM, device="CPU")
    handler.folder = str(folder)
    return handler


@pytest.mark.parametrize("is_table", [False, True])
def test_workers_tokenise_without_model_libraries(is_table: bool, tmp_path: Path) -> None:
    texts = [f"text number {number}" for number in range(8)]
    hints: dict[str, Any] = {"accelerator": "type:any;count:1"}
    with pipeline("--cpu_workers=1") as p:
        if is_table:
            tables = p | beam.Create([pa.record_batch({"text": texts})])
            vectors = tables | Enrich(vector=Column(noting(tmp_path), "text")).with_resource_hints(**hints)
            _ = vectors | beam.Map(lambda table, folder: note(folder, "rows", str(table.num_rows)), str(tmp_path))
        else:
            vectors = p | beam.Create(texts) | RunInference(noting(tmp_path)).with_resource_hints(**hints)
            _ = vectors | beam.Map(lambda result, folder: note(folder, "rows", "1"), str(tmp_path))
    assert sum(map(int, notes(tmp_path, "rows"))) == len(texts)
    assert set(notes(tmp_path, "prepared")) == {""}


@pytest.mark.parametrize("kind", [SentenceEmbedder, TextClassifier, TokenClassifier])
def test_unpickling_and_preparing_import_no_model_library(kind: type, tmp_path: Path) -> None:
    from apache_beam.internal import pickler

    (tmp_path / "handler").write_bytes(pickler.dumps(kind(MINILM)))
    code = f"""
import sys
import luminosity
from apache_beam.internal import pickler
handler = pickler.loads(open({str(tmp_path / "handler")!r}, "rb").read())
handler.prepare_key()
assert len(handler.prepare(["a text", ""])) == 2
print([name for name in {(*HEAVY, "huggingface_hub")} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "[]\n"


def test_what_the_fork_server_imports_is_safe_to_fork() -> None:
    """All modules that a pipeline may make it import: no accelerator library, and no thread."""
    heavy = (*HEAVY, "jaxlib", "lance", "lancedb", "qdrant_client")
    code = f"""
import importlib, os, pkgutil, sys, threading
from luminosity.engine.workers import forkserver
from luminosity.core import OPENMP_VARIABLES
from luminosity.engine.workers.preloading import _STEP_MODULES, _WITH_TORCH
forkserver._preload()
import luminosity
names = [module.name for module in pkgutil.walk_packages(luminosity.__path__, "luminosity.")]
names = [name for name in names if name.startswith(_STEP_MODULES) and not name.endswith("__main__")]
names = [name for name in names if name not in _WITH_TORCH]
assert len(names) > 50
forkserver._import_for_workers([*names, "luminosity.inference.no_such_module"], dict())
assert "tokenizers" in sys.modules
before = dict(os.environ)
forkserver._import_for_workers(["sklearn.base", "sklearn.cluster"], dict.fromkeys(OPENMP_VARIABLES, "1"))
assert dict(os.environ) == before
from threadpoolctl import threadpool_info
assert set(each["num_threads"] for each in threadpool_info()) == set([1])
threads = [open(f"/proc/self/task/{{each}}/comm").read().strip() for each in os.listdir("/proc/self/task")]
own = [name for name in threads if name != "jemalloc_bg_thd"]  # pyarrow's allocator ends it in a forked process
print([name for name in {heavy} if name in sys.modules], threading.active_count(), len(own))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.stdout == "[] 1 1\n"


_SCRIPT = """
import apache_beam as beam
import imported
from apache_beam.options.pipeline_options import PipelineOptions
from luminosity import LuminosityRunner, SentenceEmbedder

RAN_HERE = True
SentenceEmbedder  # as in a pipeline that uses it: its module is imported
names = ["luminosity.inference.handlers.text.embedder", "tokenizers", "torch", "transformers"]
with beam.Pipeline(LuminosityRunner(), PipelineOptions(["--progress=off"])) as p:
    _ = p | beam.Create([names]) | beam.Map(imported.here) | beam.Map(print)
"""
_IMPORTED = """
import sys
import __main__

def here(names):
    return [name for name in names if name in sys.modules], hasattr(__main__, "RAN_HERE")
"""


def test_workers_find_what_the_pipeline_needs_imported_but_not_the_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    (tmp_path / "imported.py").write_text(_IMPORTED)
    done = subprocess.run([sys.executable, "script.py"], stdout=subprocess.PIPE, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "(['luminosity.inference.handlers.text.embedder', 'tokenizers'], False)\n"


_BEAMS = "apache_beam.ml.inference.base"


@pytest.mark.parametrize(
    ("imports", "expected"),
    [
        ("import luminosity, apache_beam", []),
        ("import apache_beam, luminosity", []),  # Beam alone has pandas
        ("import apache_beam, luminosity, pandas as pd", ["pandas"]),
        ("import luminosity, pandas", ["pandas"]),
        ("import luminosity.inference.handlers.text.packed.choice", []),  # it imports torch
        ("import luminosity, apache_beam.ml.inference.base", [_BEAMS]),
        ("import luminosity, apache_beam.ml.inference.sklearn_inference, sklearn.linear_model", [_BEAMS, "pandas"]),
    ],
)
def test_the_fork_server_imports_the_libraries_that_the_script_has(imports: str, expected: list[str]) -> None:
    code = f"""
{imports}
import json
from luminosity.engine.workers.preloading import modules_to_preload
print(json.dumps(modules_to_preload()))
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    assert [name for name in found if not name.startswith("luminosity.")] == expected  # and nothing that loads OpenMP
    assert not any(name.endswith(("choice", "encoder")) for name in found)


class Slow(Handler[str, int, int]):
    """Its model notes when it is loaded."""

    def __init__(self, folder: str, fails: bool = False) -> None:
        super().__init__()
        self.folder = folder
        self.fails = fails

    def load_model(self) -> int:
        note(self.folder, "loaded")
        if self.fails:
            raise ValueError("no such weights")
        return 1

    def predict(self, model: int, batch: Any, inference_args: dict[str, Any] | None = None) -> list[int]:
        return [len(example) for example in batch]


class UntilLoaded(beam.DoFn):
    """Passes elements on when the model is loaded, which would never be so if the model waited for an element."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def process(self, element: str) -> Any:
        deadline = time.monotonic() + _WAIT_S
        while not notes(Path(self._folder), "loaded"):
            if time.monotonic() > deadline:
                raise TimeoutError("the model was not loaded before the first element")
            time.sleep(0.01)
        yield element


@pytest.mark.parametrize("is_table", [False, True])
@pytest.mark.parametrize("hints", [{"accelerator": "type:any;count:1"}, {"min_ram": "1MB"}], ids=["device", "pool"])
def test_a_model_is_loaded_before_the_first_element_and_only_once(
    is_table: bool, hints: dict[str, Any], tmp_path: Path
) -> None:
    handler, folder = Slow(str(tmp_path)), str(tmp_path)
    p = pipeline("--cpu_workers=2")
    texts = p | beam.Create(["one", "three"]) | beam.Reshuffle() | beam.ParDo(UntilLoaded(folder))
    if is_table:
        tables = texts | beam.Map(lambda text: pa.record_batch({"text": [text]})).with_output_types(pa.RecordBatch)
        column = Column(handler, "text", pa.int64())
        results = tables | Enrich(length=column).with_resource_hints(**hints)
        _ = results | beam.Map(lambda table, folder: note(folder, "row", str(table["length"][0])), folder)
    else:
        results = texts | RunInference(handler).with_resource_hints(**hints)
        _ = results | beam.Map(lambda result, folder: note(folder, "row", str(result.inference)), folder)
    result = p.run()
    result.wait_until_finish()
    assert sorted(notes(tmp_path, "row")) == ["3", "5"]
    # A pool may start a second worker if the first one is slow to respond; no worker loads the model twice.
    workers = [path.name.split(".")[1] for path in tmp_path.glob("loaded.*")]
    assert len(workers) == len(set(workers)) <= (1 if "accelerator" in hints else 2)
    if not is_table:  # The load is counted, although no bundle had begun when it happened.
        metrics = result.metrics().query(beam.metrics.MetricsFilter().with_name("load_model_latency_milli_secs"))
        (found,) = metrics["distributions"]
        assert 1 <= found.committed.count <= len(workers)


def test_a_model_that_fails_to_load_ahead_is_reported_with_its_step(tmp_path: Path) -> None:
    p = pipeline("--cpu_workers=1")
    handler = RunInference(Slow(str(tmp_path), fails=True)).with_resource_hints(accelerator="type:any;count:1")
    _ = p | beam.Create(["one"]) | "Infer it" >> handler
    with pytest.raises(Exception, match=r"(?s)Infer it.*no such weights"):
        p.run().wait_until_finish()


@pytest.mark.parametrize("ahead_first", [True, False])
def test_models_loaded_ahead_are_held_until_their_step_holds_them(ahead_first: bool, tmp_path: Path) -> None:
    settings = StepSettings(step_id=f"step {ahead_first}", model_tag=f"tag {ahead_first}", metrics_namespace="space")
    ahead, step = (InferDoFn(Slow(str(tmp_path)), settings) for _ in range(2))
    kept = sessions._kept  # pyright: ignore[reportPrivateUsage]
    if ahead_first:
        ahead.load_ahead()
        assert settings.step_id in kept
        step.setup()
    else:
        step.setup()
        ahead.load_ahead()
    assert settings.step_id not in kept
    lane = step._router.only_lane().lane  # pyright: ignore[reportPrivateUsage]
    assert lane.users == 1
    assert len(notes(tmp_path, "loaded")) == 1
    step.teardown()
    assert lane.users == 0

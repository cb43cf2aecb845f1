"""Tests of pipelines in a notebook: cells run in a real kernel, are edited and run again, fail, are interrupted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.processes import files_of_runs, wait_for, workers_of
from tests.runners import IS_REFERENCE

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does"),
]

_DEFINITIONS = """
    import dataclasses
    import math
    import pickle
    import time
    from pathlib import Path
    from typing import NamedTuple

    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions

    from luminosity import LuminosityRunner
    from luminosity.errors import StepFailed

    FACTOR = 10


    @dataclasses.dataclass(frozen=True)
    class Item:
        name: str
        number: int


    class Kind(NamedTuple):
        letter: str
        is_even: bool

        def label(self):
            return f"{self.letter}{'+' if self.is_even else '-'}"


    beam.coders.registry.register_coder(Kind, beam.coders.RowCoder)


    class WithKind(beam.DoFn):
        def process(self, item: Item):
            yield Kind(item.name[0], item.number % 2 == 0), dataclasses.replace(item, number=item.number * FACTOR)


    class Largest(beam.CombineFn):
        def create_accumulator(self):
            return Item("", 0)

        def add_input(self, largest, item):
            return max(largest, item, key=lambda each: each.number)

        def merge_accumulators(self, accumulators):
            return max(accumulators, key=lambda each: each.number)

        def extract_output(self, largest):
            return largest


    def root(number):
        return math.isqrt(number)


    def new_pipeline():
        return beam.Pipeline(runner=LuminosityRunner(), options=PipelineOptions(["--progress=off", "--cpu_workers=2"]))


    def save(pair):
        kind, item = pair
        Path(f"{kind.label()}.pickle").write_bytes(pickle.dumps((kind, item)))


    def run(items):
        for path in Path().glob("*.pickle"):
            path.unlink()
        with new_pipeline() as pipeline:
            kinds = pipeline | beam.Create(items) | beam.ParDo(WithKind()).with_output_types(tuple[Kind, Item])
            kinds | beam.CombinePerKey(Largest()) | beam.Map(save)
        return {kind: item for kind, item in (pickle.loads(path.read_bytes()) for path in Path().glob("*.pickle"))}
"""
_ITEMS = '[Item("a", 1), Item("ab", 3), Item("b", 4)]'


class Notebook:
    """A notebook with its own kernel, to which each call adds a cell and runs it."""

    def __init__(self, folder: Path) -> None:
        self._notebook = nbformat.v4.new_notebook()
        resources = {"metadata": {"path": str(folder)}}
        limits: Any = {"timeout": 120, "iopub_timeout": 120}  # for a cell, and for its last output after its end
        self.client = NotebookClient(self._notebook, kernel_name="python3", resources=resources, **limits)

    @property
    def pid(self) -> int:
        manager: Any = self.client.km
        return manager.provisioner.pid

    def run(self, source: str) -> str:
        """Run a cell and return its standard output. Raises :class:`CellExecutionError` if it raises."""
        cell = nbformat.v4.new_code_cell(dedent(source).strip())
        self._notebook.cells.append(cell)
        self.client.execute_cell(cell, len(self._notebook.cells) - 1)
        return "".join(out.text for out in cell.outputs if out.output_type == "stream" and out.name == "stdout")

    def complaints(self) -> str:
        """Return what the last cell wrote to standard error."""
        outputs = self._notebook.cells[-1].outputs
        return "".join(out.text for out in outputs if out.output_type == "stream" and out.name == "stderr")

    def outputs(self, source: str) -> list[Any]:
        """Run a cell and return what it displays as HTML; the last is its value. Beam displays a script of its own."""
        self.run(source)
        return [out for out in self._notebook.cells[-1].outputs if "text/html" in out.get("data", {})]

    def error_of(self, source: str) -> CellExecutionError:
        with pytest.raises(CellExecutionError) as caught:
            self.run(source)
        return caught.value

    def traceback(self) -> list[str]:
        """Return what the last cell shows for its error."""
        return next(out.traceback for out in self._notebook.cells[-1].outputs if out.output_type == "error")

    def interrupt_when(self, path: Path) -> threading.Thread:
        """Interrupt the kernel, as the stop button does, when the file ``path`` exists."""

        def interrupt() -> None:
            wait_for(path.exists, timeout_s=60)
            manager: Any = self.client.km
            asyncio.run(manager.interrupt_kernel())

        thread = threading.Thread(target=interrupt)
        thread.start()
        return thread


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """Return one notebook for all tests, since a kernel starts slowly. Cells use definitions of earlier ones."""
    notebook = Notebook(tmp_path_factory.mktemp("notebook"))
    with notebook.client.setup_kernel():
        notebook.run(_DEFINITIONS)
        yield notebook


def test_what_cells_define_runs_in_workers_and_comes_back_equal(notebook: Notebook) -> None:
    notebook.run(f"""
        assert run({_ITEMS}) == {{Kind("a", False): Item("ab", 30), Kind("b", True): Item("b", 40)}}
    """)


def test_a_lambda_and_a_function_of_a_cell(notebook: Notebook) -> None:
    found = notebook.run("""
        with new_pipeline() as pipeline:
            roots = pipeline | beam.Create([16, 25]) | beam.Map(root) | beam.Map(lambda n: str(n * FACTOR))
            roots | beam.io.WriteToText("roots", shard_name_template="")
        print(sorted(Path("roots").read_text().split()))
    """)
    assert found == "['40', '50']\n"


def test_a_cell_that_is_edited_and_run_again_runs_the_new_code(notebook: Notebook) -> None:
    edited = _DEFINITIONS.replace("FACTOR = 10", "FACTOR = 1000").replace("* FACTOR", "* FACTOR + 1")
    edited = edited.replace("'+' if", "'even' if")
    try:
        for _ in range(2):
            notebook.run(edited)
            notebook.run(f"""
                assert run({_ITEMS}) == {{Kind("a", False): Item("ab", 3001), Kind("b", True): Item("b", 4001)}}
                assert Path("beven.pickle").exists()
            """)
    finally:
        notebook.run(_DEFINITIONS)


def test_a_failure_names_the_cell_and_leaves_the_kernel_usable(notebook: Notebook) -> None:
    error = notebook.error_of("""
        with new_pipeline() as pipeline:
            numbers = pipeline | beam.Create([0])
            numbers | "Divide" >> beam.Map(lambda n: 1 / n)
    """)
    cell = notebook.run("print(len(In) - 2)").strip()
    assert error.ename == "StepFailed"
    assert "Divide' failed 4 times: ZeroDivisionError" in error.evalue
    assert f"at Cell In[{cell}], line 3" in error.evalue
    assert "element: 0" in error.evalue
    test_what_cells_define_runs_in_workers_and_comes_back_equal(notebook)


def test_interactive_beam_collects_what_runs_have_written(notebook: Notebook) -> None:
    """A second ``collect`` builds on the cached elements of the first; a failure is raised, not an empty frame."""
    notebook.run("""
        import apache_beam.runners.interactive.interactive_beam as ib
        from apache_beam.runners.interactive.interactive_runner import InteractiveRunner

        options = PipelineOptions(["--progress=off", "--cpu_workers=1"])
        explored = beam.Pipeline(InteractiveRunner(LuminosityRunner()), options=options)
        counts = explored | beam.Create([Item("b", 4), Item("a", 1), Item("b", 2)]) | beam.Map(lambda item: (
            open("computed", "a").write(item.name), (item.name, item.number * FACTOR))[1]) | beam.CombinePerKey(sum)
    """)
    assert notebook.run("print(sorted(ib.collect(counts).itertuples(index=False, name=None)))").endswith(
        "[('a', 10), ('b', 60)]\n"
    )
    found = notebook.run("""
        labels = counts | "Label" >> beam.MapTuple(lambda name, total: f"{name}: {total}")
        print(sorted(ib.collect(labels)[0]), sorted(Path("computed").read_text()))
    """)
    assert found.endswith("['a: 10', 'b: 60'] ['a', 'b', 'b']\n")
    error = notebook.error_of("""
        broken = counts | "Divide" >> beam.MapTuple(lambda name, total: total / 0)
        ib.collect(broken)
    """)
    assert error.ename == "StepFailed"


def test_a_run_has_the_notebooks_name_and_one_display(notebook: Notebook) -> None:
    """The display is updated, and becomes the summary; the result shows the stages, the plan a picture."""
    progress, result = notebook.outputs("""
        import os
        from luminosity import Snapshot, plan_pipeline

        def release(event):
            if isinstance(event, Snapshot) and event.seconds >= 1:  # the display gets it, or a later one
                Path("release").touch()

        def hold(n):
            while not Path("release").exists():
                time.sleep(0.01)

        os.environ["JPY_SESSION_NAME"] = "/home/me/explore.ipynb"
        options = PipelineOptions(["--cpu_workers=1"])
        shown = beam.Pipeline(runner=LuminosityRunner(on_event=release), options=options)
        _ = shown | beam.Create([1]) | "Wait" >> beam.Map(hold)
        result = shown.run()
        result.wait_until_finish()
        result
    """)
    assert progress.output_type == "display_data"
    assert "explore.ipynb" in progress.data["text/html"]
    assert "done in" in progress.data["text/html"]
    assert progress.data["text/plain"].startswith("explore.ipynb done after ")
    assert result.output_type == "execute_result"
    assert "Wait" in result.data["text/html"]
    assert result.data["text/plain"] == "<LuminosityResult: DONE>"
    (plan,) = notebook.outputs("plan_pipeline(shown)")
    assert plan.data["text/html"].startswith('<img alt="plan"')
    assert plan.data["text/plain"].startswith("plan: ")


_SCRIPT = """
import sys

with beam.Pipeline(runner="luminosity.LuminosityRunner", options=PipelineOptions(sys.argv[1:])) as pipeline:
    _ = pipeline | beam.Create([16]) | beam.Map(root)
"""


@pytest.mark.parametrize(
    "source",
    [
        """
        with beam.Pipeline(runner=LuminosityRunner(), options=options) as pipeline:
            _ = pipeline | beam.Create([16]) | beam.Map(root)
        """,
        """
        from apache_beam.runners.interactive.interactive_beam import collect
        from apache_beam.runners.interactive.interactive_runner import InteractiveRunner

        explored = beam.Pipeline(InteractiveRunner(LuminosityRunner()), options=options)
        roots = explored | beam.Create([16]) | beam.Map(root)
        collect(roots)
        """,
        f"""
        Path("script.py").write_text({_SCRIPT!r})
        %run -i script.py --debug --run_dir={{run_dir}}
        """,
    ],
    ids=["with", "interactive", "script"],
)
def test_a_run_has_a_manifest_and_complains_about_nothing(notebook: Notebook, source: str, tmp_path: Path) -> None:
    notebook.run(f"""
        run_dir = {str(tmp_path)!r}
        options = PipelineOptions(["--debug", f"--run_dir={{run_dir}}"])
        beam.Pipeline() | beam.Create([1])  # Beam warns once, if libraries for its tables are missing
    """)
    notebook.run(source)
    assert notebook.complaints() == ""
    assert wait_for(lambda: list(tmp_path.glob("*.manifest.json")), timeout_s=60), "it is written beside the run"


def test_a_pipeline_without_steps_has_a_result_to_show(notebook: Notebook) -> None:
    (result,) = notebook.outputs("""
        empty = new_pipeline().run()
        empty.wait_until_finish()
        empty
    """)
    assert "done in" in result.data["text/html"]
    assert notebook.complaints() == ""


def test_a_pandas_that_beam_cannot_use_is_named_before_the_first_step(tmp_path: Path) -> None:
    """The test removes the methods that newer versions lack."""
    notebook = Notebook(tmp_path)
    with notebook.client.setup_kernel():
        error = notebook.error_of("""
            from importlib import metadata

            import pandas
            from luminosity import LuminosityRunner

            del pandas.core.generic.NDFrame.first
            metadata.version = lambda name: "3.1.1"
            LuminosityRunner()
        """)
    assert error.ename == "MissingExtra"
    assert error.evalue == (
        "found pandas 3.1.1, expected a version below 2.4, which Beam needs in notebooks (type object 'DataFrame' has "
        "no attribute 'first'); run pip install 'pandas<2.4', and restart the kernel"
    )


def test_an_error_shows_the_users_lines_and_the_summary(notebook: Notebook) -> None:
    """There is no frame of Beam, nor of this library, whether a worker raises or the notebook's own process."""
    error = notebook.error_of("""
        def half(n):
            return 1 / n

        with new_pipeline() as pipeline:
            _ = pipeline | beam.Create([0]) | "Divide" >> beam.Map(lambda n: half(n))
    """)
    heading, *lines = "\n".join(notebook.traceback()).splitlines()
    assert "StepFailed" in heading
    cell = notebook.run("print(len(In) - 2)").strip()
    assert lines[0] == f"  Cell In[{cell}], line 5, in <lambda>"
    assert lines[1].startswith("    _ = pipeline | beam.Create([0])")
    assert lines[2:4] == [f"  Cell In[{cell}], line 2, in half", "    return 1 / n"]
    assert lines[4].endswith("Divide' failed 4 times: ZeroDivisionError: division by zero")
    assert lines[5:] == [f"  at Cell In[{cell}], line 2", "  element: 0"]
    assert "apache_beam" not in error.evalue
    assert "error.traceback has them" in error.evalue
    notebook.error_of("""
        from luminosity.drift import mmd_test
        mmd_test([[0.0]], [[1.0]])
    """)
    shown = "\n".join(notebook.traceback())
    assert "mmd_test([[0.0]], [[1.0]])" in shown
    assert shown.endswith(
        "DriftError: the reference has one row, expected at least 2: the estimate takes pairs of rows"
    )
    assert "site-packages" not in shown
    assert "luminosity/drift" not in shown


def test_an_element_that_takes_too_long_shows_the_line_of_its_cell(notebook: Notebook) -> None:
    error = notebook.error_of("""
        def hang(n):
            time.sleep(600)

        options = PipelineOptions(["--progress=off", "--cpu_workers=1", "--element_timeout=1s"])
        with beam.Pipeline(runner=LuminosityRunner(), options=options) as pipeline:
            _ = pipeline | beam.Create([7]) | "Hang" >> beam.Map(hang)
    """)
    assert error.ename == "ElementTimeout"
    lines = "\n".join(notebook.traceback()).splitlines()
    cell = notebook.run("print(len(In) - 2)").strip()
    assert lines[1:3] == [f"  Cell In[{cell}], line 2, in hang", "    time.sleep(600)"]
    assert "/ipykernel_" not in error.evalue


def test_a_run_that_is_interrupted_leaves_nothing_and_the_next_cell_runs(notebook: Notebook, tmp_path: Path) -> None:
    before = files_of_runs()
    started = tmp_path / "started"
    interrupting = notebook.interrupt_when(started)
    error = notebook.error_of(f"""
        def slow(n):
            Path({str(started)!r}).touch()
            time.sleep(1)

        with new_pipeline() as pipeline:
            pipeline | beam.Create(range(1000)) | beam.Reshuffle() | beam.Map(slow)
    """)
    interrupting.join()
    assert error.ename == "KeyboardInterrupt"
    heading, line, _, ending = "\n".join(notebook.traceback()).splitlines()
    assert "KeyboardInterrupt" in heading
    assert line.startswith("  Cell In[")
    assert ending == "the run was interrupted; its state is CANCELLED"
    assert wait_for(lambda: not workers_of(notebook.pid), timeout_s=60)
    assert wait_for(lambda: files_of_runs() <= before, timeout_s=60)
    test_what_cells_define_runs_in_workers_and_comes_back_equal(notebook)


def test_a_run_goes_on_while_other_cells_run(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(f"""
        def hold(n):
            while not Path({str(tmp_path / "release")!r}).exists():
                time.sleep(0.01)

        pipeline = new_pipeline()
        pipeline | beam.Create([1]) | beam.Map(hold)
        result = pipeline.run()
    """)
    test_a_lambda_and_a_function_of_a_cell(notebook)
    assert notebook.run("print(result.state)") == "RUNNING\n"
    (tmp_path / "release").touch()
    assert notebook.run("print(result.wait_until_finish())") == "DONE\n"


def test_a_pipeline_within_a_coroutine(notebook: Notebook) -> None:
    found = notebook.run(f"""
        import asyncio

        async def both():
            inside = run({_ITEMS})
            beside = await asyncio.get_running_loop().run_in_executor(None, run, {_ITEMS})
            return inside == beside

        print(await both())
    """)
    assert found == "True\n"


def test_a_kernel_that_is_shut_down_during_a_run_leaves_nothing(tmp_path: Path) -> None:
    before = files_of_runs()
    notebook = Notebook(tmp_path)
    with notebook.client.setup_kernel():
        notebook.run(_DEFINITIONS)
        notebook.run("""
            pipeline = new_pipeline()
            pipeline | beam.Create(range(1000)) | beam.Reshuffle() | beam.Map(lambda n: time.sleep(1))
            result = pipeline.run()
        """)
        assert wait_for(lambda: workers_of(notebook.pid), timeout_s=60)
        kernel = psutil.Process(notebook.pid)
        everything = [kernel, *kernel.children(recursive=True)]
        manager: Any = notebook.client.km
        manager.shutdown_wait_time = 120.0
    # The end of the context asks the kernel to shut down and kills it after a while: long enough for this test.
    assert psutil.wait_procs(everything, timeout=60)[1] == []
    assert wait_for(lambda: files_of_runs() <= before, timeout_s=60)

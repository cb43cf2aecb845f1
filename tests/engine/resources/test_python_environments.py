"""Steps whose workers run in another Python environment, and environments that are refused before the run."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.ml.inference.base import ModelHandler, PredictionResult
from apache_beam.testing.util import assert_that, equal_to

from luminosity import RunInference
from luminosity.engine.debugging.replay import Replay
from luminosity.engine.workers import harness
from luminosity.errors import InvalidArgument, OptionError, ReplayError, StepFailed, UnsupportedPipeline
from tests.plans import explained, stage_with
from tests.runners import IS_REFERENCE, run

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does")

_EXAMPLE = Path(__file__).parents[3] / "examples" / "environments"


def make_environment(folder: Path) -> Path:
    """Make an environment with version 1 of the example's library."""
    specification = importlib.util.spec_from_file_location("layered", _EXAMPLE / "layered.py")
    assert specification is not None
    assert specification.loader is not None
    layered: Any = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(layered)
    return layered.make_environment(folder, _EXAMPLE / "pricing_1", "1.0")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("environments") / "old")


def version(_: Any) -> tuple[str, str]:
    """Return the version of the library that only the environment has, and the environment."""
    import pricing  # pyright: ignore

    return pricing.__version__, sys.prefix


class Priced(ModelHandler[float, Any, PredictionResult]):
    """A model that is a module of the environment; shared by all workers, in a process of its own."""

    def load_model(self) -> Any:
        import pricing  # pyright: ignore

        return pricing

    def run_inference(self, batch: Sequence[float], model: Any, inference_args: Any = None) -> Any:
        is_host = Path(sys.argv[0]).parent.name == "ipc"  # the module of the shared host's process
        return [PredictionResult(each, (model.gross(each), sys.prefix, is_host)) for each in batch]

    def share_model_across_processes(self) -> bool:
        return True


def in_environment(transform: Any, path: Path) -> Any:
    return transform.with_resource_hints(python_environment=str(path))


def pipeline_in(path: Path) -> Any:
    return lambda p: p | beam.Create([1]) | "Version" >> in_environment(beam.Map(version), path)


def test_a_shared_model_runs_in_the_steps_environment(environment: Path, tmp_path: Path) -> None:
    def build(p: beam.Pipeline) -> None:
        results = p | beam.Create([10.0, 20.0]) | "Price" >> in_environment(RunInference(Priced()), environment)
        found = results | beam.Map(lambda each: each.inference)
        assert_that(found, equal_to([(11.9, str(environment), True), (23.8, str(environment), True)]))

    run(build, "--cpu_workers=2", f"--checkpoint_dir={tmp_path / 'checkpoint'}")


def test_the_plan_shows_environments_and_all_steps_of_a_model_run_in_one(environment: Path) -> None:
    def build(p: beam.Pipeline) -> None:
        _ = (
            p
            | beam.Create([10.0])
            | "Plain" >> beam.Map(abs)
            | "Price" >> in_environment(RunInference(Priced()), environment)
            | "Same" >> in_environment(beam.Map(abs), environment / "bin" / "python")
            | "Here" >> in_environment(beam.Map(abs), Path(sys.prefix))
        )

    plan = explained(build)
    assert {pool.name for pool in plan.pools} == {"cpu", "cpu python=old"}
    of_model = [stage for stage in plan.stages if f"python_environment={environment}" in stage.asks_for]
    assert {stage.pool.name for stage in of_model} == {"cpu python=old"}
    assert (
        stage_with(plan, "Price/Prepare").pool.name == stage_with(plan, "Price/Results").pool.name == "cpu python=old"
    )
    assert stage_with(plan, "Same").pool.name == "cpu python=old"
    assert stage_with(plan, "Plain").pool.name == stage_with(plan, "Here").pool.name == "cpu"


def test_environments_in_which_no_worker_can_run_are_refused(environment: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(UnsupportedPipeline, match=r"step 'Version' can't run in .*missing: found nothing there"):
        run(pipeline_in(missing))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnsupportedPipeline, match=r"found no .*empty/bin/python, expected the folder of a virtual"):
        run(pipeline_in(tmp_path / "empty"))
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no Python here >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(UnsupportedPipeline, match="says: no Python here"):
        run(pipeline_in(broken))
    old = tmp_path / "python3.8"
    answer = (
        '{"python": [3, 8], "prefix": "/x", "path": [], "versions": {"apache-beam": "2.40.0"}, "can_import": false}'
    )
    old.write_text(f"#!/bin/sh\necho '{answer}'\n")
    old.chmod(0o755)
    with pytest.raises(UnsupportedPipeline) as caught:
        run(pipeline_in(old))
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    for part in (f"found Python 3.8, expected {here}", "found apache-beam 2.40.0, expected 2.", "found no luminosity"):
        assert part in str(caught.value)


def test_an_environment_with_another_beam_is_refused_with_the_command_that_mends_it(tmp_path: Path) -> None:
    folder = make_environment(tmp_path / "other")
    (packages,) = folder.glob("lib/*/site-packages")
    information = packages / "apache_beam-2.50.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: apache-beam\nVersion: 2.50.0\n")
    with pytest.raises(UnsupportedPipeline) as caught:
        run(pipeline_in(folder))
    assert "found apache-beam 2.50.0, expected 2." in str(caught.value)
    assert f"{folder}/bin/python -m pip install 'apache-beam==2." in str(caught.value)


def test_arrays_of_numpy_2_are_known_to_numpy_1(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("numpy.core.numeric")
    monkeypatch.setitem(sys.modules, "numpy.core.numeric", old)
    for version, expected in (("2.4.0", None), ("1.26.4", old)):
        numpy: Any = ModuleType("numpy")
        numpy.__version__ = version
        monkeypatch.setitem(sys.modules, "numpy", numpy)
        monkeypatch.delitem(sys.modules, "numpy._core.numeric", raising=False)
        harness._know_arrays_of_numpy_2()  # pyright: ignore[reportPrivateUsage]
        assert sys.modules.get("numpy._core.numeric") is expected
    monkeypatch.undo()


def test_what_runs_in_this_process_is_refused(environment: Path, tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match=r"--debug: found steps that run in another Python environment \('Version' in"
    ):
        run(pipeline_in(environment), "--debug")

    saved = tmp_path / "failed.lum"
    with pytest.raises(StepFailed, match="AttributeError"):
        run(
            lambda p: p | beam.Create([1]) | "Fail" >> in_environment(beam.Map(lambda x: x.missing), environment),
            f"--save_failed={saved}",
        )
    with pytest.raises(ReplayError) as caught:
        Replay(str(saved))
    assert f"{environment}/bin/python -m luminosity.cli.main replay {saved}" in str(caught.value)


def test_a_handlers_own_hint_and_a_value_that_is_no_path_are_refused() -> None:
    class Hinted(Priced):
        def get_resource_hints(self) -> dict[str, Any]:
            return {"python_environment": "/envs/old"}

    with pytest.raises(InvalidArgument, match="expected it on the transform"):
        _ = beam.Pipeline() | beam.Create([1.0]) | RunInference(Hinted())
    with pytest.raises(ValueError, match="python_environment has invalid value 3"):
        beam.Map(abs).with_resource_hints(python_environment=3)

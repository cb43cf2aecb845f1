"""Tests of ``--pools``: which pools the same pipeline gets with hints, uniform and fitted. No worker starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity.engine.options import EngineConfig
from luminosity.engine.prepare import Prepared, prepare, worker_environment
from luminosity.engine.resources.pools import Pool
from luminosity.errors import OptionError

_MB = 1_000_000
_T4 = "type:nvidia-tesla-t4;count:1"


class Clean(beam.PTransform):
    """A composite step: hints for it hold for the steps in it."""

    def expand(self, input_or_inputs: Any) -> Any:
        return input_or_inputs | "Strip" >> beam.Map(str.strip) | "Lower" >> beam.Map(str.lower)


def prepared(*flags: str) -> Prepared:
    options = PipelineOptions(["--accelerators=2", "--cpu_workers=2", "--progress=off", *flags])
    pipeline = beam.Pipeline(options=options)
    _ = (
        pipeline
        | "Make" >> beam.Create(["a"])
        | "Clean" >> Clean()
        | "Prepare" >> beam.Map(str.upper).with_resource_hints(min_ram="600MB")
        | "Infer" >> beam.Map(str.title).with_resource_hints(min_ram="200MB", accelerator=_T4)
    )
    return prepare(pipeline.to_runner_api(default_environment=worker_environment(options)), options)


def pools(found: Prepared) -> list[Pool]:
    return list({id(each.pool): each.pool for each in found.assignments.values()}.values())


def pool_of(found: Prepared, step: str) -> Pool:
    (stage,) = [stage for stage in found.graph.stages if any(name.startswith(step) for name in stage.steps)]
    return found.assignments[stage.id].pool


def hints_file(folder: Path, steps: Any) -> str:
    path = folder / "hints.json"
    path.write_text(json.dumps({"steps": steps}))
    return f"--hints={path}"


def test_hints_give_each_kind_of_step_its_pool() -> None:
    found = prepared()
    assert len(pools(found)) == 3
    assert pool_of(found, "Prepare").ram_per_worker == 600 * _MB


def test_uniform_workers_get_the_most_of_every_resource() -> None:
    found = prepared("--pools=uniform")
    (pool,) = pools(found)
    assert pool.ram_per_worker == 600 * _MB
    assert pool.device_groups == (("declared:0",), ("declared:1",))
    assert pool.workers == 2
    steps = [set(stage.steps) for stage in found.graph.stages]
    assert any({"Prepare", "Infer"} <= names for names in steps), "steps with the same workers are fused"


def test_fitted_hints_replace_those_in_the_code_and_add_others(tmp_path: Path) -> None:
    given = hints_file(tmp_path, {"Prepare": {"min_ram": "300MB", "cpu_count": 1}, "Clean": {"min_ram": "150MB"}})
    found = prepared("--pools=fitted", given)
    assert pool_of(found, "Prepare").ram_per_worker == 300 * _MB
    assert pool_of(found, "Clean/Strip").ram_per_worker == 150 * _MB  # in the composite
    assert pool_of(found, "Infer").device_groups  # keeps the hints that the file does not name
    assert pool_of(found, "Infer").ram_per_worker == 200 * _MB


def test_the_hints_of_an_inner_step_win(tmp_path: Path) -> None:
    given = hints_file(tmp_path, {"Clean/Lower": {"min_ram": "250MB"}, "Clean": {"min_ram": "150MB"}})
    found = prepared("--pools=fitted", given)
    assert pool_of(found, "Clean/Strip").ram_per_worker == 150 * _MB
    assert pool_of(found, "Clean/Lower").ram_per_worker == 250 * _MB


def test_a_step_whose_label_has_a_slash_is_named_by_its_first_part(tmp_path: Path) -> None:
    options = PipelineOptions(["--progress=off", "--pools=fitted", hints_file(tmp_path, {"In": {"min_ram": "300MB"}})])
    pipeline = beam.Pipeline(options=options)
    _ = pipeline | "Make" >> beam.Create(["a"]) | "In/Out" >> beam.Map(str.upper)
    found = prepare(pipeline.to_runner_api(default_environment=worker_environment(options)), options)
    assert pool_of(found, "In/Out").ram_per_worker == 300 * _MB


def test_the_ram_of_uniform_workers_bounds_their_number() -> None:
    options = PipelineOptions(["--cpu_workers=64", "--progress=off", "--pools=uniform"])
    pipeline = beam.Pipeline(options=options)
    machine = prepared().machine
    third = {"min_ram": f"{machine.ram_bytes // 3}B"}
    made = pipeline | "Make" >> beam.Create(["a"])
    _ = made | "Large" >> beam.Map(str.upper).with_resource_hints(**third)
    (pool,) = pools(prepare(pipeline.to_runner_api(default_environment=worker_environment(options)), options))
    assert pool.workers == 3


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ({"Prepair": {"min_ram": "1GB"}}, "found the step 'Prepair'.*did you mean 'Prepare'"),
        ({"Prepare": {"min_ram": "plenty"}}, "min_ram: found 'plenty', expected a size"),
        ({"Prepare": {"cpu_count": 0}}, "cpu_count: found 0, expected a whole number from 1"),
        ({"Prepare": {"accelerator": "count:x"}}, "accelerator: found 'count:x'"),
        ({"Prepare": {"minram": "1GB"}}, "no such hint.*did you mean 'min_ram'"),
        (["Prepare"], "found no hints under 'steps'"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, steps: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        prepared("--pools=fitted", hints_file(tmp_path, steps))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="can't read it"):
        prepared("--pools=fitted", f"--hints={tmp_path / 'none.json'}")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pools=fitted"], "found no --hints"),
        (["--hints=h.json"], "expected fitted"),
        (["--pools=uniform", "--hints=h.json"], "expected fitted"),
        (["--pools=best"], "expected one of hints, uniform, fitted"),
        (["--pools=uniform", "--debug"], "expected only one of them"),
    ],
)
def test_options_that_do_not_go_together(flags: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        EngineConfig.of(PipelineOptions(flags))

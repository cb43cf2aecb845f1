"""Our description of a job is that of Beam's own runner, with the libraries of Google Cloud that it needs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import apache_beam
import pytest

import luminosity
from tests.own_environment import interpreter_with

SCRIPT = Path(__file__).with_name("beside_beam.py")
SOURCES = Path(luminosity.__file__).parents[1]
PACKAGES = [
    f"apache-beam[gcp]=={apache_beam.__version__}",
    *("nvidia-ml-py", "pyarrow", "rich", "threadpoolctl"),  # our own
]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the libraries, which slow down every start of Beam. ``DATAFLOW_VENV`` names a folder that has them."""
    return interpreter_with(PACKAGES, "DATAFLOW_VENV", tmp_path_factory.mktemp("dataflow"))


@pytest.mark.slow
@pytest.mark.timeout(1_500)
@pytest.mark.parametrize(
    "flags", [[], ["--streaming", "--num_workers=2", "--disk_type=pd-ssd"]], ids=["batch", "stream"]
)
def test_the_job_is_that_of_beams_own_runner(flags: list[str], python: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [python, SCRIPT, tmp_path, *flags],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])

    environments = found["environments of ours"]
    assert environments == found["environments of beam"]
    assert [hints for _, hints, _, _ in environments.values() if hints], "some steps have hints"
    expected, ours = found["beam"], found["ours"]
    # Beam's has the time of the call; it is local, because its address is, so that a folder can stand for a bucket;
    # and it has a list of installed packages, for the log of the job.
    assert expected.pop("clientRequestId")
    assert (ours.pop("projectId"), ours.pop("location")) == ("shop-1", "europe-west4")
    for job in (expected, ours):
        pool = job["environment"]["workerPools"][0]
        assert pool.pop("kind") in ("local", "harness")
        assert len(pool.pop("packages", [])) <= 1
        for disk in pool.get("dataDisks", []):
            disk.pop("diskType", None)
        pool["sdkHarnessContainerImages"].sort(key=lambda image: image["environmentId"])
        assert job["environment"].pop("tempStoragePrefix").startswith("storage.googleapis.com/shop/temp")
        sent = job["environment"]["sdkPipelineOptions"]
        assert sent["options"].pop("pipelineUrl").endswith("/pipeline.pb")
        assert len(sent["options"].pop("pipelineProtoHash")) == 64
        sent["options"].pop("template_location", None)
        sent["display_data"] = {each["key"]: each["value"] for each in sent["display_data"]}
        sent["display_data"].pop("template_location", None)
    assert ours == expected

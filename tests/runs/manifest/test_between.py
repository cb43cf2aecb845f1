"""What differs between the manifests of two runs."""

from __future__ import annotations

from dataclasses import replace

from luminosity.runs.manifest.manifest import Manifest, compare_words, differences_between
from luminosity.runs.manifest.places import Sealed
from luminosity.runs.manifest.surroundings import Commit

_BEFORE = Manifest(
    run="20260301T101500-4f2a9c",
    started_at=1.0,
    state="done",
    number=1,
    command=("python", "job.py", "--rows", "5", "--token=***"),
    folder="/srv",
    luminosity="1.0",
    commit=Commit("0123456789abcdef", "/srv", True),
    code={"/srv/job.py": "sha256:" + "a" * 64, "/srv/same.py": "sha256:" + "b" * 64},
    packages={"numpy": "2.0", "torch": "2.5"},
    inputs=(Sealed("Read", "/data/reviews", digest="sha256:" + "c" * 64, size=1000),),
    models=(Sealed("Infer", "models:/mood", "model", "7", "sha256:" + "d" * 64),),
    environment={"TZ": "UTC", "LUMINOSITY_RUN_DIR": "/a"},
    machine={"cores": "8"},
)


def test_equal_runs_have_no_differences() -> None:
    assert differences_between(_BEFORE, replace(_BEFORE, run="other", started_at=2.0, state="failed")) == []


def test_everything_that_changed_is_named() -> None:
    after = replace(
        _BEFORE,
        command=("python", "job.py", "--rows", "9", "--token=***", "--fast"),
        luminosity="1.1",
        commit=Commit("fedcba9876543210", "/srv", False),
        code={**_BEFORE.code, "/srv/job.py": "sha256:" + "e" * 64},
        packages={"numpy": "2.1"},
        inputs=(replace(_BEFORE.inputs[0], digest="sha256:" + "f" * 64, size=2000),),
        models=(),
        environment={"TZ": "UTC", "LUMINOSITY_RUN_DIR": "/b"},
        machine={"cores": "16"},
    )
    assert [str(each) for each in differences_between(_BEFORE, after)] == [
        "commit: was 0123456789ab, is fedcba987654 with changes",
        "code /srv/job.py: was sha256:aaaaaaaaaaaa, is sha256:eeeeeeeeeeee",
        "package luminosity: was 1.0, is 1.1",
        "package numpy: was 2.0, is 2.1",
        "package torch: was 2.5, is missing",
        "option --fast: was missing, is given",
        "option --rows: was 5, is 9",
        "input /data/reviews: was sha256:cccccccccccc (1 kB), is sha256:ffffffffffff (2 kB)",
        "model 7: was sha256:dddddddddddd, is missing",
        "machine cores: was 8, is 16",
    ]


def test_hidden_secrets_are_alike() -> None:
    assert compare_words(["--token=***"], ["--token=***"]) == []

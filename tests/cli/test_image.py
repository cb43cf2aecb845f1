"""``lum image``: what is in the recipe, what is refused, and its install steps in a fresh environment."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from luminosity.cli.main import main

_PIPELINE = """\
import apache_beam as beam
import shop

with beam.Pipeline() as pipeline:
    pipeline | beam.Create([1, 2]) | beam.Map(shop.double) | beam.Map(print)
"""


def write_wheel(folder: Path, requires: str = "") -> Path:
    """Write the wheel of a package ``shop`` with one function."""
    path = folder / "shop-1.0-py3-none-any.whl"
    metadata = "Metadata-Version: 2.1\nName: shop\nVersion: 1.0\n" + (
        f"Requires-Dist: {requires}\n" if requires else ""
    )
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("shop.py", "def double(x):\n    return 2 * x\n")
        archive.writestr("shop-1.0.dist-info/METADATA", metadata)
        archive.writestr("shop-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("shop-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a recipe with a pipeline's folder, a wheel and a model."""
    tmp_path = tmp_path_factory.mktemp("recipe")
    source = tmp_path / "source"
    (source / ".git").mkdir(parents=True)
    (source / ".env").write_text("KEY=secret")
    (source / "pipeline.py").write_text(_PIPELINE)
    venv.EnvBuilder(symlinks=True).create(source / "own")
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "weights.bin").write_bytes(b"12345678")
    (tmp_path / "needs.txt").write_text("# libraries\nscikit-learn>=1.4  # any\n\n")
    folder = tmp_path / "image"
    words = [
        "--wheel",
        str(write_wheel(tmp_path)),
        "--model",
        str(model),
        "--requirements",
        str(tmp_path / "needs.txt"),
    ]
    assert main(["image", str(folder), str(source), *words]) == 0
    return folder


def test_the_recipe_has_everything_that_the_image_needs(recipe: Path) -> None:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    lines = (recipe / "Dockerfile").read_text().splitlines()
    assert f"FROM apache/beam_python{python}_sdk:{version('apache-beam')}" in lines
    assert 'ENTRYPOINT ["/app/entry.sh"]' in lines
    for line in lines:
        if line.startswith("COPY "):
            assert (recipe / line.split()[1]).exists()
    pins = dict(line.split("==") for line in (recipe / "requirements.txt").read_text().splitlines() if "==" in line)
    for name in ("apache-beam", "numpy", "pyarrow", "grpcio", "scikit-learn", "joblib"):
        assert pins[name] == version(name)
    assert not {"luminosity", "torch", "pytest", "shop"} & set(pins)  # wheels of the folder, or nobody needs them
    assert sorted(path.name for path in (recipe / "pipeline").iterdir()) == ["pipeline.py"]
    assert (recipe / "models" / "tiny" / "weights.bin").read_bytes() == b"12345678"
    assert not [path for path in recipe.parent.iterdir() if path.name.startswith(".")]


def test_extras_bring_their_libraries(tmp_path: Path) -> None:
    assert main(["image", str(tmp_path / "image"), "--extra", "transformers"]) == 0
    pins = (tmp_path / "image" / "requirements.txt").read_text()
    assert "\ntransformers==" in pins
    assert "\ntorch==" in pins
    assert "COPY models" not in (tmp_path / "image" / "Dockerfile").read_text()


def test_python_and_boot_are_copied_onto_another_image(tmp_path: Path) -> None:
    assert main(["image", str(tmp_path / "image"), "--onto", "nvidia/cuda:12.8.1-cudnn-runtime-ubuntu24.04"]) == 0
    lines = [line for line in (tmp_path / "image" / "Dockerfile").read_text().splitlines() if line[:1] not in "#"]
    at = lines.index("FROM nvidia/cuda:12.8.1-cudnn-runtime-ubuntu24.04")
    assert lines[0].endswith(" AS libraries")
    assert [line for line in lines[:at] if "pip install" in line]
    assert not [line for line in lines[at:] if "pip install" in line]
    copied = [line for line in lines[at:] if line.startswith("COPY --from=libraries ")]
    assert copied == [f"COPY --from=libraries {folder} {folder}" for folder in ("/usr/local", "/opt/apache/beam")]
    assert lines[at:].index("RUN lum --version") > lines[at:].index(copied[-1])
    assert lines[-1] == 'ENTRYPOINT ["/app/entry.sh"]'


def test_a_folder_that_exists_is_refused_and_keeps_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "Dockerfile").write_text("FROM mine\n")
    assert main(["image", str(tmp_path / "image")]) == 2
    assert "which exists, expected a new or empty folder; nothing was changed" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["image", "Dockerfile"]
    assert (tmp_path / "image" / "Dockerfile").read_text() == "FROM mine\n"


def test_what_cannot_be_put_into_an_image_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs, other = tmp_path / "needs.txt", tmp_path / "other"
    (other / "shop-1.0-py3-none-any.whl").parent.mkdir()

    def refused(*words: str) -> str:
        assert main(["image", str(tmp_path / "image"), *words]) == 2
        assert not (tmp_path / "image").exists()
        return capsys.readouterr().err

    assert "found no missing.py" in refused("missing.py")
    assert "is the base itself" in refused("--base", "mine", "--onto", "mine")
    assert "found --extra tranformers, expected one of" in refused("--extra", "tranformers")
    needs.write_text("no-such-library-here>=1\n")
    assert "found no no-such-library-here in this environment" in refused("--requirements", str(needs))
    needs.write_text("numpy<1\n")
    assert "expected numpy<1 (--requirements asks for it)" in refused("--requirements", str(needs))
    needs.write_text("-e ../shop\n")
    assert "needs.txt, line 1: found '-e ../shop'" in refused("--requirements", str(needs))
    assert "expected numpy<1 (shop asks for it)" in refused("--wheel", str(write_wheel(tmp_path, "numpy<1")))
    assert "which can't be read as a wheel" in refused("--wheel", str(needs))
    second = write_wheel(other)
    assert "found 2 paths that end with shop" in refused("--wheel", str(tmp_path / second.name), "--wheel", str(second))


def install_steps(recipe: Path, folder: Path) -> list[list[str]]:
    """Copy what the Dockerfile copies into ``folder`` and return the commands that it runs, with paths in there."""
    steps: list[list[str]] = []
    for line in (recipe / "Dockerfile").read_text().splitlines():
        instruction, _, rest = line.partition(" ")
        if instruction == "COPY":
            source, target = rest.split()
            copy = shutil.copytree if (recipe / source).is_dir() else shutil.copy
            (folder / target[1:]).parent.mkdir(parents=True, exist_ok=True)
            copy(recipe / source, folder / target[1:])
        elif instruction == "RUN":
            steps.append([word.replace("/app/", f"{folder}/app/") for word in shlex.split(rest)])
    return steps


def run_in(environment: Path, words: list[str]) -> str:
    """Run a command with the programs of an environment and nothing of this one; return what it prints."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    variables["PIP_NO_COMPILE"] = "1"  # saves half of the time
    variables["PATH"] = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(words, env=variables, cwd=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheels_install_in_a_fresh_environment(recipe: Path, tmp_path: Path) -> None:
    venv.EnvBuilder(symlinks=True).create(tmp_path / "fresh")
    requirements, wheels, check = install_steps(recipe, tmp_path / "root")
    assert requirements[:4] == ["python", "-m", "pip", "install"]
    # With this environment's pip: to install another takes longer than the whole test.
    pip = [sys.executable, "-m", "pip", f"--python={tmp_path / 'fresh' / 'bin' / 'python'}"]
    run_in(tmp_path / "fresh", [*pip, *wheels[3:]])
    (packages,) = (tmp_path / "fresh" / "lib").glob("*/site-packages")
    assert (packages / "luminosity" / "py.typed").exists()
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib"))  # instead of the first step
    entry = tmp_path / "root" / "app" / "entry.sh"
    assert run_in(tmp_path / "fresh", [str(entry), *check]) == f"luminosity {version('luminosity')}\n"
    where = "import luminosity, shop; print(luminosity.__file__, shop.double(2))"
    assert run_in(tmp_path / "fresh", ["python", "-c", where]) == f"{packages}/luminosity/__init__.py 4\n"
    boot = subprocess.run([entry, "--id=1-1"], capture_output=True, text=True, timeout=60)
    assert boot.returncode != 0
    assert "/opt/apache/beam/boot" in boot.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_steps_install_in_a_fresh_environment_and_a_pipeline_runs_there(recipe: Path, tmp_path: Path) -> None:
    venv.EnvBuilder(symlinks=True, with_pip=True).create(tmp_path / "fresh")
    for step in install_steps(recipe, tmp_path / "root"):
        run_in(tmp_path / "fresh", step)
    entry, pipeline = tmp_path / "root" / "app" / "entry.sh", tmp_path / "root" / "app" / "pipeline" / "pipeline.py"
    printed = run_in(tmp_path / "fresh", [str(entry), "lum", "run", str(pipeline), "--progress=off"])
    assert sorted(printed.splitlines()) == ["2", "4"]

"""``lum image``, built and run: without Docker, on a Debian that is made here, and copied onto another image."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from luminosity.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(3600)]
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_BOOT = "#!/bin/sh\necho boot got $@\n"
_PIPELINE = """\
import apache_beam as beam
import pyarrow as pa
from luminosity import ReadTable, WriteTable

rows = pa.record_batch({"n": [1, 2, 3]})
with beam.Pipeline(runner="luminosity.LuminosityRunner") as pipeline:
    pipeline | beam.Create([rows]) | WriteTable("numbers.parquet")
print(sum(sum(batch["n"].to_pylist()) for _, batch in ReadTable("numbers.parquet").all()))
"""


def _why_not() -> str:
    """Return why images can't be built here; empty if they can."""
    missing = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    if os.geteuid() != 0:
        return "needs root: debootstrap makes devices"
    return "" if _suite() else "/etc/os-release names no suite of Debian"


def _suite() -> str:
    lines = Path("/etc/os-release").read_text().splitlines()
    found = {name: value for name, _, value in (line.partition("=") for line in lines)}
    return found.get("VERSION_CODENAME", "") if found.get("ID") == "debian" else ""


class Builder:
    """buildah with a storage of its own."""

    def __init__(self, folder: Path) -> None:
        self._storage = [f"--root={folder / 'root'}", f"--runroot={folder / 'runroot'}", "--storage-driver=vfs"]
        variables = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        # What this machine's pip and its certificates need to reach an index, the build needs, too.
        paths = {path for path in (*variables.values(), "/etc/pip.conf", "/etc/ssl/certs") if path.startswith("/")}
        self._mounts = [f"--volume={path}:{path}:ro" for path in sorted(paths) if os.path.exists(path)]
        self._environment = {"SSL_CERT_DIR": "/etc/ssl/certs", **variables}

    def __call__(self, *words: str | Path) -> str:
        """Run buildah and return what it prints."""
        done = subprocess.run(
            ["buildah", *self._storage, *words], capture_output=True, text=True, timeout=3000, cwd="/"
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    def image_of(self, folder: Path, tag: str) -> None:
        """Make an image of a folder of files."""
        container = self("from", "scratch").strip()
        self("add", "--quiet", container, folder, "/")
        self("config", "--env", "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", container)
        self("commit", "--quiet", "--rm", container, tag)

    def build(self, recipe: Path, tag: str) -> None:
        """Build a recipe as it is; what pip needs here is in the variables of the build only."""
        settings = [f"--env={name}={value}" for name, value in self._environment.items()]
        self("build", "--isolation=chroot", "--layers=false", *self._mounts, *settings, f"--tag={tag}", recipe)

    def run(self, tag: str, *words: str) -> str:
        """Run the entry point of an image with these words, as a container would."""
        container = self("from", tag).strip()
        try:
            entry = self("inspect", "--type=image", "--format={{index .OCIv1.Config.Entrypoint 0}}", tag).strip()
            return self("run", "--isolation=chroot", "--workingdir=/tmp", container, "--", entry, *words)
        finally:
            self("rm", container)

    def size(self, tag: str) -> str:
        """Return the size of an image, in words."""
        return self("images", "--format={{.Size}}", tag).strip()


def _copy_python(root: Path) -> None:
    """Put this Python into a system as Beam's images have it: in ``/usr/local``, with nothing but pip."""
    base, local = Path(sys.base_prefix), root / "usr" / "local"
    library = local / "lib" / f"python{_PYTHON}"
    left_out = shutil.ignore_patterns("site-packages", "test", "tests", "__pycache__", "config-*")
    shutil.copytree(base / "lib" / f"python{_PYTHON}", library, symlinks=True, ignore=left_out)
    (library / "site-packages").mkdir()
    for each in (base / "lib").glob("libpython*.so*"):
        shutil.copy(each, local / "lib" / each.name, follow_symlinks=False)
    (local / "bin").mkdir(exist_ok=True)
    shutil.copy(os.path.realpath(sys.executable), local / "bin" / f"python{_PYTHON}")
    for name in ("python3", "python"):
        (local / "bin" / name).symlink_to(f"python{_PYTHON}")
    for command in (["ldconfig"], ["python", "-m", "ensurepip"]):
        done = subprocess.run(
            ["chroot", root, *command],
            env={"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
    boot = root / "opt" / "apache" / "beam" / "boot"
    boot.parent.mkdir(parents=True)
    boot.write_text(_BOOT)
    boot.chmod(0o755)


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    """Make two images: a bare Debian, and one with Python and a stand-in for Beam's boot program."""
    if reason := _why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("images")
    root = folder / "debian"
    included = "ca-certificates,libbz2-1.0,libexpat1,libffi8,libgomp1,libreadline8,libsqlite3-0,libssl3"
    began = time.monotonic()
    done = subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={included}", _suite(), root],
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    print(f"debootstrap: {time.monotonic() - began:.0f} s")
    found = Builder(folder)
    try:
        found.image_of(root, "localhost/bare")
        _copy_python(root)
        found.image_of(root, "localhost/beam")
        shutil.rmtree(root)
        yield found
    finally:
        found("rmi", "--all", "--force")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("onto", [None, "localhost/bare"])
def test_the_image_is_built_and_its_pipeline_runs_in_it(builder: Builder, tmp_path: Path, onto: str | None) -> None:
    (tmp_path / "sums.py").write_text(_PIPELINE)
    recipe = tmp_path / "image"
    more = [] if onto is None else ["--onto", onto]
    assert main(["image", str(recipe), str(tmp_path / "sums.py"), "--base", "localhost/beam", *more]) == 0
    began = time.monotonic()
    builder.build(recipe, "localhost/shop")
    built = time.monotonic()
    printed = builder.run("localhost/shop", "lum", "run", "/app/pipeline/sums.py", "--progress=off")
    assert printed.splitlines()[-1] == "6"
    ran = time.monotonic()
    assert builder.run("localhost/shop", "--id=1-1") == "boot got --id=1-1\n"
    size = builder.size("localhost/shop")
    print(f"onto {onto}: built in {built - began:.0f} s, ran in {ran - built:.0f} s, {size}")

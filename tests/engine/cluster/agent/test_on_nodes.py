"""What a run has on each node of a cluster: folders, code, models, a model host; and that nothing of it is left."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fake_cluster import FakeCluster, fake_cluster
from tests.processes import files_of_luminosity

pytestmark = pytest.mark.alone

_PATIENCE_S = 300
_MODEL = b"weights" * 100_000


class _Counting(http.server.BaseHTTPRequestHandler):
    requests: list[str]

    def do_GET(self) -> None:
        self.requests.append(self.path)
        self.send_response(200)
        self.send_header("Content-Length", str(len(_MODEL)))
        self.end_headers()
        self.wfile.write(_MODEL)

    def log_message(self, format: str, *args: Any) -> None:
        """Stay silent."""


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """The address of a server with a model, and the requests that it has got."""
    requests: list[str] = []
    handler = type("Handler", (_Counting,), {"requests": requests})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        thread = threading.Thread(target=serving.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}/model.bin", requests
        serving.shutdown()
        thread.join(_PATIENCE_S)


@pytest.fixture(scope="module")
def cluster() -> Iterator[FakeCluster]:
    with fake_cluster((2, 2)) as made:
        yield made


def test_a_killed_driver_leaves_nothing_on_the_nodes_and_each_had_its_own(
    cluster: FakeCluster, server: tuple[str, list[str]], tmp_path: Path
) -> None:
    url, requests = server
    module = "tests.engine.cluster.agent.on_two_nodes"
    command = [sys.executable, "-m", module, cluster.address, str(tmp_path), url, str(len(_MODEL))]
    files = files_of_luminosity()
    # The driver runs on the first node, and has that node's folders.
    own = {"TMPDIR": cluster.temporary_folder(0), "XDG_CACHE_HOME": os.path.join(cluster.folder, "0", "cache")}
    driver = subprocess.Popen(command, env={**os.environ, **own})
    try:
        until(lambda: len(list(tmp_path.glob("*.json"))) == 4 or driver.poll() is not None)
        assert driver.poll() is None
        seen = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
        made = files_of_luminosity() - files
        assert made
        runs = {os.path.basename(each).split("-")[1] for each in made}  # of this driver, and of tests beside this one
    finally:
        driver.kill()
        driver.wait(_PATIENCE_S)
    assert len({each["pid"] for each in seen}) == 4
    by_node = {number: [e for e in seen if e["temporary"] == cluster.temporary_folder(number)] for number in (0, 1)}
    for workers in by_node.values():
        assert len(workers) == 2
        assert len({each["host"] for each in workers}) == 1
        assert len({each["fetched"] for each in workers}) == 1
        [copy] = {each["readme"][0] for each in workers}
        assert not os.path.samefile(os.path.dirname(copy) if os.path.exists(copy) else "/", os.getcwd())
    for name in ("host", "fetched"):
        assert len({each[name] for each in seen}) == 2
    assert {each["readme"][1] for each in seen} == {Path("README.md").read_text()}
    assert len({each["readme"][0] for each in seen}) == 2
    assert requests == ["/model.bin"] * 2

    names = ("pid", "host", "started", "daemon")
    until(lambda: not any(psutil.pid_exists(each[name]) for each in seen for name in names))
    until(lambda: not any(os.path.basename(each).split("-")[1] in runs for each in files_of_luminosity() - files))
    for number in range(2):
        until(lambda number=number: os.listdir(cluster.temporary_folder(number)) == [])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


_SCRIPT = """
import os, sys
import apache_beam as beam
import shipped_helper

class Number:
    def __init__(self, value):
        self.value = value

def add(number):
    import shipped_words  # of the package
    return Number(number.value + len(shipped_words.WORD))

with beam.Pipeline("luminosity.LuminosityRunner", beam.options.pipeline_options.PipelineOptions(sys.argv[1:])) as p:
    numbers = p | beam.Create([1, 2]) | beam.Map(Number) | beam.Reshuffle() | beam.Map(add)
    numbers | beam.Map(lambda n: f"{n.value} {shipped_helper.read()} {os.path.basename(os.getcwd())}") | beam.Map(print)
"""


@pytest.mark.slow
def test_a_script_has_its_modules_files_classes_and_packages_on_the_nodes(cluster: FakeCluster, tmp_path: Path) -> None:
    files = {
        "scripts/run.py": _SCRIPT,
        "scripts/shipped_helper.py": "def read():\n    with open('word.txt') as file:\n        return file.read()\n",
        "word.txt": "sent",
        "random.py": "raise SystemExit('a file of the user has the name of a library')\n",
        "package/setup.py": "from setuptools import setup\nsetup(name='shipped-words', py_modules=['shipped_words'])\n",
        "package/shipped_words.py": "WORD = 'installed'\n",
    }
    for name, content in files.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    options = ["--setup_file=package/setup.py", f"--ray_address={cluster.address}", "--progress=off", "--cpu_workers=2"]
    command = [sys.executable, "scripts/run.py", *options]
    done = subprocess.run(command, cwd=tmp_path / "project", capture_output=True, text=True, timeout=_PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "10 sent project", "11 sent project"]
    assert sorted(path.name for path in (tmp_path / "project" / "package").iterdir()) == [
        "setup.py",
        "shipped_words.py",
    ]

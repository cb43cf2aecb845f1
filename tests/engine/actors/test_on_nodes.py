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
    cluster: FakeCluster, server: tuple[str, list[str]]
) -> None:
    url, requests = server
    command = [sys.executable, "-m", "tests.engine.actors.on_two_nodes", cluster.address, url, str(len(_MODEL))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_PATIENCE_S, check=False)
    assert done.returncode == -9, done
    seen = json.loads(done.stdout.splitlines()[-1])
    folders = [seen["folders"][number][name] for number in range(2) for name in ("path", "memory")]
    assert len(set(folders)) == 4
    for number, folder in enumerate(seen["folders"]):
        assert os.path.dirname(folder["path"]) == cluster.temporary_folder(number)
        assert folder["node_id"] in seen["nodes"]
        assert f"luminosity-0123456789ab-{folder['node_id'][:8]}-" in folder["path"]
    assert [sample["node_id"] for sample in seen["samples"]] == [each["node_id"] for each in seen["folders"]]
    assert all(0 < sample["ram_used"] < sample["ram_total"] for sample in seen["samples"])
    assert "expected 1.0" in seen["wrong"][0]
    assert "luminosity" not in seen["wrong"][0]

    read = [each.partition("\n") for each in seen["read"]]
    assert {content for _, _, content in read} == {Path("README.md").read_text()}
    assert len({path for path, _, _ in read}) == 2
    assert not any(os.path.samefile(path, "README.md") for path, _, _ in read if os.path.exists(path))

    assert requests == ["/model.bin"] * 2
    assert len(set(seen["fetched"])) == 2

    first, second = seen["hosts"][::2]
    assert seen["hosts"] == [first, first, second, second]
    assert first != second
    assert seen["hosts_later"] == [first, second]
    until(lambda: not any(map(os.path.exists, folders)))
    until(lambda: not any(map(psutil.pid_exists, (first, second))))
    for number in range(2):
        assert [name for name in os.listdir(cluster.temporary_folder(number)) if name.startswith("luminosity")] == []


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
    assert sorted(done.stdout.split("\n")) == ["", "10 sent work", "11 sent work"]
    assert sorted(path.name for path in (tmp_path / "project" / "package").iterdir()) == [
        "setup.py",
        "shipped_words.py",
    ]

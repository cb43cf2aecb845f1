"""A driver whose workers, two on each of two nodes, note what they see of their node, and then wait."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import LuminosityRunner
from luminosity.engine.cluster.driver.shared_paths import SharedPaths
from luminosity.inference.files.local import cached_copy
from luminosity.inference.files.source import Source, SourceFile
from luminosity.inference.ipc.client import connect

HOST_ID = "5" * 32
_TIMEOUT_S = 120


def _open(url: str) -> Any:
    return urllib.request.urlopen(url, timeout=_TIMEOUT_S)


def look(number: int, folder: str, url: str, size: int) -> None:
    """Write down what this worker sees, once."""
    host = connect(HOST_ID, "tests.inference.ipc.ipc_services:echo")
    host.send(("pid", None))
    with open("README.md") as file:
        readme = file.read()
    seen = {
        "pid": os.getpid(),
        "temporary": tempfile.gettempdir(),
        "readme": [os.path.abspath("README.md"), readme],
        "fetched": cached_copy(Source(url, "model.bin", (SourceFile(url, "model.bin", size, 1.0),), _open)),
        "host": host.recv(_TIMEOUT_S),
        "started": subprocess.Popen(["sleep", "600"], start_new_session=True).pid,
        "daemon": int(subprocess.check_output("sleep 600 >/dev/null & echo $!", shell=True, text=True)),
    }
    with open(os.path.join(folder, f".{number}"), "w") as file:
        json.dump(seen, file)
    os.rename(os.path.join(folder, f".{number}"), os.path.join(folder, f"{number}.json"))
    time.sleep(_TIMEOUT_S)


def main(address: str, folder: str, url: str, size: int) -> None:
    SharedPaths._sees_folder = lambda *_: False  # as if the nodes were machines of their own
    options = PipelineOptions([f"--ray_address={address}", "--progress=off", "--cpu_workers=4"])
    with beam.Pipeline(LuminosityRunner(), options) as pipeline:
        pipeline | beam.Create(range(4)) | beam.Reshuffle() | beam.Map(look, folder, url, size)


if __name__ == "__main__":
    from tests.engine.cluster.agent import on_two_nodes  # so that workers import it, instead of a copy of __main__

    on_two_nodes.main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))

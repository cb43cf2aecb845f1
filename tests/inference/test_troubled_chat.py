"""A run over a chat server with errors, refusals, broken and wrong answers, that is killed half-way and run again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.inference import troubled_chat
from tests.inference.handlers.model_server import serving
from tests.inference.troubled_chat import TroubledChat, kill, results, rows_of, running
from tests.runners import IS_REFERENCE

pytestmark = pytest.mark.thorough

_COUNT = 260
_WINDOW_S = 1.0
_LIMITS = {"requests_per_minute": 120, "tokens_per_minute": 9000, "window_s": _WINDOW_S}


@pytest.mark.skipif(IS_REFERENCE, reason="only our runner has workers that share limits")
def test_every_row_is_answered_or_says_why_and_none_is_paid_for_twice(tmp_path: Path) -> None:
    script = TroubledChat()
    with serving(script) as server:
        with running(tmp_path, server.url, _COUNT, **_LIMITS) as process:
            while sum(script.paid.values()) < _COUNT // 2:
                assert process.poll() is None, (tmp_path / "run.log").read_text()
                time.sleep(0.01)
            kill(process)
        while sum(script.now.values()):  # requests that the server has read already
            time.sleep(0.01)
        paid_before = sum(script.paid.values())
        under_way = 2 * 32  # the most requests of two workers

        script.calm_until = len(server.seen) + under_way
        _run_to_the_end(tmp_path, server.url)
        answers, failed = results(tmp_path)
        assert set(answers) | set(failed) == set(rows_of(_COUNT))
        assert not set(answers) & set(failed)
        assert all(answer == row.upper() for row, answer in answers.items())
        assert sum("answered 500: out of order" in why for why in failed.values()) > 5
        reasons = ("answered 500: out of order", "<html>", "expected a JSON object")
        assert all(any(reason in why for reason in reasons) for why in failed.values())

        script.is_mended = True
        seen, twice = len(server.seen), script.paid_again()
        _run_to_the_end(tmp_path, server.url)
        answers, none_failed = results(tmp_path)
        assert (len(answers), none_failed) == (_COUNT, {})
        assert len(server.seen) - seen == len(failed), "only dead letters are asked again"

    assert _COUNT // 2 <= paid_before < _COUNT
    assert set(script.troubles) <= {"500", "429", "503", "slow", "cut", "garbled", "invalid"}
    assert {"500", "cut"} <= set(script.troubles)
    assert twice <= under_way, "only what was in flight when the run was killed is paid for twice"
    assert script.paid_again() == twice
    requests, tokens = troubled_chat.most_in_a_window(sorted(script.arrived), _WINDOW_S)
    assert (requests <= 120, tokens <= 9000) == (True, True)


def _run_to_the_end(folder: Path, url: str) -> None:
    with running(folder, url, _COUNT, **_LIMITS) as process:
        assert process.wait(200) == 0, (folder / "run.log").read_text()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads the state of processes from /proc")
@pytest.mark.skipif(IS_REFERENCE, reason="only our runner has workers that share limits")
def test_a_run_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import pathlib, signal, sys; from tests.inference.troubled_chat import running\n"
        "with running(pathlib.Path(sys.argv[1]), sys.argv[2], 1000, requests_per_minute=50) as process:\n"
        "    print(process.pid, flush=True)\n"
        "    signal.pause()"
    )
    with serving(TroubledChat()) as server:
        starter = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), server.url], stdout=subprocess.PIPE)
        with starter:
            assert starter.stdout is not None
            run = int(starter.stdout.readline())
            while not server.seen:
                assert _is_alive(run), (tmp_path / "run.log").read_text()
                time.sleep(0.01)
            starter.kill()
        try:
            deadline = time.monotonic() + 60
            while _is_alive(run) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not _is_alive(run)
        finally:
            if _is_alive(run):
                os.killpg(run, signal.SIGKILL)


def _is_alive(process: int) -> bool:
    """Return whether a process runs; one that has ended may wait for its parent to ask how."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False

"""The log lines of a run beside its record: a bounded file, which loses its oldest lines."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from luminosity.runs.log_lines import LogLine, LogWriter, log_writer, paths_of, read_lines

_RUN = "20260301T101500-4f2a9c"


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "runs" / f"{_RUN}.json"


def _numbers(record: Path) -> list[int]:
    return [line.number for path in paths_of(record) if path.exists() for line in read_lines(path)]


def test_lines_come_back_as_they_were_written(record: Path) -> None:
    writer = LogWriter(record)
    assert not record.parent.exists()  # a run that logs nothing leaves nothing
    line = LogLine(1.5, "error", "no \u00e9\n\x1b[31m", "my.logger", "w0", "Parse", "Traceback …")
    writer.write(line)
    writer.write(LogLine(2.0, "info", ""))
    writer.close()
    writer.write(LogLine(3.0, "info", "too late"))
    _, younger = paths_of(record)
    assert read_lines(younger) == [line._replace(number=1), LogLine(2.0, "info", "", number=2)]
    assert younger.stat().st_mode & 0o777 == 0o600


def test_the_oldest_lines_go(record: Path) -> None:
    writer = LogWriter(record, most_bytes=4_000)
    for number in range(500):
        writer.write(LogLine(number, "info", f"line {number}"))
        assert sum(path.stat().st_size for path in paths_of(record) if path.exists()) <= 4_000
    writer.close()
    numbers = _numbers(record)
    assert numbers == list(range(numbers[0], 501))
    assert 1 < numbers[0] < 480


def test_what_is_no_line_is_left_out(record: Path, tmp_path: Path) -> None:
    record.parent.mkdir()
    _, younger = paths_of(record)
    good = {"seconds": 1, "level": "info", "message": "good", "number": 1}
    wrong = [
        good | {"level": "loud"},
        good | {"message": 5},
        good | {"number": "x"},
        good | {"seconds": None},
        {"level": "info"},
        [],
        None,
    ]
    lines = [json.dumps(each) for each in (good | {"of_a_later_version": 1}, *wrong)]
    younger.write_text("\n".join([*lines, "[" * 5_000, '{"seconds": 1, "le']))
    assert [line.message for line in read_lines(younger)] == ["good"]
    secret = tmp_path / "secret"
    secret.write_text(json.dumps(good))
    younger.unlink()
    younger.symlink_to(secret)
    with pytest.raises(OSError, match="symbolic"):
        read_lines(younger)


def test_a_run_goes_on_if_its_lines_cannot_be_kept(record: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = LogWriter(record, most_bytes=1_000)
    writer.write(LogLine(1.0, "info", "x"))
    shutil.rmtree(record.parent)
    for _ in range(30):
        writer.write(LogLine(2.0, "info", "x"))
    assert len(caplog.records) == 1
    assert "not kept any more" in caplog.text
    record.parent.write_text("a file, where the folder should be")
    LogWriter(record).write(LogLine(1.0, "info", "x"))
    assert len(caplog.records) == 1  # the recorder says so
    assert log_writer("off", _RUN) is None


def test_a_process_that_is_forked_writes_no_lines(record: Path) -> None:
    writer = LogWriter(record)
    writer.write(LogLine(1.0, "info", "first"))
    child = os.fork()
    if child == 0:
        writer.write(LogLine(2.0, "info", "of the child"))
        os._exit(0)
    os.waitpid(child, 0)
    writer.write(LogLine(3.0, "info", "second"))
    writer.close()
    assert _numbers(record) == [1, 2]

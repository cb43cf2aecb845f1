"""Tests of errors that limits of the process cause."""

from __future__ import annotations

import errno
import re
import resource
import signal
from typing import Any

import pytest

from luminosity import LuminosityRunner
from luminosity.cli import runs
from luminosity.cli.main import main
from luminosity.engine import process
from luminosity.engine.process import (
    check_address_space,
    describe_limits,
    explain_exit,
    limits_named,
    oom_kills,
)
from luminosity.engine.workers.failure import Failure
from luminosity.errors import ResourcesExceeded

_LIMIT = "1.54 GB of address space (ulimit -v 1500000)"
_ERRORS = [
    MemoryError(),
    RuntimeError("can't start new thread"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    ImportError("libfoo.so: failed to map segment from shared object"),
]


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the address space of this process is limited."""
    whole = resource.RLIM_INFINITY

    def getrlimit(number: int) -> tuple[int, int]:
        return (1_500_000 * 1024, whole) if number == resource.RLIMIT_AS else (whole, whole)

    monkeypatch.setattr(process.resource, "getrlimit", getrlimit)


@pytest.fixture
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("error", _ERRORS, ids=repr)
def test_an_error_for_lack_of_memory_names_the_limit(error: Exception) -> None:
    with pytest.raises(ResourcesExceeded, match="no memory left") as caught, limits_named():
        raise error
    assert _LIMIT in str(caught.value)
    assert "ulimit -v unlimited" in caught.value.for_command()


@pytest.mark.usefixtures("unlimited")
@pytest.mark.parametrize("error", _ERRORS, ids=repr)
def test_without_a_limit_an_error_stays(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, limits_named():
        raise error
    assert caught.value is error
    assert describe_limits() == ""
    check_address_space()


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("error", [RuntimeError("no"), OSError(errno.ENOENT, "no"), ImportError("no")], ids=repr)
def test_other_errors_stay(error: Exception) -> None:
    with pytest.raises(type(error), match="no"), limits_named():
        raise error


@pytest.mark.usefixtures("limited")
def test_nothing_starts_with_too_little_address_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["script.py"])
    with pytest.raises(ResourcesExceeded, match=r"expected at least 2 GB"):
        LuminosityRunner()


@pytest.mark.usefixtures("limited")
def test_a_command_without_memory_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(runs, "find", find)
    assert main(["show", "last"]) == 1
    assert capsys.readouterr().err.startswith(
        f"lum show: there is no memory left (MemoryError): a process may use {_LIMIT}"
    )


@pytest.mark.usefixtures("limited")
def test_a_step_without_memory_names_the_limit() -> None:
    failure = Failure.of(MemoryError())
    assert failure.fix is not None
    assert _LIMIT in failure.fix.python


@pytest.mark.parametrize(
    ("code", "cause", "fix"),
    [
        (0, r"as os\._exit\(0\) does", "raise an exception instead"),
        (137, r"as os\._exit\(137\) does", "raise an exception instead"),
        (-signal.SIGSEGV, "native library .* crashed .SIGSEGV", "lum replay"),
        (-signal.SIGABRT, "native library .* crashed .SIGABRT", "lum replay"),
        (-signal.SIGTERM, "Another program, or code of the step, sent SIGTERM", "look for what sends it"),
        (-signal.SIGXCPU, "limit of CPU time", "raise the limit"),
        (-63, "Another program, or code of the step, sent the signal", "look for what sends it"),
    ],
)
def test_the_end_of_a_worker_is_explained_by_its_code(code: int, cause: str, fix: str) -> None:
    found, remedy = explain_exit(code, 0)
    assert re.search(cause, found)
    assert "emory" not in found
    assert fix in remedy.python


@pytest.mark.parametrize(
    ("before", "now", "cause"),
    [
        (4, 5, r"Memory ran out: the kernel has killed a process .* There are [\d.]+ GB in all"),
        (4, 4, r"Another program, or code of the step, probably sent SIGKILL.* There are [\d.]+ GB in all"),
        (None, None, r"probably ran out of memory, and the kernel killed it: there are [\d.]+ GB"),
    ],
)
def test_a_worker_that_is_killed_is_explained_by_the_kernels_counters(
    before: int | None, now: int | None, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "oom_kills", lambda: now)
    assert re.search(cause, explain_exit(-signal.SIGKILL, before)[0])
    assert "on its node" in explain_exit(-signal.SIGKILL, before, is_here=False)[0]


def test_the_kernels_counters_can_be_read_or_are_unknown() -> None:
    assert (oom_kills() or 0) >= 0

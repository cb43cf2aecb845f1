"""Tests of ``--save_failed`` and replays: the element that failed a run is saved, and a replay runs it like the run."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.pvalue import AsDict, AsIter, AsSingleton
from apache_beam.transforms import window
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import BagStateSpec, CombiningValueStateSpec, TimerSpec, on_timer

from luminosity.engine.debugging.replay import Replay
from luminosity.errors import ElementKillsWorker, OptionError, ReplayError, StepFailed
from tests.marks import note, notes
from tests.runners import IS_REFERENCE, new_pipeline, new_runner, run
from tests.warm import run_module

pytestmark = [
    pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does"),
    pytest.mark.usefixtures("leaves_nothing"),
]

# A step of this name writes a file per bundle, and so gets all there is in one, given patience.
_IN_ONE_BUNDLE = "All/WriteImpl/WriteBundles"
_MODES = ["--debug", "--cpu_workers=2"]


def save(path: Path, build: Callable[[beam.Pipeline], Any], *flags: str) -> str:
    """Run a pipeline that fails and saves; return the error's message."""
    with pytest.raises(StepFailed) as caught:
        run(build, f"--save_failed={path}", *flags)
    return str(caught.value)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return tmp_path / "failed.lum"


# ---- which element


@pytest.mark.usefixtures("patient_sinks")
@pytest.mark.parametrize("mode", _MODES)
def test_the_element_is_found_among_its_neighbours(saved: Path, tmp_path: Path, mode: str) -> None:
    tries = tmp_path / "tries"

    def fail_at(x: str) -> str:
        if x == "number 42":
            note(tries)
            raise ValueError("no good")
        return x

    elements = [f"number {i}" for i in range(64)]
    build = lambda p: p | beam.Create(elements) | beam.Reshuffle() | _IN_ONE_BUNDLE >> beam.Map(fail_at)  # noqa: E731
    message = save(saved, build, mode)
    assert len(notes(tries)) > 4, "it was alone from the start"
    size = f"{saved.stat().st_size / 1000:.3g} kB"
    assert "\n  element: 'number 42'\n" in message
    assert message.splitlines()[-1] == f"Saved to {saved} ({size}): `lum replay {saved}` runs it alone."
    replay = Replay(str(saved))
    assert (replay.manifest.count, replay.manifest.element) == (1, "'number 42'")
    with pytest.raises(ValueError, match=r"^no good$"):
        replay.run()


class FailingInCompany(beam.DoFn):
    def start_bundle(self) -> None:
        self._count = 0

    def process(self, element: int) -> Iterable[int]:
        self._count += 1
        yield element

    def finish_bundle(self) -> None:
        if self._count > 1:
            raise ValueError("one too many")


@pytest.mark.usefixtures("patient_sinks")
@pytest.mark.parametrize("mode", _MODES)
def test_a_bundle_that_fails_only_as_a_whole_is_saved_as_a_whole(saved: Path, mode: str) -> None:
    def build(pipeline: beam.Pipeline) -> None:
        pipeline | beam.Create(range(8)) | beam.Reshuffle() | _IN_ONE_BUNDLE >> beam.ParDo(FailingInCompany())

    last = save(saved, build, mode).splitlines()[-1]
    replay = Replay(str(saved))
    assert replay.manifest.count > 1
    assert last.startswith(
        f"None of the bundle's {replay.manifest.count} elements fails alone. All are saved to {saved}"
    )
    with pytest.raises(ValueError, match="one too many"):
        replay.run()


def test_an_element_that_ends_its_worker_is_saved(saved: Path) -> None:
    def end_at(x: str) -> None:
        if x == "number 42":
            os._exit(3)

    elements = [f"number {i}" for i in range(64)]
    with pytest.raises(ElementKillsWorker, match="runs it alone"):
        run(lambda p: p | beam.Create(elements) | beam.Map(end_at), "--cpu_workers=2", f"--save_failed={saved}")
    done = lum("replay", str(saved))
    assert done.returncode == 3
    assert "number 42" in done.stdout
    assert "the run failed with: the worker exited with code 3" in done.stdout


# ---- what it needs besides


def fails_with(fn: Callable[..., object]) -> Callable[..., None]:
    """A step that fails; its message describes what it got."""

    def fail(*arguments: Any) -> None:
        raise ValueError(f"found {fn(*arguments)}")

    return fail


_SEEN = beam.DoFn.StateParam(CombiningValueStateSpec("seen", sum))
_BAG = beam.DoFn.StateParam(BagStateSpec("bag", beam.coders.VarIntCoder()))
_END = TimerSpec("end", TimeDomain.WATERMARK)
_END_PARAM = beam.DoFn.TimerParam(_END)


class FailingAtTheThird(beam.DoFn):
    def process(self, element: tuple[Any, int], seen: Any = _SEEN, bag: Any = _BAG) -> None:
        seen.add(1)
        bag.add(element[1])
        if seen.read() == 3:
            raise ValueError(f"found {seen.read()} of {element[0]!r}: {sorted(bag.read())}")


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("key", [7, "seven", b"seven", ("se", 7), None])
def test_state_is_as_it_was(saved: Path, key: object, mode: str) -> None:
    def build(pipeline: beam.Pipeline) -> None:
        others = [(other, n) for other in (8, "eight") for n in range(2)]
        pipeline | beam.Create([*others, (key, 1), (key, 2), (key, 3)]) | beam.ParDo(FailingAtTheThird())

    wanted = f"found 3 of {key!r}: [1, 2, 3]"
    assert wanted in save(saved, build, mode)
    replay = Replay(str(saved))
    assert replay.manifest.count == 1
    with pytest.raises(ValueError, match="found") as caught:
        replay.run()
    assert str(caught.value) == wanted


class FailingAtTheEnd(beam.DoFn):
    def process(self, element: tuple[str, int], bag: Any = _BAG, end: Any = _END_PARAM) -> None:
        bag.add(element[1])
        end.set(window.GlobalWindow().max_timestamp())

    @on_timer(_END)
    def at_the_end(self, key: str = beam.DoFn.KeyParam, bag: Any = _BAG) -> None:
        if key == "key 4":
            raise ValueError(f"found {key} with {sorted(bag.read())}")


@pytest.mark.parametrize("mode", _MODES)
def test_a_timer_is_found_and_due(saved: Path, mode: str) -> None:
    elements = [(f"key {key}", n) for key in range(6) for n in range(3)]
    message = save(saved, lambda p: p | beam.Create(elements) | beam.ParDo(FailingAtTheEnd()), mode)
    assert "found key 4 with [0, 1, 2]" in message
    replay = Replay(str(saved))
    assert (replay.manifest.count, len(replay.manifest.reads)) == (1, 0)
    with pytest.raises(ValueError, match=r"^found key 4 with \[0, 1, 2\]$"):
        replay.run()


@pytest.mark.parametrize("mode", _MODES)
def test_side_inputs_are_whole(saved: Path, mode: str) -> None:
    def build(pipeline: beam.Pipeline) -> None:
        numbers = pipeline | "Numbers" >> beam.Create(range(100))
        squares = numbers | beam.Map(lambda n: (n % 10, n * n)) | beam.CombinePerKey(sum)
        total = numbers | beam.CombineGlobally(sum)
        looking_up = fails_with(lambda x, every, by_key, total: (x, sum(every), by_key[3], total))
        (
            pipeline
            | "Main" >> beam.Create([5])
            | beam.Map(looking_up, AsIter(numbers), AsDict(squares), AsSingleton(total))
        )

    wanted = f"found {(5, 4950, sum(n * n for n in range(3, 100, 10)), 4950)}"
    assert wanted in save(saved, build, mode)
    with pytest.raises(ValueError, match="found") as caught:
        Replay(str(saved)).run()
    assert str(caught.value) == wanted


@pytest.mark.parametrize("mode", _MODES)
def test_a_large_group_is_whole_and_read_piece_by_piece(saved: Path, mode: str) -> None:
    def build(pipeline: beam.Pipeline) -> None:
        values = pipeline | beam.Create([("key", bytes([n]) * 10_000) for n in range(250)])
        measuring = fails_with(lambda pair: (hasattr(pair[1], "__len__"), sum(map(len, pair[1])), len(list(pair[1]))))
        values | beam.GroupByKey() | beam.Map(measuring)

    assert "found (False, 2500000, 250)" in save(saved, build, mode)
    with pytest.raises(ValueError, match=r"^found \(False, 2500000, 250\)$"):
        Replay(str(saved)).run()


# ---- the file


def test_the_file_is_private_and_replaces_another(saved: Path) -> None:
    saved.write_text("an older one")
    save(saved, lambda p: p | beam.Create([1]) | beam.Map(fails_with(repr)), "--debug")
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    assert list(saved.parent.iterdir()) == [saved], "nothing unfinished is left"
    assert Replay(str(saved)).manifest.count == 1


class Secrets(PipelineOptions):
    @classmethod
    def _add_argparse_args(cls, parser: Any) -> None:
        parser.add_argument("--password")


def test_options_are_not_in_it(saved: Path) -> None:
    options = PipelineOptions(["--password=opensesame", f"--save_failed={saved}", "--debug"])
    with pytest.raises(StepFailed), beam.Pipeline(runner=new_runner(), options=options) as pipeline:
        pipeline | beam.Create([1]) | beam.Map(fails_with(repr))
    with zipfile.ZipFile(saved) as archive:
        assert all(b"opensesame" not in archive.read(name) for name in archive.namelist())


def test_a_file_that_cannot_be_written_does_not_hide_the_failure(saved: Path) -> None:
    def remove_the_folder_and_fail(x: int) -> None:
        saved.parent.chmod(0o500) if os.getuid() else saved.mkdir()  # nothing keeps root from writing
        raise ValueError("no good")

    last = save(saved, lambda p: p | beam.Create([1]) | beam.Map(remove_the_folder_and_fail), "--debug").splitlines()[
        -1
    ]
    assert last.startswith(f"can't save it to {saved}: ")


@pytest.mark.parametrize("place", ["nowhere/failed.lum", "."])
def test_a_place_that_can_hold_no_file_is_refused(tmp_path: Path, place: str) -> None:
    with pytest.raises(OptionError, match="--save_failed"):
        new_pipeline(f"--save_failed={tmp_path / place}").run()


def test_what_is_no_such_file_is_told(saved: Path) -> None:
    with pytest.raises(ReplayError, match="No such file"):
        Replay(str(saved))
    saved.write_text("something else")
    with pytest.raises(ReplayError, match="expected a complete file that --save_failed wrote"):
        Replay(str(saved))
    with zipfile.ZipFile(saved, "w") as archive:
        archive.writestr("letter.txt", "something else")
    with pytest.raises(ReplayError, match="expected a complete file that --save_failed wrote"):
        Replay(str(saved))


def test_a_damaged_file_is_told(saved: Path) -> None:
    save(saved, lambda p: p | beam.Create([1]) | beam.Map(fails_with(repr)), "--debug")
    whole = saved.read_bytes()
    for damaged in (whole[:-100], whole[: len(whole) // 2], whole.replace(whole[200:210], b"x" * 10)):
        saved.write_bytes(damaged)
        with pytest.raises(ReplayError, match="expected a complete file"):
            Replay(str(saved))


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [("version", 99, "version 99 of the format, expected 1"), ("python", "2.7", "saved by Python 2.7")],
)
def test_a_file_of_another_version_is_told(saved: Path, field: str, value: object, told: str) -> None:
    save(saved, lambda p: p | beam.Create([1]) | beam.Map(fails_with(repr)), "--debug")
    with zipfile.ZipFile(saved) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(entries["manifest.json"])
    (manifest if field in manifest else manifest["surroundings"])[field] = value
    with zipfile.ZipFile(saved, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, json.dumps(manifest) if name == "manifest.json" else data)
    with pytest.raises(ReplayError, match=told):
        Replay(str(saved))


# ---- the command

_PIPELINE = """
import apache_beam as beam
from dataclasses import dataclass
from neighbour import divide

@dataclass(frozen=True)
class Pair:
    numbers: tuple

if __name__ == "__main__":
    with beam.Pipeline() as pipeline:
        pairs = pipeline | beam.Create([Pair((1, 2)), Pair((1, 0))]) | beam.Reshuffle()
        pairs | "Divide" >> beam.Map(divide) | "Again" >> beam.Reshuffle() | beam.Map(print)
"""
_NEIGHBOUR = "def divide(pair):\n    a, b = pair.numbers\n    return a / b\n"
_MENDED = "def divide(pair):\n    a, b = pair.numbers\n    print('divides')\n    return a / b if b else None\n"


def lum(*words: str, **named: Any) -> subprocess.CompletedProcess[str]:
    return run_module("luminosity.cli.main", *words, timeout=120, **named)


def test_a_replay_shows_whether_a_change_helps(tmp_path: Path, saved: Path) -> None:
    folder, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    script, neighbour = folder / "pipeline.py", folder / "neighbour.py"
    script.write_text(_PIPELINE)
    neighbour.write_text(_NEIGHBOUR)
    ran = lum("run", str(script), f"--save_failed={saved}", "--cpu_workers=1")
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].endswith("runs it alone.")

    failing = lum("replay", str(saved), cwd=elsewhere)
    assert failing.returncode == 1
    assert failing.stdout.splitlines()[0] == "1 element of step 'Divide': Pair(numbers=(1, 0))"
    assert f'File "{neighbour}", line 3, in divide' in failing.stdout
    assert "ZeroDivisionError: division by zero\nThe same as in the run.\n" in failing.stdout
    assert "apache_beam" not in failing.stdout

    looking = lum("replay", str(saved), "--pdb", cwd=elsewhere, input="p a, b\nquit\n")
    assert looking.returncode == 1
    assert "(Pdb) (1, 0)" in looking.stdout

    neighbour.write_text(_MENDED)
    mended = lum("replay", str(saved), cwd=elsewhere)
    assert mended.returncode == 0, mended.stdout + mended.stderr
    assert mended.stdout.splitlines()[2:] == ["divides", "It runs through.", "'Divide' outputs 1:", "  None"]

    neighbour.unlink()
    missing = lum("replay", str(saved), cwd=elsewhere)
    assert missing.returncode == 2
    assert (
        f"lum replay: module 'neighbour' is not found here; the run imported 'neighbour' from {neighbour}"
        in missing.stderr
    )


def test_the_debugger_opens_in_the_users_frame(tmp_path: Path, saved: Path) -> None:
    script = tmp_path / "pipeline.py"
    script.write_text(
        _PIPELINE.replace("from neighbour import divide", "import json\ndef divide(pair):\n    json.loads('{')")
    )
    assert lum("run", str(script), f"--save_failed={saved}", "--debug").returncode == 1
    looking = lum("replay", str(saved), "--pdb", input="p pair\ndown\nquit\n")
    assert "json/decoder.py" not in looking.stdout.split("(Pdb) ")[0].partition("JSONDecodeError")[0]
    assert "(Pdb) Pair(numbers=(1, 2))" in looking.stdout
    assert "json/__init__.py" in looking.stdout, "where one can go from there"


def test_a_step_that_exits_does_not_end_the_replay(saved: Path) -> None:
    save(saved, lambda p: p | beam.Create([1]) | beam.Map(lambda x: sys.exit("enough")), "--debug")
    done = lum("replay", str(saved))
    assert done.returncode == 1
    assert "SystemExit: enough\nThe same as in the run." in done.stdout


def test_code_of_the_script_itself_is_saved_as_it_was(tmp_path: Path, saved: Path) -> None:
    script = tmp_path / "pipeline.py"
    inlined = _PIPELINE.replace("from neighbour import divide\n", _NEIGHBOUR)
    script.write_text(inlined)
    assert lum("run", str(script), f"--save_failed={saved}", "--debug").returncode == 1
    script.write_text(inlined.replace(_NEIGHBOUR, _MENDED))
    failing = lum("replay", str(saved))
    assert failing.returncode == 1
    assert f"This code is part of {script} itself, which is saved in the file" in failing.stdout

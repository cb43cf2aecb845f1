"""What ``lum drift`` does: read, project, test, and tell."""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from luminosity.cli.drift_input import Sample, Source, read_sample, source_of
from luminosity.cli.drift_progress import Stages
from luminosity.drift.history import DriftHistory, PastTest
from luminosity.drift.pca import PCA, PCASums
from luminosity.drift.result import MMDTestResult
from luminosity.drift.rows import as_rows, same_width
from luminosity.errors import DriftError, OptionError
from luminosity.extras import require

__all__ = ["run"]

_DRIFT = 3
_COMPONENTS = 50
_PAST_TESTS = 100


def run(parsed: argparse.Namespace) -> int:
    began = time.monotonic()
    _check(parsed)
    history = DriftHistory(parsed.history) if parsed.history else None
    require("jax", "jax")
    with Stages() as stages:
        sources = _sources(parsed)
        samples = [_read(source, parsed, name, stages) for source, name in zip(sources, ("REFERENCE", "CURRENT"), strict=True)]
        rows, pca = _projected(samples, parsed, stages)
        from luminosity.drift.mmd import mmd_test

        result = mmd_test(
            *rows,
            _kernel(parsed),
            permutations=parsed.permutations,
            level=parsed.level,
            seed=parsed.seed,
            progress=stages.tiles("comparing pairs of rows"),
        )
        settings = _settings(parsed, sources, samples, rows[0].shape[1], pca)
        past = _remember(history, result, parsed, sources, settings)
        if parsed.report:
            _report(parsed, result, sources, samples, rows, past, settings, stages)
    seconds = time.monotonic() - began
    print(_as_json(result, settings, seconds) if parsed.json else _verdict(result, seconds))
    return _DRIFT if result.drift else 0


def _check(parsed: argparse.Namespace) -> None:
    """What can be known before anything is read."""
    if parsed.bandwidth and parsed.kernel not in ("rbf", "laplacian"):
        raise OptionError("--bandwidth is of --kernel rbf or laplacian: give one of them, too")
    if parsed.permutations < 1 / parsed.level - 1:
        raise OptionError(
            f"--permutations={parsed.permutations}: expected at least {math.ceil(1 / parsed.level - 1)}, "
            f"since with fewer no p-value can be as low as --level={parsed.level:g}"
        )
    if parsed.report:
        folder = os.path.dirname(os.path.abspath(parsed.report))
        if not os.path.isdir(folder) or os.path.isdir(parsed.report):
            raise OptionError(f"--report={parsed.report}: expected the name of a file in a folder that is there")


def _sources(parsed: argparse.Namespace) -> tuple[Source, Source]:
    columns = [name for text in parsed.column for name in text.split(",") if name]
    if columns and all(name.lower().endswith(".npy") for name in (parsed.reference, parsed.current)):
        raise OptionError("--column is of tables, and both samples are arrays of NumPy, which have no columns")
    if not all(name.lower().endswith(".npy") for name in (parsed.reference, parsed.current)):
        from luminosity.lean_beam import import_beam

        import_beam()
    return source_of(parsed.reference, columns), source_of(parsed.current, columns)


def _read(source: Source, parsed: argparse.Namespace, name: str, stages: Stages) -> Sample:
    told = getattr(parsed, name.lower())
    sample = read_sample(source, parsed.rows, parsed.seed, parsed.skip_missing, stages.rows(f"reading {name}"))
    if len(sample.rows) < 2:
        left = f", and {sample.skipped:,} without a value" if sample.skipped else ""
        raise DriftError(f"{told} has {len(sample.rows)} rows to compare{left}; expected at least 2")
    return sample


def _projected(samples: Sequence[Sample], parsed: argparse.Namespace, stages: Stages) -> tuple[list[Any], PCA | None]:
    """Components are those of both samples together: of one alone they would tell the samples apart."""
    reference, current = (
        as_rows(sample.rows, name) for sample, name in zip(samples, (parsed.reference, parsed.current), strict=True)
    )
    same_width(reference, current)
    width = reference.shape[1]
    wanted = parsed.components if parsed.components is not None else _COMPONENTS if width > _COMPONENTS else 0
    if wanted > width:
        raise OptionError(f"--components={wanted}: the rows have {width} numbers, so that there are no more directions")
    if not wanted:
        return [reference, current], None
    stages.begin("projecting onto principal components")
    sums = PCASums()
    for rows in (reference, current):
        sums.add(rows)
    pca = sums.pca(min(wanted, len(reference) + len(current)))
    return [pca.transform(rows) for rows in (reference, current)], pca


def _kernel(parsed: argparse.Namespace) -> Any:
    from luminosity.drift import RBF, Laplacian, Linear, Polynomial

    if parsed.kernel == "aggregate":
        from luminosity.drift import Aggregate

        return Aggregate()
    if parsed.kernel in ("linear", "polynomial"):
        return Linear() if parsed.kernel == "linear" else Polynomial()
    kind = RBF if parsed.kernel == "rbf" else Laplacian
    return [kind(each) for each in parsed.bandwidth or (None,)]


def _settings(
    parsed: argparse.Namespace, sources: Sequence[Source], samples: Sequence[Sample], width: int, pca: PCA | None
) -> dict[str, Any]:
    return {
        "columns": _columns(sources),
        "kernel": _asked_kernel(parsed),
        "width": int(samples[0].rows.shape[1]),
        "components": None if pca is None else width,
        "explained_variance": None if pca is None else round(float(sum(pca.explained_variance_ratio)), 4),
        "rows_asked_for": parsed.rows,
        "rows_read": [sample.read for sample in samples],
        "rows_skipped": [sample.skipped for sample in samples],
        "versions": {name: version(name) for name in ("luminosity", "jax", "numpy")},
        "device": _device(),
    }


def _device() -> str:
    import jax

    device = jax.devices()[0]
    return f"{jax.device_count()} of {device.device_kind}" if jax.device_count() > 1 else str(device.device_kind)


def _columns(sources: Sequence[Source]) -> str:
    return ", ".join(sources[0].columns or sources[1].columns)


def _asked_kernel(parsed: argparse.Namespace) -> str:
    bandwidths = ",".join(format(each, "g") for each in parsed.bandwidth)
    return f"{parsed.kernel}({bandwidths})" if bandwidths else parsed.kernel


def _remember(
    history: DriftHistory | None,
    result: MMDTestResult,
    parsed: argparse.Namespace,
    sources: Sequence[Source],
    settings: Mapping[str, Any],
) -> list[PastTest]:
    """This test goes into the file; the ones it can be compared with come back, and this one."""
    if history is None:
        return []
    reference, columns, kernel = _address(parsed.reference), _columns(sources), _asked_kernel(parsed)
    history.append(
        PastTest.of(
            result,
            reference=reference,
            current=_address(parsed.current),
            columns=columns,
            kernel=kernel,
            settings=settings,
        )
    )
    return history.last(reference, columns, kernel, _PAST_TESTS)


def _address(pattern: str) -> str:
    """The same file is the same from whatever folder it is named."""
    return pattern if "://" in pattern else os.path.abspath(pattern)


def _report(
    parsed: argparse.Namespace,
    result: MMDTestResult,
    sources: Sequence[Source],
    samples: Sequence[Sample],
    rows: Sequence[Any],
    past: Sequence[PastTest],
    settings: Mapping[str, Any],
    stages: Stages,
) -> None:
    from luminosity.drift.report.write import write_report

    def details(side: int) -> Any:
        return lambda numbers: sources[side].details([int(samples[side].numbers[number]) for number in numbers])

    write_report(
        parsed.report,
        result,
        *rows,
        names=(parsed.reference, parsed.current),
        details=(details(0), details(1)),
        history=past,
        settings=_as_told(settings),
        progress=stages.tiles("looking for the rows that differ most"),
    )


def _as_told(settings: Mapping[str, Any]) -> dict[str, Any]:
    told = {name.replace("_", " "): value for name, value in settings.items() if value not in (None, "", [0, 0])}
    told["rows read"] = "{:,} and {:,}".format(*settings["rows_read"])
    told["versions"] = ", ".join(f"{name} {number}" for name, number in settings["versions"].items())
    return told


def _as_json(result: MMDTestResult, settings: Mapping[str, Any], seconds: float) -> str:
    return json.dumps(_strict({**result.as_dict(), "settings": settings, "seconds": round(seconds, 3)}), indent=2)


def _strict(value: Any) -> Any:
    """JSON has no NaN, whatever Python writes."""
    if isinstance(value, Mapping):
        return {str(name): _strict(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _verdict(result: MMDTestResult, seconds: float) -> str:
    return f"{result} · {result.reference_rows:,} rows against {result.current_rows:,} · {seconds:.1f} s"

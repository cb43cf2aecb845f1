"""Lines about the progress of models."""

from __future__ import annotations

from collections.abc import Iterable

from luminosity.events import InferenceView, Snapshot
from luminosity.runs.views import words

__all__ = ["line", "lines", "of", "parts", "sentence"]


_SEPARATOR = " · "
_MOST_LABEL = 40  # characters


def of(snapshot: Snapshot) -> list[InferenceView]:
    """Return all steps that run models, in the pipeline's order."""
    return [view for stage in snapshot.stages for view in stage.inference]


def parts(view: InferenceView) -> list[str]:
    """Return what is known about a model, the most important first.

    >>> view = InferenceView("Embed/Infer", inferences=410, batches=10, useful_cost=940, padded_cost=1000,
    ...     budget_cost=1080, queue_wait_seconds=4.92, prepare_seconds=0.03, collate_seconds=0.004,
    ...     transfer_seconds=0.01, compute_seconds=0.96, return_seconds=0.02, device_busy_seconds=0.96,
    ...     worker_seconds=1.1, out_of_memory=2, runs_on="device")
    >>> for part in parts(view):
    ...     print(part)
    padding 6%
    batches 41 rows, 92% full
    device 87% busy
    out of memory 2 times
    waits 12 ms
    batch 102 ms (prepare 3, collate 0.4, transfer 1, compute 96, return 2)
    >>> for part in parts(InferenceView("Ask/Infer", inferences=90, batches=90, runs_on="server", requests=120,
    ...     retries=30, throttled=28, retry_wait_seconds=9.0, device_busy_seconds=0.46, worker_seconds=0.5)):
    ...     print(part)
    30 of 120 requests sent again (28 times the server asked to send less), 0.3 s wait each
    batches 1 row
    requests in flight 92% of the time
    """
    said: list[str] = []
    if view.retries:
        said.append(_retries(view))
    if view.cut_texts:
        said.append(f"{words.number(view.cut_texts)} of {words.number(view.inferences)} texts cut at max_new_tokens")
    if view.padded_cost:
        said.append(f"padding {words.percent(max(0.0, 1 - view.useful_cost / view.padded_cost))}")
    if view.batches:
        said.append(_batches(view))
    if view.worker_seconds and view.device_busy_seconds:
        said.append(_busy(view))
    if view.out_of_memory:
        said.append(f"out of memory {'once' if view.out_of_memory == 1 else f'{view.out_of_memory} times'}")
    if view.inferences and view.queue_wait_seconds:
        said.append(f"waits {words.milliseconds(view.queue_wait_seconds / view.inferences)} ms")
    if took := _took(view):
        said.append(took)
    return said


def line(view: InferenceView, width: int) -> str:
    """Return as many parts as fit into ``width`` columns.

    >>> line(InferenceView("Embed/Infer", 410, 10, 940, 1000, 1080), 60)
    'model Embed/Infer: padding 6% · batches 41 rows, 92% full'
    >>> line(InferenceView("Embed/Infer", 410, 10, 940, 1000, 1080), 40)
    'model Embed/Infer: padding 6%'
    """
    text = f"model {words.shortened(view.step, min(_MOST_LABEL, width // 3))}: "
    for place, part in enumerate(parts(view)):
        more = (_SEPARATOR if place else "") + part
        if place and len(text) + len(more) > width:
            break
        text += more
    return text


def sentence(view: InferenceView) -> str:
    """Return all parts in one line."""
    return f"{view.step}: {_SEPARATOR.join(parts(view))}"


def lines(views: Iterable[InferenceView], width: int, most: int) -> list[str]:
    """Return a line for each model, at most ``most``; the last one counts the rest."""
    texts = [line(view, width) for view in views]
    return texts if len(texts) <= most else [*texts[: most - 1], f"and {len(texts) - most + 1} more models"]


def _busy(view: InferenceView) -> str:
    share = words.percent(min(1.0, view.device_busy_seconds / view.worker_seconds))
    if view.runs_on == "server":
        return f"requests in flight {share} of the time"
    return f"device {share} busy" if view.runs_on == "device" else f"computes {share} of the time"


def _retries(view: InferenceView) -> str:
    throttled = words.number(view.throttled) + (" time" if view.throttled == 1 else " times")
    why = f" ({throttled} the server asked to send less)" if view.throttled else ""
    wait = f"{words.duration(view.retry_wait_seconds / view.retries)} wait each"
    return f"{words.number(view.retries)} of {words.number(view.requests)} requests sent again{why}, {wait}"


def _batches(view: InferenceView) -> str:
    rows = view.inferences / view.batches
    many = words.number(round(rows)) if rows >= 10 else f"{rows:.2g}"
    size = f"batches {many} {'row' if many == '1' else 'rows'}" if rows else "batches"
    if not view.budget_cost:
        return size
    return f"{size}, {words.percent(min(1.0, view.padded_cost / view.budget_cost))} full"


def _took(view: InferenceView) -> str:
    phases = {
        "prepare": view.prepare_seconds,
        "collate": view.collate_seconds,
        "transfer": view.transfer_seconds,
        "compute": view.compute_seconds,
        "return": view.return_seconds,
    }
    each = {name: seconds / view.batches for name, seconds in phases.items() if seconds and view.batches}
    if not each:
        return ""
    inside = ", ".join(f"{name} {words.milliseconds(seconds)}" for name, seconds in each.items())
    return f"batch {words.milliseconds(sum(each.values()))} ms ({inside})"

"""Lines about steps that run models, and about steps that read or write Kafka."""

from __future__ import annotations

from collections.abc import Sequence

from luminosity._shared.text import format_bytes
from luminosity.events import InferenceView, KafkaView, Snapshot
from luminosity.runs.views import words

__all__ = ["kafka_of", "line", "lines", "models_of", "parts", "sentence"]


_SEPARATOR = " · "
_MOST_LABEL = 40  # characters
_MOST_LAGS = 3  # partitions named


def models_of(snapshot: Snapshot) -> list[InferenceView]:
    """Return all steps that run models, in the pipeline's order."""
    return [view for stage in snapshot.stages for view in stage.inference]


def kafka_of(snapshot: Snapshot) -> list[KafkaView]:
    """Return all steps that read or write Kafka, in the pipeline's order."""
    return [view for stage in snapshot.stages for view in stage.kafka]


def parts(view: InferenceView | KafkaView) -> list[str]:
    """Return what is known about a step, the most important first.

    >>> view = InferenceView("Embed/Infer", inferences=410, batches=10, useful_cost=940, padded_cost=1000,
    ...     budget_cost=1080, queue_wait_seconds=4.92, prepare_seconds=0.03, collate_seconds=0.004,
    ...     transfer_seconds=0.01, compute_seconds=0.96, return_seconds=0.02, device_busy_seconds=0.96,
    ...     worker_seconds=1.1, out_of_memory=2, runs_on="device", computed_by="padded in attention only")
    >>> for part in parts(view):
    ...     print(part)
    padding 6%
    batches 41 rows, 92% full
    device 87% busy
    out of memory 2 times
    waits 12 ms
    batch 102 ms (prepare 3, collate 0.4, transfer 1, compute 96, return 2)
    padded in attention only
    >>> for part in parts(InferenceView("Ask/Infer", inferences=90, batches=90, runs_on="server", requests=120,
    ...     retries=30, throttled=28, retry_wait_seconds=9.0, device_busy_seconds=0.46, worker_seconds=0.5)):
    ...     print(part)
    30 of 120 requests sent again (28 times the server asked to send less), 0.3 s wait each
    batches 1 row
    requests in flight 92% of the time
    >>> for part in parts(InferenceView("Ask/Infer", inferences=90, batches=90, prompt_tokens=4500, new_tokens=900,
    ...     device_busy_seconds=3.0, cost=0.0123, cached_answers=40, repeated_prompts=5)):
    ...     print(part)
    4,500 tokens in, 900 out (300/s)
    first token unknown
    cost 0.0123, 0.000137 a row
    40 answers from the cache
    5 repeated prompts
    batches 1 row
    >>> from luminosity.events import PartitionLag
    >>> lags = (PartitionLag("reviews[3]", 800), PartitionLag("reviews[1]", 404), PartitionLag("reviews[0]", 0))
    >>> for part in parts(KafkaView("Read", "read", 12_345, 9_876_543, 101.5, 81_200, 0, 7, 12, 1450, 1204, 4, lags)):
    ...     print(part)
    lag 1,204
    7 lost
    age p50 12 ms, p99 1.4 s
    102/s, 81.2 kB/s
    most in reviews[3] 800, reviews[1] 404
    no dead letters
    >>> parts(KafkaView("Publish", "write", 2, 9, dead_letters=1))
    ['1 dead letter', '0/s']
    """
    return _of_kafka(view) if isinstance(view, KafkaView) else _of_model(view)


def line(view: InferenceView | KafkaView, width: int) -> str:
    """Return as many parts as fit into ``width`` columns.

    >>> line(InferenceView("Embed/Infer", 410, 10, 940, 1000, 1080), 60)
    'model Embed/Infer: padding 6% · batches 41 rows, 92% full'
    >>> line(InferenceView("Embed/Infer", 410, 10, 940, 1000, 1080), 40)
    'model Embed/Infer: padding 6%'
    """
    is_kafka = isinstance(view, KafkaView)
    text = f"{'kafka' if is_kafka else 'model'} {words.shortened(view.step, min(_MOST_LABEL, width // 3))}: "
    for place, part in enumerate(parts(view)):
        more = (_SEPARATOR if place else "") + part
        if not place or len(text) + len(more) <= width:
            text += more
        elif not is_kafka:  # the parts about a model explain each other
            break
    return text


def lines(views: Sequence[InferenceView | KafkaView], width: int, most: int) -> list[str]:
    """Return a line for each step, at most ``most``; the last one counts the rest.

    >>> publish = KafkaView("Publish", "write", 600, 9000, 10.2, 1500.0, p50_ms=90.0, p99_ms=200.0)
    >>> lines([publish], 64, 3)
    ['kafka Publish: latency p50 90 ms, p99 200 ms · 10/s, 1.5 kB/s']
    >>> lines([publish, publish, publish], 50, 2)
    ['kafka Publish: latency p50 90 ms, p99 200 ms', 'and 2 more steps with Kafka']
    """
    if len(views) <= most:
        return [line(view, width) for view in views]
    rest = "steps with Kafka" if isinstance(views[0], KafkaView) else "models"
    return [*(line(view, width) for view in views[: most - 1]), f"and {len(views) - most + 1} more {rest}"]


def sentence(view: InferenceView | KafkaView) -> str:
    """Return everything in one line, with the sums of a step with Kafka.

    >>> sentence(KafkaView("Publish", "write", 600, 9000, 10.2, 153.0, p50_ms=90.0, p99_ms=200.0))
    'Publish: 600 records, 9 kB · 10/s, 153 B/s · latency p50 90 ms, p99 200 ms · no dead letters'
    """
    return f"{view.step}: {_SEPARATOR.join(_all_of_kafka(view) if isinstance(view, KafkaView) else parts(view))}"


def _of_model(view: InferenceView) -> list[str]:
    said: list[str] = []
    if view.retries:
        said.append(_retries(view))
    if view.hedges:
        said.append(f"{words.number(view.hedges)} of {words.number(view.requests)} requests hedged")
    if view.cut_texts:
        said.append(f"{words.number(view.cut_texts)} of {words.number(view.inferences)} texts cut at max_new_tokens")
    said += _tokens(view)
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
    if view.computed_by:
        said.append(view.computed_by)
    return said


def _tokens(view: InferenceView) -> list[str]:
    said: list[str] = []
    if view.prompt_tokens or view.new_tokens:
        speed = view.new_tokens / view.device_busy_seconds if view.device_busy_seconds else 0.0
        rate = f" ({words.rate(speed)})" if speed else ""
        said.append(f"{words.number(view.prompt_tokens)} tokens in, {words.number(view.new_tokens)} out{rate}")
    if view.new_tokens:
        said.append(_first_token(view))
    if view.cost:
        each = f", {view.cost / view.inferences:.3g} a row" if view.inferences else ""
        said.append(f"cost {view.cost:.6g}{each}")
    if view.cached_answers:
        said.append(_many(view.cached_answers, "answer", " from the cache"))
    if view.repeated_prompts:
        said.append(_many(view.repeated_prompts, "repeated prompt"))
    if view.limit_wait_seconds and view.requests:
        said.append(f"limits {words.duration(view.limit_wait_seconds / view.requests)} wait each")
    return said


def _first_token(view: InferenceView) -> str:
    if view.first_token_p50_ms is None:
        return "first token unknown"
    p50, p99 = (words.milliseconds((each or 0.0) / 1000) for each in (view.first_token_p50_ms, view.first_token_p99_ms))
    return f"first token p50 {p50} ms, p99 {p99} ms"


def _many(count: int, what: str, more: str = "") -> str:
    return f"{words.number(count)} {what}{'' if count == 1 else 's'}{more}"


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


def _of_kafka(view: KafkaView) -> list[str]:
    said = [f"lag {words.number(view.lag)}"] if view.partitions else []
    if view.dead_letters:
        said.append(_letters(view))
    if view.lost:
        said.append(f"{words.number(view.lost)} lost")
    said += _times(view)
    said.append(_rate(view))
    if view.lag and view.partitions > 1:
        said.append(f"most in {_lags(view)}")
    return said if view.dead_letters else [*said, _letters(view)]


def _all_of_kafka(view: KafkaView) -> list[str]:
    said = [f"{words.number(view.records)} records, {format_bytes(view.bytes)}", _rate(view), *_times(view)]
    if view.partitions:
        where = "1 partition" if view.partitions == 1 else f"{words.number(view.partitions)} partitions"
        said.append(f"lag {words.number(view.lag)} in {where}")
    if view.lag and view.partitions > 1:
        said.append(f"most in {_lags(view)}")
    if view.lost:
        said.append(f"{words.number(view.lost)} lost")
    return [*said, _letters(view)]


def _rate(view: KafkaView) -> str:
    if not view.records_per_second:
        return "0/s"
    return f"{words.rate(view.records_per_second)}, {format_bytes(round(view.bytes_per_second))}/s"


def _times(view: KafkaView) -> list[str]:
    if view.p50_ms is None or view.p99_ms is None:
        return []
    name = "age" if view.kind == "read" else "latency"
    return [f"{name} p50 {_time(view.p50_ms)}, p99 {_time(view.p99_ms)}"]


def _time(milliseconds: float) -> str:
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else words.duration(milliseconds / 1000)


def _lags(view: KafkaView) -> str:
    return ", ".join(
        f"{each.partition} {words.number(each.records)}" for each in view.lags[:_MOST_LAGS] if each.records
    )


def _letters(view: KafkaView) -> str:
    if view.dead_letters == 1:
        return "1 dead letter"
    return f"{words.number(view.dead_letters)} dead letters" if view.dead_letters else "no dead letters"

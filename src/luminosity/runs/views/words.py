"""Numbers, labels and states as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta, timezone
from itertools import takewhile

from luminosity._shared.text import duration
from luminosity.events import (
    CheckpointView,
    ModelVersion,
    NodeInfo,
    NodeView,
    PoolView,
    RunStarted,
    StageView,
    StallView,
    StreamView,
)

__all__ = [
    "amount",
    "behind",
    "copy",
    "doing",
    "duration",
    "how_to_stop",
    "milliseconds",
    "model_version",
    "node",
    "nodes",
    "number",
    "percent",
    "rate",
    "shortened",
    "stall",
    "status",
    "stream_parts",
    "titles",
    "waiting",
]


_SEPARATOR = " + "
_DAY_S = 86_400
_YEAR_S = 365 * _DAY_S
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_LEAST_BRACKETS = 12  # columns in which a label has room for brackets
_DIGEST_CHARACTERS = 23  # enough to tell versions apart; `lum show --json` has all
_NODE_CHARACTERS = 8  # of a node's id: enough to tell nodes of one machine apart
_AHEAD_S = 1.0  # clocks differ by less


def milliseconds(seconds: float) -> str:
    """Return a duration in milliseconds, without the unit.

    >>> milliseconds(1.234), milliseconds(0.0123), milliseconds(0.0034), milliseconds(0.000042)
    ('1,234', '12', '3.4', '0.042')
    """
    count = 1000 * seconds
    return f"{count:,.0f}" if count >= 9.95 else f"{count:.2g}"


def number(count: int) -> str:
    """Return a count with separators, shortened from ten million.

    >>> number(12_345), number(123_456_789)
    ('12,345', '123.5M')
    """
    if count < 10_000_000:
        return f"{count:,}"
    return f"{count / 1e6:,.1f}M" if count < 10**9 else f"{count / 1e9:,.2f}G"


def amount(size: float) -> str:
    """Return an amount whose unit is unknown, in at most six characters.

    >>> amount(0.0), amount(1204.0), amount(1_234_567.0), amount(2.5e12)
    ('0', '1,204', '1.2M', '2.5T')
    """
    for least, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if size >= least:
            return f"{size / least:,.1f}{unit}"
    return f"{size:,.0f}"


def behind(stream: StreamView) -> str:
    """Return how far the watermark of a stream is behind now.

    >>> behind(StreamView()), behind(StreamView(0.0, 2.14)), behind(StreamView(0.0, 0.05))
    ('no data yet', '2.1 s behind', '50 ms behind')
    >>> behind(StreamView(0.0, -7200.0))
    '2 h 0 min ahead'
    >>> behind(StreamView(100.0, 1.8e9)), behind(StreamView(has_ended=True))
    ('at 1970-01-01', 'done')
    """
    if stream.has_ended:
        return "done"
    if stream.watermark is None or stream.behind_seconds is None:
        return "no data yet"
    if abs(stream.behind_seconds) > _YEAR_S and abs(stream.watermark) < 200 * _YEAR_S:
        return f"at {_EPOCH + timedelta(seconds=stream.watermark):%Y-%m-%d}"  # its times are not those of today
    if stream.behind_seconds < -_AHEAD_S:
        return f"{duration(-stream.behind_seconds)} ahead"
    if stream.behind_seconds < 1:
        return f"{max(0, round(1000 * stream.behind_seconds))} ms behind"
    return f"{duration(stream.behind_seconds)} behind"


def copy(view: CheckpointView | None) -> str:
    """Return how far the copy of a checkpoint is behind; empty if there is none.

    >>> copy(CheckpointView()), copy(CheckpointView(copy_lag_seconds=0.4)), copy(CheckpointView(copy_lag_seconds=90))
    ('', '400 ms behind', '1 min 30 s behind')
    >>> copy(CheckpointView(copy_lag_seconds=0.0))
    'complete'
    """
    lag = view.copy_lag_seconds if view is not None else None
    if lag is None:
        return ""
    if not lag:
        return "complete"
    return f"{round(1000 * lag)} ms behind" if lag < 1 else f"{duration(lag)} behind"


def stream_parts(stage: StageView, *, seconds: float | None = None) -> list[str]:
    """Return what is known of a stage of a stream; with ``seconds``, the length of the run, its average rate.

    >>> stream = StreamView(watermark=0.0, behind_seconds=2.1, backlog=1204.0, dropped_late=12)
    >>> stream_parts(StageView("s", "busy", elements=12_345, rate=1004.2, stream=stream))
    ['12,345 elements', '1,004/s', '2.1 s behind', 'backlog 1,204', '12 late']
    """
    stream = stage.stream or StreamView()
    per_second = stage.rate if seconds is None else stage.elements / max(seconds, 1e-9)
    parts = [f"{number(stage.elements)} elements", rate(per_second), behind(stream)]
    parts.append(f"backlog {amount(stream.backlog)}" if stream.backlog else "")
    parts.append(f"{number(stream.dropped_late)} late" if stream.dropped_late else "")
    return [part for part in parts if part]


def model_version(model: ModelVersion) -> str:
    """Return the version of a registered model, with its digest, in one line.

    >>> model_version(ModelVersion("Infer", "models:/mood@champion", "7", "s3://b/mood", "sha256:" + "0f" * 32))
    'models:/mood@champion: version 7 · sha256:0f0f0f0f0f0f0f0f… · s3://b/mood'
    """
    digest = f"{model.digest[:_DIGEST_CHARACTERS]}…" if model.digest else "digest not known"
    return f"{model.name}: version {model.version} · {digest} · {model.path}"


def how_to_stop(run: RunStarted) -> str:
    """Return how a run with a stream ends; an empty string if the run has an end.

    >>> from luminosity.events import StageInfo
    >>> how_to_stop(RunStarted("r", 0.0, "watch.py", 0.0, (StageInfo("s", "Read", "cpu", is_stream=True),), (), 0))
    'watch.py reads a stream: it runs until its sources end or you press Ctrl-C'
    """
    if not any(stage.is_stream for stage in run.stages):
        return ""
    return f"{run.title} reads a stream: it runs until its sources end or you press Ctrl-C"


def titles(runs: Sequence[RunStarted]) -> list[str]:
    """Return a title for each run: those of different pipelines differ, if need be by the ends of their folders.

    >>> called = [("p.py", "/teams/a/jobs"), ("p.py", "/teams/b/jobs"), ("q.py", "/teams/b")]
    >>> titles([RunStarted("r", 0.0, name, 0.0, (), (), 0, folder=folder) for name, folder in called])
    ['a/jobs/p.py', 'b/jobs/p.py', 'q.py']
    """
    others: dict[str, set[str]] = {}
    for run in runs:
        name, folder = run.pipeline
        others.setdefault(name, set()).add(folder)
    return [_told_apart(*run.pipeline, others[run.pipeline[0]] - {run.pipeline[1]}) for run in runs]


def _told_apart(name: str, folder: str, others: Iterable[str]) -> str:
    parts, apart = folder.split("/"), 0
    for other in others:
        pairs = zip(reversed(parts), reversed(other.split("/")), strict=False)
        apart = max(apart, 1 + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return "/".join([*parts[-apart:], name]) if apart and folder else name


def rate(per_second: float) -> str:
    """Return a rate, or an empty string for 0.

    >>> rate(0), rate(0.04), rate(6120.4)
    ('', '0.04/s', '6,120/s')
    """
    if per_second <= 0:
        return ""
    return f"{number(round(per_second))}/s" if per_second >= 10 else f"{per_second:.2g}/s"


def percent(fraction: float) -> str:
    """Return a fraction as whole percent, rounded down.

    >>> percent(0.996), percent(0.87), percent(1.0)
    ('99%', '87%', '100%')
    """
    return f"{int(100 * fraction + 1e-9)}%"  # only 1.0 is 100%; but 100 * 0.87 is slightly less than 87


def shortened(label: str, width: int) -> str:
    """Return a label in at most ``width`` characters, cut in the middle.

    >>> shortened("Read + Parse + Copy", 15), shortened("CombineGlobally (UnKey)", 16), shortened("Embed long texts", 9)
    ('Read + … + Copy', 'Combine… (UnKey)', 'Embed …ts')
    >>> shortened("WriteTable (GlobalNothing)", 21), shortened("WriteDeletions (GlobalNothing)", 21)
    ('WriteTab… (GlobalNo…)', 'WriteDel… (GlobalNo…)')
    """
    if len(label) <= width:
        return label
    whole, mark, inner = label.partition(" (")
    if mark and width >= _LEAST_BRACKETS and label.endswith(")"):  # the brackets tell stages of the same name apart
        room = width - len(" ()")
        inside = max(min(len(inner) - 1, room // 2), room - len(whole))
        return f"{_cut(whole, room - inside)} ({_cut(inner[:-1], inside)})"
    steps = label.split(_SEPARATOR)
    around = f"{steps[0]} + … + {steps[-1]}"
    if len(steps) > 2 and len(around) <= width:
        return around
    tail = (width - 1) // 3
    return f"{label[: max(0, width - tail - 1)]}…{label[len(label) - tail :]}"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def status(stage: StageView, width: int = 80) -> str:
    """Return what a stage does or waits for.

    >>> status(StageView("s1", "held back", ("Embed",)))
    'held back by Embed'
    >>> status(StageView("s1", "starved", ("Embed",), stream=StreamView()))
    'idle'
    >>> status(StageView("s1", "busy", stalls=(StallView("Embed", 42.0),)))
    'stalled for 42 s'
    """
    if stage.stalls:
        return _stalled(stage.stalls[0])
    if stage.status == "starved" and stage.stream is not None and not stage.queued:
        return "idle"  # the usual state of a stage that keeps up with its stream
    if stage.status == "busy":
        return "busy"
    if stage.status == "needs worker":
        return _with("needs worker:", stage.by, width)
    if stage.status == "waiting":
        return _with("waits for", stage.by, width) if stage.by else "waits for its time"
    return _with(f"{stage.status} by", stage.by, width) if stage.by else stage.status


def doing(stage: StageView) -> str:
    """Return what a bundle of a stage does that takes long, without the time; empty if none takes long.

    >>> doing(StageView("s1", "busy", stalls=(StallView("Embed", 120.0, "loading", False),)))
    'loads a model'
    """
    return "stalled" if stage.stalled_seconds else _doing(stage.stalls[0]) if stage.stalls else ""


def _doing(stall: StallView) -> str:
    return "stalled" if stall.is_stalled else "loads a model" if stall.doing == "loading" else "sets up"


def _stalled(stall: StallView) -> str:
    return f"{_doing(stall)} for {duration(stall.seconds)}"


def stall(view: StallView) -> str:
    """Return where a bundle takes long: its step, its worker and the line of the user's code.

    >>> stall(StallView("Embed", 42.0, worker="w3", pid=1234, place="job.py:12"))
    'stalled for 42 s: Embed in worker w3 (pid 1234) at job.py:12'
    >>> stall(StallView("Embed", 42.0, "nothing", worker="w3", pid=1234, state="stopped"))
    'stalled for 42 s: Embed in worker w3 (pid 1234), which is stopped'
    >>> stall(StallView("Embed", 120.0, "loading", False, worker="w3", waits_for="the model bert"))
    'loads a model for 2 min 0 s: Embed in worker w3, the model bert'
    """
    where = f"worker {view.worker}"
    if view.pid:
        where += f" (pid {view.pid})"
    if view.node:
        where += f" on node {view.node[:_NODE_CHARACTERS]}"
    waits = f" waits for {view.waits_for}" if view.waits_for and view.is_stalled else ""
    model = f", {view.waits_for}" if view.waits_for and not view.is_stalled else ""
    state = {"": "", "stopped": ", which is stopped"}.get(view.state, ", which does not answer")
    place = f" at {view.place}" if view.place else ""
    return f"{_stalled(view)}: {view.step}{waits} in {where}{model}{state}{place}"


def _with(beginning: str, names: Sequence[str], width: int) -> str:
    ending = f" +{len(names) - 1}" if len(names) > 1 else ""
    return f"{beginning} {shortened(names[0], max(1, width - len(beginning) - len(ending) - 1))}{ending}"


def waiting(pool: PoolView) -> str:
    """Return how many workers of a pool have no place on the cluster yet, and what each of them asks for.

    >>> waiting(PoolView("device", waiting=2, waits_for="1 GPU"))
    '2 workers wait for 1 GPU each'
    """
    if pool.waiting == 1:
        return f"1 worker waits for {pool.waits_for}"
    return f"{pool.waiting:,} workers wait for {pool.waits_for} each"


def node(view: NodeView) -> str:
    """Return the name of a node: its address, if that is known, and the beginning of its id.

    >>> node(NodeView("0123456789abcdef", "10.0.0.7"))
    '10.0.0.7 (01234567)'
    """
    short = view.id[:_NODE_CHARACTERS]
    return f"{view.address} ({short})" if view.address else short


def nodes(infos: Sequence[NodeInfo]) -> str:
    """Return what a cluster had when a run started on it.

    >>> nodes([NodeInfo("a", cores=4.0), NodeInfo("b", cores=4.0, accelerators=2.0)])
    '2 nodes with 8 cores and 2 accelerators'
    """
    cores, accelerators = sum(each.cores for each in infos), sum(each.accelerators for each in infos)
    text = f"{len(infos):,} node{'' if len(infos) == 1 else 's'} with {cores:,g} core{'' if cores == 1 else 's'}"
    return f"{text} and {accelerators:,g} accelerator{'' if accelerators == 1 else 's'}" if accelerators else text

"""Copies messages from a fake Pub/Sub to another topic of it, with faults, and shows the rate and whether it is exact.

The subscription delivers every 20th message twice, keeps ordering keys, and loses its connections; with ``--kills``,
workers are killed, too. The fake shares the machine with the run. The last lines say how many messages a second came
out, how many are missing, and whether each key was in order.

    python benchmarks/pubsub.py
    python benchmarks/pubsub.py --messages 10000    # a try

With --check, the exit code is 1 if a message is missing or out of order. Needs google-cloud-pubsub, from .venv/pubsub.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
PACKAGES = Path(sys.prefix) / "pubsub"  # where `make setup` puts Google's client
sys.path[:0] = [str(ROOT), str(PACKAGES)]

from luminosity.testing import FakePubSub  # noqa: E402

KEYS = 100
LOOK_S = 0.1
LONGEST_S = 1_800.0


def copy(folder: Path, subscription: str, topic: str, more: list[str]) -> subprocess.Popen[bytes]:
    """Start the run in a process of its own."""
    script = ROOT / "tests" / "io" / "pubsub" / "copying.py"
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), str(PACKAGES)])
    return subprocess.Popen(
        [sys.executable, str(script), subscription, topic, str(folder / "at_work"), *more],
        env={**os.environ, "PYTHONPATH": path},
    )


def kill_a_worker(run: int, at_work: Path) -> bool:
    """Kill a worker that has had a message. Returns whether there was one."""
    known = set(at_work.read_text().split()) if at_work.exists() else set[str]()
    for process in psutil.Process(run).children(recursive=True):
        if str(process.pid) in known:
            process.kill()
            return True
    return False


def in_order(pubsub: FakePubSub, topic: str) -> bool:
    """Return whether the messages of each key first came in their order."""
    keys: dict[str, dict[int, None]] = {}
    for message in pubsub.messages(topic):
        if message.ordering_key:
            keys.setdefault(message.ordering_key, {})[int(message.data)] = None
    return all([*numbers] == sorted(numbers) for numbers in keys.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--losses", type=int, default=3, help="how often all connections are lost")
    parser.add_argument("--kills", type=int, default=3, help="how many workers are killed")
    parser.add_argument("--checkpoint", action="store_true", help="run with --checkpoint_dir")
    parser.add_argument("--check", action="store_true", help="exit with 1 if it is not exact")
    given = parser.parse_args()
    with FakePubSub() as pubsub, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, out = pubsub.create_topic("source"), pubsub.create_topic("out")
        subscription = pubsub.create_subscription("all", source, ack_deadline_s=5, is_ordered=True)
        pubsub.repeat(subscription, every=20)
        for number in range(given.messages):
            key = f"key {number % KEYS}" if number % 2 else ""
            pubsub.publish(source, b"%d" % number, attributes={"id": str(number)}, ordering_key=key)
        more = [f"--checkpoint_dir={folder / 'checkpoint'}"] if given.checkpoint else []
        run = copy(folder, subscription, out, more)
        faults = ["lose"] * given.losses + ["kill"] * given.kills
        steps = len(faults) + 1
        began = first = 0.0
        started = time.monotonic()
        while time.monotonic() - started < LONGEST_S and run.poll() is None:
            ids = {message.attributes["id"] for message in pubsub.messages(out)}
            if ids and not began:
                began, first = time.monotonic(), len(ids)
            if len(ids) == given.messages and not pubsub.unacknowledged(subscription):
                break
            done = steps - len(faults)
            if faults and len(ids) >= given.messages * done / steps:
                fault = faults[0]
                if fault == "lose":
                    pubsub.lose_connections(for_s=0.5)
                if fault == "lose" or kill_a_worker(run.pid, folder / "at_work"):
                    faults.pop(0)
            time.sleep(LOOK_S)
        seconds = time.monotonic() - began
        run.terminate()
        run.wait(60)
        messages = pubsub.messages(out)
        ids = {message.attributes["id"] for message in messages}
        delivered, again = pubsub.deliveries(subscription)
        missing, is_ordered = given.messages - len(ids), in_order(pubsub, out)
        print(f"{given.messages} messages, {delivered} deliveries, {again} of them again")
        print(f"{(len(ids) - first) / seconds:.0f} messages a second, from the first one to the last acknowledgement")
        print(f"missing: {missing}; published again by bundles that were run again: {len(messages) - len(ids)}")
        print(f"not acknowledged: {pubsub.unacknowledged(subscription)}; keys in order: {is_ordered}")
    return 1 if given.check and (missing or not is_ordered) else 0


if __name__ == "__main__":
    sys.exit(main())

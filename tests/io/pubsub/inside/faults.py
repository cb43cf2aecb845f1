"""Messages that come twice, lost connections, killed workers and killed runs: each message once, each key in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from luminosity.testing import FakePubSub
from tests.io.pubsub import copying
from tests.io.pubsub.pipelines import LONG_S, script
from tests.processes import kill_workers_of, wait_for

_KEYS = 20


def _publish(pubsub: FakePubSub, topic: str, first: int, count: int) -> None:
    """Publish messages with ids; some with an ordering key, in which their numbers rise."""
    for number in range(first, first + count):
        key = f"key {number % _KEYS}" if number % 2 else ""
        attributes = {"id": f"id {number}"}
        pubsub.publish(topic, b"%d" % number, attributes=attributes, ordering_key=key)
        if number % 10 == 0:  # the publisher has retried
            pubsub.publish(topic, b"%d" % number, attributes=attributes, ordering_key=key)


def _ids(pubsub: FakePubSub, topic: str) -> set[str]:
    return {message.attributes["id"] for message in pubsub.messages(topic)}


def _check_order(pubsub: FakePubSub, topic: str) -> None:
    """Look at the first time that each message was published: a bundle that was run again publishes again."""
    keys: dict[str, dict[int, None]] = {}
    for message in pubsub.messages(topic):
        if message.ordering_key:
            keys.setdefault(message.ordering_key, {})[int(message.data)] = None
    assert len(keys) == _KEYS / 2
    for numbers in keys.values():
        assert [*numbers] == sorted(numbers)


def test_lost_connections_and_repeated_messages_change_nothing(tmp_path: Path) -> None:
    count = 6_000
    with FakePubSub() as pubsub:
        given, out = pubsub.create_topic("given"), pubsub.create_topic("out")
        subscription = pubsub.create_subscription("all", given, ack_deadline_s=2, is_ordered=True)
        pubsub.repeat(subscription, every=50)
        with script(Path(copying.__file__), subscription, out, str(tmp_path / "at_work")):
            for first in range(0, count, count // 3):
                _publish(pubsub, given, first, count // 3)
                assert wait_for(lambda first=first: len(_ids(pubsub, out)) > first + 10, LONG_S)
                pubsub.lose_connections(for_s=0.5)
            assert wait_for(lambda: len(_ids(pubsub, out)) == count, LONG_S)
            assert wait_for(lambda: not pubsub.unacknowledged(subscription), LONG_S)
        assert len(pubsub.messages(out)) < 1.2 * count  # a call that was cut off is made again
        _check_order(pubsub, out)


def test_killed_workers_lose_nothing(tmp_path: Path) -> None:
    count = 4_000
    at_work = tmp_path / "at_work"
    with FakePubSub() as pubsub:
        given, out = pubsub.create_topic("given"), pubsub.create_topic("out")
        subscription = pubsub.create_subscription("all", given, ack_deadline_s=2, is_ordered=True)
        pubsub.repeat(subscription, every=50)
        with script(Path(copying.__file__), subscription, out, str(at_work)) as run:
            with kill_workers_of(run.pid, 0.5, at_work) as kills:
                for first in range(0, count, count // 4):
                    _publish(pubsub, given, first, count // 4)
                    assert wait_for(lambda first=first: len(_ids(pubsub, out)) > first + 10, LONG_S)
                assert wait_for(lambda: kills.count >= 2, LONG_S)
            assert wait_for(lambda: len(_ids(pubsub, out)) == count, LONG_S)
            assert wait_for(lambda: not pubsub.unacknowledged(subscription), LONG_S)
        _check_order(pubsub, out)


def test_a_killed_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    count = 2_000
    with FakePubSub() as pubsub:
        given, out = pubsub.create_topic("given"), pubsub.create_topic("out")
        subscription = pubsub.create_subscription("all", given, ack_deadline_s=2, is_ordered=True)
        command = [sys.executable, copying.__file__, subscription, out, str(tmp_path / "at_work")]
        command.append(f"--checkpoint_dir={tmp_path / 'checkpoint'}")
        for start in range(3):
            _publish(pubsub, given, start * count, count)
            process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            is_last = start == 2
            wanted = 3 * count if is_last else start * count + count // 3
            reached = wait_for(lambda wanted=wanted: len(_ids(pubsub, out)) >= wanted, LONG_S)
            if is_last and reached:
                assert wait_for(lambda: not pubsub.unacknowledged(subscription), LONG_S)
            os.kill(process.pid, signal.SIGKILL)
            _, said = process.communicate()
            assert reached, said
        ids = Counter(message.attributes["id"] for message in pubsub.messages(out))
        assert len(ids) == 3 * count
        _check_order(pubsub, out)


def test_a_reader_notices_that_its_subscription_is_deleted(tmp_path: Path) -> None:
    with FakePubSub() as pubsub:
        given, out = pubsub.create_topic("given"), pubsub.create_topic("out")
        subscription = pubsub.create_subscription("all", given, ack_deadline_s=2)
        pubsub.publish(given, b"1", attributes={"id": "1"})
        command = [sys.executable, copying.__file__, subscription, out, str(tmp_path / "at_work")]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert wait_for(lambda: pubsub.messages(out), LONG_S)
        pubsub.delete_subscription(subscription)
        began = time.monotonic()
        _, said = process.communicate(timeout=LONG_S)
        assert process.returncode != 0
        assert f"{subscription} can't be read: NOT_FOUND" in said
        assert time.monotonic() - began < LONG_S

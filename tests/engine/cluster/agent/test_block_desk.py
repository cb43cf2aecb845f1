"""Workers hand blocks over to the agent of their node and get them, over a real socket and without a cluster."""

from __future__ import annotations

import contextlib
import socket
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from luminosity.engine.cluster.agent import block_desk
from luminosity.engine.cluster.agent.block_desk import BlockDesk, block_value
from luminosity.engine.cluster.worker.block_socket import BlockClient
from luminosity.errors import BlockLost
from tests.processes import wait_for

_PATIENCE_S = 60
_ENDS = array("q", [2, 5, 6]).tobytes()
_BLOCK = block_value(b"aabbbc", _ENDS)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[BlockDesk]:
    made = BlockDesk(str(tmp_path / "blocks"), _fetch)
    made.expect("w1")
    yield made
    made.close()


def _fetch(copies: Any) -> Any:
    if copies == "lost":
        raise BlockLost("both copies are gone")
    return copies


@pytest.fixture
def worker(desk: BlockDesk) -> BlockClient:
    return BlockClient(desk.path, "w1")


def test_a_block_is_taken_once_as_it_was_made(desk: BlockDesk, worker: BlockClient) -> None:
    first, second = worker.put(b"aabbbc", _ENDS), worker.put(b"x" * 1_000_000, array("q", [1_000_000]).tobytes())
    (data, ends), size = desk.take("w1", first)
    assert (data.tobytes(), ends.tolist(), size) == (b"aabbbc", [2, 5, 6], 6)
    assert desk.take("w1", second)[1] == 1_000_000
    with pytest.raises(KeyError):
        desk.take("w1", first)


def test_a_worker_gets_elements_of_blocks_that_are_named_before_or_after_it_asks(
    desk: BlockDesk, worker: BlockClient
) -> None:
    desk.feed("w1", "bundle", {"w9.1": _BLOCK})
    assert worker.get("bundle", "w9.1", 1, 2) == b"bbbc"
    late = threading.Timer(0.05, desk.feed, ("w1", "bundle", {"w9.2": _BLOCK}))
    late.start()
    assert worker.get("bundle", "w9.2", 0, 1) == b"aa"
    late.join(_PATIENCE_S)


def test_a_lost_block_is_an_error_with_the_reason_and_the_connection_goes_on(
    desk: BlockDesk, worker: BlockClient
) -> None:
    desk.feed("w1", "bundle", {"w9.1": "lost", "w9.2": _BLOCK})
    with pytest.raises(BlockLost, match="both copies are gone"):
        worker.get("bundle", "w9.1", 0, 1)
    assert worker.get("bundle", "w9.2", 0, 1) == b"aa"


def test_objects_of_a_bundle_that_has_ended_are_let_go_also_if_they_are_named_late(
    desk: BlockDesk, worker: BlockClient
) -> None:
    desk.feed("w1", "bundle", {"w9.1": _BLOCK})
    worker.end("bundle")
    fed = desk._workers["w1"].fed  # pyright: ignore[reportPrivateUsage]
    held = fed._of_bundles  # pyright: ignore[reportPrivateUsage]
    assert wait_for(lambda: not held, _PATIENCE_S)
    desk.feed("w1", "bundle", {"w9.2": _BLOCK})
    assert not held


def test_a_worker_waits_while_the_driver_has_not_taken_its_blocks(
    desk: BlockDesk, worker: BlockClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_desk, "_OUTGOING_BYTES", 10)
    first = worker.put(b"12345678", array("q", [8]).tobytes())
    numbers: list[int] = []
    thread = threading.Thread(target=lambda: numbers.append(worker.put(b"abcdefgh", array("q", [8]).tobytes())))
    thread.start()
    thread.join(0.2)
    assert numbers == []
    desk.take("w1", first)
    thread.join(_PATIENCE_S)
    assert desk.take("w1", numbers[0])[0][0].tobytes() == b"abcdefgh"


def test_a_worker_that_is_forgotten_or_was_never_expected_is_refused(desk: BlockDesk, worker: BlockClient) -> None:
    worker.put(b"12345678", array("q", [8]).tobytes())
    desk.forget("w1")
    for client in (worker, BlockClient(desk.path, "stranger")):
        with pytest.raises(BlockLost):
            client.put(b"12345678", array("q", [8]).tobytes())


def test_what_is_no_message_ends_its_connection_alone(desk: BlockDesk, worker: BlockClient) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(_PATIENCE_S)
        stranger.connect(desk.path)
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    assert worker.put(b"12345678", array("q", [8]).tobytes()) == 1

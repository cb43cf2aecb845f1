"""Tests of the state store: only the bundle that writes state sees it, until it commits."""

from __future__ import annotations

from pathlib import Path

import pytest
from apache_beam.coders import coders
from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.data.state import StateStore
from luminosity.engine.spill.quota import Ledger

_BAG = beam_fn_api_pb2.StateKey(
    bag_user_state=beam_fn_api_pb2.StateKey.BagUserState(transform_id="t", user_state_id="s", key=b"k")
)
_ENTRY = coders.TupleCoder([coders.VarIntCoder(), coders.LengthPrefixCoder(coders.BytesCoder())]).get_impl()


def ordered(start: int, end: int) -> beam_fn_api_pb2.StateKey:
    key = beam_fn_api_pb2.StateKey()
    key.ordered_list_user_state.transform_id = "t"
    key.ordered_list_user_state.range.start = start
    key.ordered_list_user_state.range.end = end
    return key


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def new_store(limit: int = 10**9) -> StateStore:
    return StateStore(".", Ledger("quota", limit, writers=0))


class Client:
    """Sends state requests as a worker does for one bundle."""

    def __init__(self, store: StateStore, bundle: str) -> None:
        self._store = store
        self._bundle = bundle
        store.begin(bundle)

    def _request(self, **request: object) -> beam_fn_api_pb2.StateResponse:
        return self._store.handle(beam_fn_api_pb2.StateRequest(id="1", instruction_id=self._bundle, **request))  # type: ignore[arg-type]

    def read(self, key: beam_fn_api_pb2.StateKey) -> list[bytes]:
        """Return all pages of a key's data."""
        pages, token = [], b""
        while True:
            response = self._request(state_key=key, get=beam_fn_api_pb2.StateGetRequest(continuation_token=token))
            assert not response.error
            pages.append(response.get.data)
            token = response.get.continuation_token
            if not token:
                return pages

    def append(self, key: beam_fn_api_pb2.StateKey, data: bytes) -> None:
        assert not self._request(state_key=key, append=beam_fn_api_pb2.StateAppendRequest(data=data)).error

    def clear(self, key: beam_fn_api_pb2.StateKey) -> None:
        assert not self._request(state_key=key, clear=beam_fn_api_pb2.StateClearRequest()).error


def test_a_bundle_reads_its_own_writes_and_others_do_not() -> None:
    store = new_store()
    first, second = Client(store, "1"), Client(store, "2")
    first.append(_BAG, b"a")
    assert first.read(_BAG) == [b"a"]
    assert second.read(_BAG) == [b""]
    store.commit("1")
    assert second.read(_BAG) == [b"a"]


def test_a_failed_bundle_leaves_nothing() -> None:
    store = new_store()
    Client(store, "1").append(_BAG, b"a")
    store.commit("1")
    failing = Client(store, "2")
    failing.clear(_BAG)
    failing.append(_BAG, b"b")
    assert failing.read(_BAG) == [b"b"]
    store.discard("2")
    assert Client(store, "3").read(_BAG) == [b"a"]


def test_large_state_comes_in_pages() -> None:
    store = new_store()
    client = Client(store, "1")
    parts = [bytes([n]) * 1_000_000 for n in range(10)]
    for part in parts:
        client.append(_BAG, part)
    pages = client.read(_BAG)
    assert len(pages) > 1
    assert b"".join(pages) == b"".join(parts)


def test_an_ordered_list_is_read_and_cleared_by_range() -> None:
    store = new_store()
    client = Client(store, "1")
    for number in (30, 10, 20):
        client.append(ordered(0, 0), _ENTRY.encode((number, b"%d" % number)))
    store.commit("1")
    client = Client(store, "2")
    assert [k for k, _ in _ENTRY.decode_all(b"".join(client.read(ordered(0, 100))))] == [10, 20, 30]
    assert [k for k, _ in _ENTRY.decode_all(b"".join(client.read(ordered(10, 30))))] == [10, 20]
    client.clear(ordered(15, 25))
    store.commit("2")
    client = Client(store, "3")
    assert [k for k, _ in _ENTRY.decode_all(b"".join(client.read(ordered(0, 100))))] == [10, 30]


def test_an_error_in_serving_is_kept_for_the_commit_to_see() -> None:
    store = new_store()
    store.begin("1")
    key = beam_fn_api_pb2.StateKey()
    key.multimap_user_state.transform_id = "t"
    request = beam_fn_api_pb2.StateRequest(id="1", instruction_id="1", state_key=key)
    request.append.data = b"x"
    assert "multimap_user_state" in store.handle(request).error
    assert "multimap_user_state" in str(store.error("1"))


def test_a_bundle_that_does_not_run_is_not_served() -> None:
    request = beam_fn_api_pb2.StateRequest(id="1", instruction_id="gone", state_key=_BAG)
    request.get.SetInParent()
    assert "gone" in new_store().handle(request).error


def bag(key: bytes) -> beam_fn_api_pb2.StateKey:
    return beam_fn_api_pb2.StateKey(
        bag_user_state=beam_fn_api_pb2.StateKey.BagUserState(transform_id="t", user_state_id="s", key=key)
    )


def test_state_on_disk_is_read_replaced_and_cleared_like_any() -> None:
    ledger = Ledger("quota", 10**6, writers=0)
    store = StateStore(".", ledger)
    client = Client(store, "1")
    for number in range(100):
        client.append(bag(b"%d" % number), b"value %d" % number)
    client.append(ordered(0, 0), _ENTRY.encode((7, b"seven")))
    store.commit("1")
    assert store.spill(10**6) > 0
    assert (store.memory_bytes, ledger.used) == (0, 0)
    client = Client(store, "2")
    assert client.read(bag(b"42")) == [b"value 42"]
    client.append(bag(b"42"), b"!")
    client.clear(bag(b"43"))
    assert list(_ENTRY.decode_all(b"".join(client.read(ordered(0, 100))))) == [(7, b"seven")]
    store.commit("2")
    client = Client(store, "3")
    assert b"".join(client.read(bag(b"42"))) == b"value 42!"
    assert client.read(bag(b"43")) == [b""]
    assert client.read(bag(b"44")) == [b"value 44"]
    store.release()
    assert ledger.used == 0
    assert sorted(path.name for path in Path().iterdir()) == ["quota"]


def test_the_longest_unused_state_goes_to_disk_first() -> None:
    store = new_store()
    for number in range(10):
        client = Client(store, f"{number}")
        client.append(bag(b"%d" % (number % 5)), b"x" * 1000)
        store.commit(f"{number}")
    before = store.memory_bytes
    freed = store.spill(1)
    assert freed == before // 5  # one cell
    assert store.memory_bytes == before - freed

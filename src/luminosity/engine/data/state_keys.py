"""Reads the encoded keys of state cells."""

from __future__ import annotations

from apache_beam.portability.api import beam_fn_api_pb2

__all__ = ["StateKeys"]

_KEY_TAG = 0x22  # what comes before the length of the field ``key``, the last one of a state key
_LONGEST_KEY = 0x7F  # bytes, so that its length takes one byte


class StateKeys:
    """Reads the fields of encoded ``StateKey``s of user state. Use it in one thread.

    Most cells that come one after the other have the same step, name, window and length of their keys, so their encoded
    keys begin with the same bytes, and what follows is the user's key. So only the first of them is decoded.

    >>> state_key = beam_fn_api_pb2.StateKey()
    >>> state_key.bag_user_state.key = b"a"
    >>> StateKeys().read(state_key.SerializeToString())
    b'a'
    """

    def __init__(self) -> None:
        self._prefix = b""
        self._size = -1  # of the encoded keys that begin with the prefix
        self.step = ""  # of the key that was read last
        self.window = b""  # of the key that was read last, encoded

    def read(self, cell_key: bytes) -> bytes:
        """Return the encoded key of the user's element. Sets :attr:`step` and :attr:`window`."""
        if len(cell_key) == self._size and cell_key.startswith(self._prefix):
            return cell_key[len(self._prefix) :]
        state_key = beam_fn_api_pb2.StateKey.FromString(cell_key)
        user_state = getattr(state_key, str(state_key.WhichOneof("type")))
        self.step, self.window = user_state.transform_id, user_state.window
        key: bytes = user_state.key
        # The prefix contains the lengths of all fields, so whatever begins with it has the same fields.
        is_last = len(key) <= _LONGEST_KEY and cell_key.endswith(bytes((_KEY_TAG, len(key))) + key)
        self._size = len(cell_key) if is_last else -1
        self._prefix = cell_key[: len(cell_key) - len(key)]
        return key

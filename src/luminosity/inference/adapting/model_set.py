"""The models of one transform: one, or one for each of many keys."""

from __future__ import annotations

import difflib
from collections.abc import Hashable
from typing import Any

from apache_beam.ml.inference.base import KeyedModelHandler, ModelHandler

from luminosity.inference.adapting.adapt import adapt, adapt_keyed, without_functions
from luminosity.inference.handler import Handler

__all__ = ["THE_MODEL", "ModelSet"]

THE_MODEL = ""
"""The name of a model that has no other beside it."""
_SOME_KEYS = 5


class ModelSet:
    """Models by name. Those of a `KeyedModelHandler` go by the first of their keys, and keep all their own settings.

    >>> from apache_beam.ml.inference.base import KeyModelMapping
    >>> from luminosity import SentenceEmbedder
    >>> latin, other = SentenceEmbedder("models/latin"), SentenceEmbedder("models/other")
    >>> mappings = [KeyModelMapping(["en", "de"], latin), KeyModelMapping(["ja"], other)]
    >>> models = ModelSet(KeyedModelHandler(mappings))
    >>> list(models.handlers), models.name_of(("de", "Hallo"))
    (['en', 'ja'], 'en')
    """

    def __init__(self, handler: ModelHandler[Any, Any, Any]) -> None:
        inner: Any = without_functions(handler)
        self.is_shared = handler.share_model_across_processes()
        self.most_at_once: int | None = None
        self.handlers: dict[Hashable, Handler[Any, Any, Any]]
        self._names: dict[Hashable, Hashable] | None = None
        # A batch of the user's own may hold any of the keys: that one goes Beam's way.
        is_keyed = isinstance(inner, KeyedModelHandler) and not handler.should_skip_batching()
        keyed: Any = inner
        if is_keyed and not keyed._single_model:
            self.handlers = {name: adapt_keyed(each) for name, each in keyed._id_to_mh_map.items()}
            self.most_at_once = keyed._max_models_per_worker_hint
            self._names = dict(keyed._key_to_id_map)
        else:
            self.handlers = {THE_MODEL: adapt(handler)}

    def without_updates(self) -> list[str]:
        """Handlers to which a new version is nothing: Beam's own method does nothing unless it is overridden."""
        return sorted({str(each) for each in self.handlers.values() if not each.takes_updates()})

    @property
    def is_keyed(self) -> bool:
        return self._names is not None

    @property
    def keys(self) -> list[Hashable]:
        return list(self._names or ())

    def name_of(self, example: Any) -> Hashable:
        """Whose example it is."""
        if self._names is None:
            return THE_MODEL
        if not isinstance(example, tuple) or len(example) != 2:
            raise TypeError(f"found the example {_shortened(example)}, expected a pair of a key and an example")
        return self.name_of_key(example[0])

    def name_of_key(self, key: Hashable) -> Hashable:
        assert self._names is not None
        try:
            return self._names[key]
        except KeyError:
            raise KeyError(f"no model has the key {key!r}; the KeyedModelHandler maps {self._some_near(key)}") from None

    def _some_near(self, key: Hashable) -> str:
        """Those that were perhaps meant, and then others."""
        by_text = {str(each): each for each in self.keys}
        near = [by_text[text] for text in difflib.get_close_matches(str(key), by_text, n=_SOME_KEYS)]
        some = list(dict.fromkeys([*near, *self.keys]))[:_SOME_KEYS]
        more = len(self.keys) - len(some)
        return ", ".join(map(repr, some)) + (f" and {more} more" if more else "")


def _shortened(example: Any) -> str:
    text = repr(example)
    return text if len(text) <= 100 else text[:99] + "…"

"""The models of one transform: a single one, or one for each of many keys."""

from __future__ import annotations

import difflib
from collections.abc import Hashable
from typing import Any

from apache_beam.ml.inference.base import KeyedModelHandler, ModelHandler

from luminosity._shared.text import list_some, shorten_repr
from luminosity.errors import InvalidType
from luminosity.inference.adapting.adapt import adapt, adapt_keyed, without_functions
from luminosity.inference.handler import Handler

__all__ = ["THE_MODEL", "ModelSet"]

THE_MODEL = ""
"""The name of the model if there is only one."""
_SHOWN_KEYS = 5
_SHOWN_CHARACTERS = 100


class ModelSet:
    """The handlers of a transform by name.

    A model of a ``KeyedModelHandler`` is named by the first of its keys and keeps its own settings.

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
        """Whether all workers of a machine should share the models, as the handler says."""
        self.most_at_once: int | None = None
        self.handlers: dict[Hashable, Handler[Any, Any, Any]]
        self._names: dict[Hashable, Hashable] | None = None
        self._shares_by_default = False
        # A batch that the user made may hold any key: Beam's own handler splits it.
        is_keyed = isinstance(inner, KeyedModelHandler) and not handler.should_skip_batching()
        keyed: Any = inner
        if is_keyed and not keyed._single_model:
            self.handlers = {name: adapt_keyed(each) for name, each in keyed._id_to_mh_map.items()}
            self.most_at_once = keyed._max_models_per_worker_hint
            self._names = dict(keyed._key_to_id_map)
            self._shares_by_default = (
                type(keyed).share_model_across_processes is KeyedModelHandler.share_model_across_processes
            )
        else:
            self.handlers = {THE_MODEL: adapt(handler)}

    def without_updates(self) -> list[str]:
        """Return the names of handlers that can't load a new version of their model.

        Beam's ``update_model_path`` does nothing unless a handler overrides it.
        """
        return sorted({str(each) for each in self.handlers.values() if not each.takes_updates()})

    def is_shared_by_default(self, name: Hashable) -> bool:
        """Return whether a model is shared only because Beam shares all models of keys, however small they are.

        A model with ``large_model=True`` is shared because its author says so.
        """
        return self._shares_by_default and not self.handlers[name].share_model_across_processes()

    @property
    def is_keyed(self) -> bool:
        """Whether examples are pairs of a key and an example."""
        return self._names is not None

    @property
    def keys(self) -> list[Hashable]:
        """All keys that have a model."""
        return list(self._names or ())

    def name_of(self, example: Any) -> Hashable:
        """Return the name of the model that an example is for."""
        if self._names is None:
            return THE_MODEL
        if not isinstance(example, tuple) or len(example) != 2:
            shown = shorten_repr(example, _SHOWN_CHARACTERS)
            raise InvalidType(f"found the example {shown}, expected a pair of a key and an example")
        return self.name_of_key(example[0])

    def name_of_key(self, key: Hashable) -> Hashable:
        """Return the name of the model of a key. Raises ``KeyError`` if no model has it."""
        assert self._names is not None
        try:
            return self._names[key]
        except KeyError:
            raise KeyError(f"no model has the key {key!r}; the KeyedModelHandler maps {self._nearest(key)}") from None

    def _nearest(self, key: Hashable) -> str:
        """List some of the keys, those that are spelled like ``key`` first."""
        by_text = {str(each): each for each in self.keys}
        near = [by_text[text] for text in difflib.get_close_matches(str(key), by_text, n=_SHOWN_KEYS)]
        return list_some(map(repr, dict.fromkeys([*near, *self.keys])), _SHOWN_KEYS)

"""Turns any Beam ``ModelHandler`` into a ``Handler``, or into the handlers of many keys, and checks it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, cast

import apache_beam as beam
from apache_beam.ml.inference import base
from apache_beam.ml.inference.base import KeyedModelHandler, ModelHandler, PredictionResult

from luminosity._shared.text import list_some, shorten_repr
from luminosity.errors import InvalidType
from luminosity.inference.adapting.wrapping import BeamContract, WrappedHandler
from luminosity.inference.blocks import Block
from luminosity.inference.handler import Handler, limits_of, warn_of_settings_without_meaning

__all__ = ["THE_MODEL", "ModelSet", "adapt", "check_batching", "check_files", "check_handler", "without_functions"]
_REMOTE_CONCURRENCY = 4  # calls of a remote model at once: they wait for the network, not for a device
_OUTER = (base._PreProcessingModelHandler, base._PostProcessingModelHandler)  # pyright: ignore[reportPrivateUsage]
_PREBATCHED = base._PrebatchedModelHandler  # pyright: ignore[reportPrivateUsage]


def adapt(handler: ModelHandler[Any, Any, Any]) -> Handler[Any, Any, Any]:
    """Return ``handler`` with all hooks: itself if it is a ``Handler``, otherwise a wrapper around it.

    Pre- and postprocessing functions run as steps of their own, so their wrappers are removed. A handler of many models
    is one model here, and loads them as Beam does; :class:`~luminosity.inference.adapting.adapt.ModelSet` is how
    our own transform runs them.
    """
    check_handler(handler)
    inner: Any = handler
    if isinstance(handler, _PrebatchedHandler):
        return handler
    if isinstance(handler, _PREBATCHED) or handler.should_skip_batching():
        return _PrebatchedHandler(handler)
    if isinstance(handler, Handler):
        return handler
    if isinstance(handler, _OUTER):
        return adapt(without_functions(handler))
    if isinstance(handler, base.MaybeKeyedModelHandler):
        return _KeyedHandler(adapt(inner._unkeyed), handler, may_be_unkeyed=True)
    if isinstance(handler, base.KeyedModelHandler) and inner._single_model:
        return _KeyedHandler(adapt(inner._unkeyed), handler, may_be_unkeyed=False)
    return _BeamHandler(handler)


def without_functions(handler: ModelHandler[Any, Any, Any]) -> ModelHandler[Any, Any, Any]:
    """Return the handler inside the wrappers that add pre- and postprocessing functions."""
    inner: Any = handler
    while isinstance(inner, _OUTER):
        inner = getattr(inner, "_base")  # noqa: B009  # a private attribute of Beam's
    return inner


class _BeamHandler(BeamContract):
    """A handler that has only ``run_inference``. Its results are final and contain the examples."""

    def __init__(self, handler: ModelHandler[Any, Any, Any]) -> None:
        super().__init__(handler)
        if isinstance(handler, base.RemoteModelHandler):
            self.concurrency = _REMOTE_CONCURRENCY

    def predict(self, model: Any, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        return list(self._handler.run_inference(batch, model, inference_args))

    def result(self, example: Any, value: Any, model_id: str | None, drop_example: bool) -> Any:
        return _without_example(value) if drop_example else value

    def batch_results(
        self, examples: Sequence[Any], values: Sequence[Any], model_id: str | None, drop_example: bool
    ) -> Sequence[Any]:
        return super().batch_results(examples, values, model_id, drop_example) if drop_example else values


class _PrebatchedHandler(_BeamHandler):
    """A handler whose elements are batches made by the user: each is one call of the model."""

    self_batching = True

    def collate(self, prepared: Block) -> Any:
        return prepared[0]

    def num_examples(self, collated: Any, count: int) -> int:
        return len(collated)

    def predict(self, model: Any, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        return [super().predict(model, batch, inference_args)]

    def result(self, example: Any, value: Any, model_id: str | None, drop_example: bool) -> Any:
        return [_without_example(each) for each in value] if drop_example else value


class _KeyedHandler(WrappedHandler):
    """Removes the keys from examples before the model sees them and puts them back into the results."""

    def __init__(
        self, inner: Handler[Any, Any, Any], keyed: ModelHandler[Any, Any, Any], *, may_be_unkeyed: bool
    ) -> None:
        super().__init__(inner, keyed)
        self._may_be_unkeyed = may_be_unkeyed

    def prepare(self, block: Block) -> Block:
        if self._may_be_unkeyed and not isinstance(block[0], tuple):
            return self._inner.prepare(block)
        _, examples = zip(*block, strict=True)
        return self._inner.prepare(list(examples))

    def result(self, example: Any, value: Any, model_id: str | None, drop_example: bool) -> Any:
        if self._may_be_unkeyed and not isinstance(example, tuple):
            return self._inner.result(example, value, model_id, drop_example)
        key, unkeyed = example
        return key, self._inner.result(unkeyed, value, model_id, drop_example)


def _without_example(value: Any) -> Any:
    if isinstance(value, PredictionResult):
        return cast("Any", value)._replace(example=None)
    if isinstance(value, tuple) and len(cast("tuple[Any, ...]", value)) == 2 and isinstance(value[1], PredictionResult):
        return value[0], cast("Any", value[1])._replace(example=None)
    return value


def check_handler(handler: Any) -> None:
    """Raise ``InvalidType`` if ``handler`` is not a usable ``ModelHandler``."""
    if isinstance(handler, type):
        raise InvalidType(
            f"found the class {handler.__name__}, expected an instance of it", fix=f"call it: {handler.__name__}(...)"
        )
    if not isinstance(handler, ModelHandler):
        raise InvalidType(f"found {handler!r}, expected a ModelHandler, Beam's or a luminosity.Handler")
    kind: Any = type(handler)  # pyright: ignore[reportUnknownVariableType]
    if isinstance(handler, Handler) and kind.predict is Handler.predict and not handler.self_batching:
        fix = None
        if kind.run_inference is not Handler.run_inference:
            fix = "subclass Beam's ModelHandler, which needs only the run_inference that the class has"
        raise InvalidType(f"{kind.__name__} has no method `predict(self, model, batch, inference_args=None)`", fix=fix)


def check_files(handlers: Iterable[Handler[Any, Any, Any]], pipeline: beam.Pipeline) -> None:
    """Raise ``ModelUnavailable`` if a model can't be found, if the pipeline's workers run on this machine.

    On other runners, only the workers may have the files. A runner says so with the attribute
    ``runs_on_this_machine``.
    """
    if getattr(pipeline.runner, "runs_on_this_machine", False):
        for handler in handlers:
            handler.check_files()


def check_batching(handlers: Iterable[Handler[Any, Any, Any]]) -> None:
    """Raise if a handler's batch settings contradict each other, and warn about settings without effect."""
    for handler in handlers:
        limits_of(handler)
        warn_of_settings_without_meaning(handler.batch_elements_kwargs())


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

    Args:
        handler: Beam's or ours, with the functions before and after it, if it has any.
        hooked: gives a handler all hooks.
    """

    def __init__(
        self,
        handler: ModelHandler[Any, Any, Any],
        hooked: Callable[[ModelHandler[Any, Any, Any]], Handler[Any, Any, Any]] = adapt,
    ) -> None:
        inner: Any = without_functions(handler)
        self.is_shared = handler.share_model_across_processes() or getattr(inner, "prefers_one_copy", False)
        """Whether all workers of a machine should share the models, as the handler says."""
        self.most_at_once: int | None = None
        self.handlers: dict[Hashable, Handler[Any, Any, Any]]
        self._names: dict[Hashable, Hashable] | None = None
        self._shares_by_default = False
        # A batch that the user made may hold any key: Beam's own handler splits it.
        is_keyed = isinstance(inner, KeyedModelHandler) and not handler.should_skip_batching()
        keyed: Any = inner
        if is_keyed and not keyed._single_model:
            self.handlers = {
                name: _KeyedHandler(hooked(each), each, may_be_unkeyed=False)
                for name, each in keyed._id_to_mh_map.items()
            }
            self.most_at_once = keyed._max_models_per_worker_hint
            self._names = dict(keyed._key_to_id_map)
            self._shares_by_default = (
                type(keyed).share_model_across_processes is KeyedModelHandler.share_model_across_processes
            )
        else:
            self.handlers = {THE_MODEL: hooked(handler)}

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

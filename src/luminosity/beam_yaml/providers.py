"""The providers of a YAML file, and the inputs they get: tables for our transforms, rows for Beam's."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

from apache_beam.utils.python_callable import PythonCallableWithSource
from apache_beam.yaml import yaml_provider, yaml_transform
from apache_beam.yaml.yaml_provider import InlineProvider, Provider, YamlProvider
from apache_beam.yaml.yaml_transform import Scope, identify_object

from luminosity.beam_yaml.arguments import as_rows
from luminosity.beam_yaml.transforms import TRANSFORMS

__all__ = ["all_providers", "needs_java", "options_of", "table_scopes", "takes_tables"]

_PREFERENCE = 1_000  # more than any score of Beam's, whose largest is 100


def all_providers(path: str, specs: Iterable[Mapping[str, Any]]) -> Mapping[str, Iterable[Provider]]:
    """Return the providers of each transform: those that the file at ``path`` specifies, ours, and Beam's."""
    own = yaml_provider.parse_providers(path, specs)
    return yaml_provider.merge_providers(own, _LuminosityProvider(TRANSFORMS), _standard_providers())


def needs_java(provider: Provider) -> bool:
    """Return whether the transforms of a provider are written in Java, so that the engine can't run them."""
    inner = provider.underlying_provider()
    return isinstance(inner, yaml_provider.ExternalJavaProvider)


def takes_tables(providers: Iterable[Provider]) -> bool:
    """Return whether the transforms of these providers take tables as they are, and need no rows.

    Ours do; and the steps inside a transform that is written in YAML convert their inputs themselves.
    """
    return any(isinstance(provider, _LuminosityProvider | YamlProvider) for provider in providers)


def options_of(providers: Iterable[Provider], kind: str) -> list[str]:
    """Return the options of a transform, as far as providers know them without starting anything."""
    names: dict[str, None] = {}
    for provider in providers:
        names.update(dict.fromkeys(_options(provider, kind)))
    return list(names)


class _LuminosityProvider(InlineProvider):
    """Our transforms. They go before Beam's of the same name: RunInference."""

    def to_json(self) -> dict[str, str]:
        return {"type": "luminosity"}

    def _affinity(self, other: Provider) -> Any:
        return _PREFERENCE


class _Lazy:
    """A factory of transforms whose module is imported when it is used."""

    def __init__(self, source: str) -> None:
        self._source = source

    @property
    def __wrapped__(self) -> Any:  # inspect.signature() looks here
        return PythonCallableWithSource.load_from_source(self._source)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)


def _standard_providers() -> Mapping[str, Iterable[Provider]]:
    """Return Beam's providers. Beam keeps them, so this matters only for the first call.

    Beam imports every module that they name. ``yaml_ml`` alone imports torch and transformers, which takes ten
    seconds, for two transforms that few files use; ours are imported when they are used.
    """
    types = yaml_provider.ExternalProvider._provider_types  # pyright: ignore[reportPrivateUsage]
    eager = types["python"]
    types["python"] = lambda urns, provider_base_path, packages=(): (
        eager(urns, provider_base_path, packages)
        if packages
        else InlineProvider({name: _Lazy(source) for name, source in urns.items()})
    )
    try:
        return yaml_provider.standard_providers()
    finally:
        types["python"] = eager


def _options(provider: Provider, kind: str) -> Iterable[str]:
    if isinstance(provider, yaml_provider.RenamingProvider):
        return provider._mappings.get(kind, ())  # pyright: ignore[reportPrivateUsage]
    if isinstance(provider, YamlProvider):
        return provider._transforms[kind].get("config_schema", {}).get("properties", ())  # pyright: ignore
    if isinstance(provider, InlineProvider):
        factories: Mapping[str, Callable[..., Any]] = provider._transform_factories  # pyright: ignore
        hidden = ("self", "pcoll", "pcolls", "yaml_create_transform")
        factory = factories[kind]
        parameters = inspect.signature(factory.__init__ if isinstance(factory, type) else factory).parameters.values()
        return [
            each.name
            for each in parameters
            if each.name not in hidden and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        ]
    return ()


_LOCK = threading.Lock()


@contextmanager
def table_scopes() -> Generator[None]:
    """Let Beam look up the inputs of transforms in scopes that know tables, while this process builds a pipeline.

    Beam checks expressions against the schema of the input before it applies a transform, so the input must be rows by
    then. Its scopes are the only place that knows both the input and the transform.
    """
    with _LOCK:
        yaml_transform.Scope = _TableScope
        try:
            yield
        finally:
            yaml_transform.Scope = Scope


class _TableScope(Scope):
    _takes_rows = False

    def compute_outputs(self, transform_id: str) -> Any:
        spec = self._transforms_by_uuid[transform_id]
        kind = spec["type"]
        if kind in TRANSFORMS and "output_schema" in (spec.get("config") or {}):
            raise ValueError(
                f"{identify_object(spec)}: found output_schema, which checks rows; add a ValidateWithSchema after it"
            )
        before, self._takes_rows = self._takes_rows, kind != "composite" and not takes_tables(self.providers[kind])
        try:
            return super().compute_outputs(transform_id)
        finally:
            self._takes_rows = before

    def get_pcollection(self, name: str) -> Any:
        takes_rows = self._takes_rows  # computing the input sets it for the input's own inputs
        found = super().get_pcollection(name)
        return as_rows(found, lambda: self._label(name)) if takes_rows else found

    def _label(self, name: str) -> str:
        if name in self._inputs:
            label = f"Rows of {name}"
        else:
            spec = self.get_transform_spec(self.get_transform_id_and_output_name(name)[0])
            label = f"Rows of {spec.get('name') or spec['type']}"
        while label in self._seen_names:
            label += "'"
        self._seen_names.add(label)
        return label

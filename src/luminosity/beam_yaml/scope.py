"""Gives each transform of a YAML file its inputs in the form that it takes: tables for ours, rows for Beam's."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from apache_beam.yaml import yaml_transform
from apache_beam.yaml.yaml_transform import Scope, identify_object

from luminosity.beam_yaml.providers import takes_tables
from luminosity.beam_yaml.tables import as_rows
from luminosity.beam_yaml.transforms import TRANSFORMS

__all__ = ["table_scopes"]

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

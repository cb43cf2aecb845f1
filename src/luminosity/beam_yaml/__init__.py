"""Pipelines in Beam's YAML, with the transforms of Luminosity beside Beam's own."""

from __future__ import annotations

from luminosity.extras import require

for _library in ("docstring_parser", "jinja2", "jsonschema", "yaml"):
    require(_library, "yaml")  # Beam imports them without saying which extra has them

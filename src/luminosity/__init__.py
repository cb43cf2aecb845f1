"""Luminosity makes Apache Beam pipelines deliver what the machine can do."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from luminosity.beam_fixes import without_tensorflow
from luminosity.beam_fixes.noise import quiet

if TYPE_CHECKING:
    from luminosity.core import WorkerShare
    from luminosity.engine.explain.explain import PipelinePlan, plan_pipeline
    from luminosity.engine.runner import LuminosityRunner
    from luminosity.errors import LuminosityError
    from luminosity.events import BundleRetried, RunEnded, RunStarted, Snapshot, WorkerLost, WorkerStarted
    from luminosity.inference.adapting.adapt import adapt
    from luminosity.inference.enrich.column import Column
    from luminosity.inference.enrich.transform import Enrich
    from luminosity.inference.handler import Handler
    from luminosity.inference.handlers.http.http_handler import HttpModelHandler
    from luminosity.inference.handlers.images.handlers import ImageClassifier, ImageEmbedder
    from luminosity.inference.handlers.images.recipe import ImageRecipe
    from luminosity.inference.handlers.jax import JaxModelHandler
    from luminosity.inference.handlers.text.classifiers import TextClassifier, TokenClassifier
    from luminosity.inference.handlers.text.embedder import SentenceEmbedder
    from luminosity.inference.handlers.text.generator import Summarizer, TextGenerator
    from luminosity.inference.handlers.torch import TorchModelHandler
    from luminosity.inference.options import ModelOptions
    from luminosity.inference.registry.file_registry import register_model
    from luminosity.inference.run_inference import RunInference
    from luminosity.io.bigquery_schema import bigquery_schema
    from luminosity.io.kafka.client import KafkaClient
    from luminosity.io.kafka.read import ReadKafka
    from luminosity.io.kafka.record import KafkaRecord
    from luminosity.io.kafka.write import UnwrittenRecord, WriteKafka
    from luminosity.io.read_table import ReadTable
    from luminosity.io.stores.search_vectors import SearchQdrant, SearchVectors
    from luminosity.io.stores.write_lance import WriteLance
    from luminosity.io.stores.write_vectors import WriteQdrant, WriteVectors
    from luminosity.io.write_table import WriteTable
    from luminosity.runner_options import LuminosityOptions
    from luminosity.tables.map_table import AddRowIds, MapTable
    from luminosity.tables.row_times import WindowTable
    from luminosity.tables.rows import RowsFromTable, TableFromRows

__all__ = [
    "AddRowIds",
    "BundleRetried",
    "Column",
    "Enrich",
    "Handler",
    "HttpModelHandler",
    "ImageClassifier",
    "ImageEmbedder",
    "ImageRecipe",
    "JaxModelHandler",
    "KafkaClient",
    "KafkaRecord",
    "LuminosityError",
    "LuminosityOptions",
    "LuminosityRunner",
    "MapTable",
    "ModelOptions",
    "PipelinePlan",
    "ReadKafka",
    "ReadTable",
    "RowsFromTable",
    "RunEnded",
    "RunInference",
    "RunStarted",
    "SearchQdrant",
    "SearchVectors",
    "SentenceEmbedder",
    "Snapshot",
    "Summarizer",
    "TableFromRows",
    "TextClassifier",
    "TextGenerator",
    "TokenClassifier",
    "TorchModelHandler",
    "UnwrittenRecord",
    "WindowTable",
    "WorkerLost",
    "WorkerShare",
    "WorkerStarted",
    "WriteKafka",
    "WriteLance",
    "WriteQdrant",
    "WriteTable",
    "WriteVectors",
    "adapt",
    "bigquery_schema",
    "plan_pipeline",
    "register_model",
]

without_tensorflow.install()  # workers import Beam's handlers, too

_HOMES = {
    **dict.fromkeys(
        ("BundleRetried", "RunEnded", "RunStarted", "Snapshot", "WorkerLost", "WorkerStarted"),
        "luminosity.events",
    ),
    "AddRowIds": "luminosity.tables.map_table",
    "Column": "luminosity.inference.enrich.column",
    "Enrich": "luminosity.inference.enrich.transform",
    "Handler": "luminosity.inference.handler",
    "HttpModelHandler": "luminosity.inference.handlers.http.http_handler",
    "ImageClassifier": "luminosity.inference.handlers.images.handlers",
    "ImageEmbedder": "luminosity.inference.handlers.images.handlers",
    "ImageRecipe": "luminosity.inference.handlers.images.recipe",
    "JaxModelHandler": "luminosity.inference.handlers.jax",
    "KafkaClient": "luminosity.io.kafka.client",
    "KafkaRecord": "luminosity.io.kafka.record",
    "LuminosityError": "luminosity.errors",
    "LuminosityOptions": "luminosity.runner_options",
    "LuminosityRunner": "luminosity.engine.runner",
    "MapTable": "luminosity.tables.map_table",
    "ModelOptions": "luminosity.inference.options",
    "ReadKafka": "luminosity.io.kafka.read",
    "ReadTable": "luminosity.io.read_table",
    "RowsFromTable": "luminosity.tables.rows",
    "RunInference": "luminosity.inference.run_inference",
    "SearchQdrant": "luminosity.io.stores.search_vectors",
    "SearchVectors": "luminosity.io.stores.search_vectors",
    "SentenceEmbedder": "luminosity.inference.handlers.text.embedder",
    "Summarizer": "luminosity.inference.handlers.text.generator",
    "TableFromRows": "luminosity.tables.rows",
    "TextClassifier": "luminosity.inference.handlers.text.classifiers",
    "TextGenerator": "luminosity.inference.handlers.text.generator",
    "TokenClassifier": "luminosity.inference.handlers.text.classifiers",
    "TorchModelHandler": "luminosity.inference.handlers.torch",
    "UnwrittenRecord": "luminosity.io.kafka.write",
    "WindowTable": "luminosity.tables.row_times",
    "WorkerShare": "luminosity.core",
    "WriteKafka": "luminosity.io.kafka.write",
    "WriteLance": "luminosity.io.stores.write_lance",
    "WriteQdrant": "luminosity.io.stores.write_vectors",
    "WriteTable": "luminosity.io.write_table",
    "PipelinePlan": "luminosity.engine.explain.explain",
    "WriteVectors": "luminosity.io.stores.write_vectors",
    "adapt": "luminosity.inference.adapting.adapt",
    "bigquery_schema": "luminosity.io.bigquery_schema",
    "plan_pipeline": "luminosity.engine.explain.explain",
    "register_model": "luminosity.inference.registry.file_registry",
}


quiet()  # here, because Beam writes these messages as soon as it is imported


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: workers need few of them and should start fast."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__

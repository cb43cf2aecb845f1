"""Luminosity makes Apache Beam pipelines deliver what the machine can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from luminosity._shared.lazy import lazy_names
from luminosity.beam_fixes import lean_beam, noise, without_tensorflow
from luminosity.beam_fixes.stand_ins import STAND_INS, Expand
from luminosity.runs.senders import SENDERS, MakeSender

if TYPE_CHECKING:
    from luminosity.core import WorkerShare
    from luminosity.engine.durable.versions.migration import Migration
    from luminosity.engine.explain.explain import PipelinePlan, plan_pipeline
    from luminosity.engine.runner import LuminosityRunner
    from luminosity.errors import LuminosityError
    from luminosity.events import BundleRetried, RunEnded, RunStarted, Snapshot, WorkerLost, WorkerStarted
    from luminosity.inference.adapting.adapt import adapt
    from luminosity.inference.continuous import ContinuousModel
    from luminosity.inference.enrich.column import Column
    from luminosity.inference.enrich.transform import Enrich
    from luminosity.inference.handler import Handler
    from luminosity.inference.handlers.http.http_handler import HttpModelHandler
    from luminosity.inference.handlers.images.handlers import ImageClassifier, ImageEmbedder
    from luminosity.inference.handlers.images.recipe import ImageRecipe
    from luminosity.inference.handlers.jax import JaxModelHandler
    from luminosity.inference.handlers.text.classifiers import TextClassifier, TokenClassifier
    from luminosity.inference.handlers.text.embedder import SentenceEmbedder
    from luminosity.inference.handlers.text.generator import TextGenerator
    from luminosity.inference.handlers.text.summarizer import Summarizer
    from luminosity.inference.handlers.torch import TorchModelHandler
    from luminosity.inference.handlers.trees.lightgbm import LightGBMModelHandler
    from luminosity.inference.handlers.trees.xgboost import XGBoostModelHandler
    from luminosity.inference.prompts.prompt import Prompt
    from luminosity.inference.registry.file_registry import register_model
    from luminosity.inference.run_inference import RunInference
    from luminosity.io.bigquery_schema import bigquery_schema
    from luminosity.io.kafka.client import KafkaClient
    from luminosity.io.kafka.read import ReadKafka
    from luminosity.io.kafka.record import KafkaRecord
    from luminosity.io.kafka.write import UnwrittenRecord, WriteKafka
    from luminosity.io.lakes.write import WriteDelta, WriteIceberg
    from luminosity.io.map_async import MapAsync
    from luminosity.io.read_lakes import ReadDelta, ReadIceberg
    from luminosity.io.read_table import ReadTable
    from luminosity.io.stores.search_vectors import SearchQdrant, SearchVectors
    from luminosity.io.stores.write_lance import WriteLance
    from luminosity.io.stores.write_vectors import WriteQdrant, WriteVectors
    from luminosity.io.write_table import WriteTable
    from luminosity.runner_options import LuminosityOptions, ModelOptions
    from luminosity.tables.map_table import AddRowIds, MapTable
    from luminosity.tables.row_times import WindowTable
    from luminosity.tables.rows import RowsFromTable, TableFromRows

__all__ = [
    "AddRowIds",
    "BundleRetried",
    "Column",
    "ContinuousModel",
    "Enrich",
    "Handler",
    "HttpModelHandler",
    "ImageClassifier",
    "ImageEmbedder",
    "ImageRecipe",
    "JaxModelHandler",
    "KafkaClient",
    "KafkaRecord",
    "LightGBMModelHandler",
    "LuminosityError",
    "LuminosityOptions",
    "LuminosityRunner",
    "MapAsync",
    "MapTable",
    "Migration",
    "ModelOptions",
    "PipelinePlan",
    "Prompt",
    "ReadDelta",
    "ReadIceberg",
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
    "WriteDelta",
    "WriteIceberg",
    "WriteKafka",
    "WriteLance",
    "WriteQdrant",
    "WriteTable",
    "WriteVectors",
    "XGBoostModelHandler",
    "adapt",
    "bigquery_schema",
    "plan_pipeline",
    "register_model",
]

# Workers import Beam and its handlers, too.
lean_beam.install({noise.MODULE: noise.run, without_tensorflow.MODULE: without_tensorflow.run})


def _read_from_pubsub() -> Expand:
    from luminosity.io.pubsub.for_beam import read_from_pubsub

    return read_from_pubsub


def _write_to_pubsub() -> Expand:
    from luminosity.io.pubsub.for_beam import write_to_pubsub

    return write_to_pubsub


def _read_export() -> Expand:
    from luminosity.beam_fixes.retried_exports import read_export

    return read_export


# The engine runs these in place of what Beam has, and knows nothing of the parts that they come from.
STAND_INS["apache_beam.io.gcp.bigquery._CustomBigQuerySource"] = _read_export
STAND_INS["apache_beam.io.gcp.pubsub._PubSubSource"] = _read_from_pubsub
STAND_INS["apache_beam.io.gcp.pubsub.WriteToPubSub"] = _write_to_pubsub


def _otlp() -> MakeSender:
    from luminosity.operate.telemetry.otlp_sender import otlp_sender

    return otlp_sender


SENDERS["otlp"] = _otlp  # the engine uses it, and knows nothing of the part that it comes from

noise.quiet()  # here, because Beam writes these messages as soon as it is imported

if not TYPE_CHECKING:  # so that a type checker reports names that don't exist
    _get, __dir__ = lazy_names(__name__)

    def __getattr__(name: str) -> object:
        if name == "LuminosityRunner":
            from luminosity.engine.workers.launcher import warm_up_early

            warm_up_early()  # the fork server imports Beam while this process imports the engine
        return _get(name)

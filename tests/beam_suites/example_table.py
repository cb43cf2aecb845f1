"""Every example in Beam's wheel: how to run it and what to compare, or why it is left out."""

from __future__ import annotations

import ast
import json
import math
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apache_beam as beam
import fastavro
import joblib
import pyarrow.parquet

from tests.beam_suites.example_inputs import TextTopic

_SHARD = re.compile(r"-\d{5}-of-\d{5}")
_UNIQUE = re.compile(r"-\d{30,}")  # how a sink writes a random number that makes the name unique


def lines(path: Path) -> list[Any]:
    return path.read_text().splitlines()


def csv_rows(path: Path) -> list[Any]:
    """Without the header, which every shard has."""
    return path.read_text().splitlines()[1:]


def read_by_suffix(path: Path) -> list[Any]:
    if path.suffix == ".avro":
        with path.open("rb") as file:
            return [repr(record) for record in fastavro.reader(file)]
    if path.read_bytes()[:4] == b"PAR1":
        return [repr(row) for row in pyarrow.parquet.read_table(path).to_pylist()]
    return lines(path)


@dataclass(frozen=True)
class Example:
    """A run of an example. It runs in an empty folder; all files that it leaves there are compared."""

    module: str  # below apache_beam.examples
    arguments: str  # {inputs} is the folder of example_inputs
    entry: str = "run"
    read: Callable[[Path], list[Any]] = read_by_suffix
    services: Mapping[str, type[beam.PTransform]] = field(default_factory=dict[str, type[beam.PTransform]])

    def words(self, inputs: Path) -> list[str]:
        return self.arguments.format(inputs=inputs).split()

    def results(self, folder: Path) -> dict[str, list[Any]]:
        """What is in the files, by their names without what is different in every run, in no particular order."""
        found: dict[str, list[Any]] = {}
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = _UNIQUE.sub("", _SHARD.sub("", str(path.relative_to(folder))))
            found.setdefault(name, []).extend(self.read(path))
        return {name: sorted(elements, key=repr) for name, elements in found.items()}


def _without_processing_time(path: Path) -> list[Any]:
    rows = [json.loads(line) for line in lines(path)]
    return [{name: value for name, value in row.items() if name != "processing_time"} for row in rows]


def _points(path: Path) -> list[Any]:
    """A line has the points of a group, in no particular order."""
    return [sorted(re.findall(r"\([^)]*\)", line)) for line in lines(path)]


def _contacts(path: Path) -> list[Any]:
    return [[sorted(field.strip('"').split(",")) for field in line.split("\t")] for line in lines(path)]


def _optimum(path: Path) -> list[Any]:
    found = [ast.literal_eval(re.sub(r"np\.str_\(('[^']*')\)", r"\1", line)) for line in lines(path)]
    return [(round(each["cost"], 6), sorted(each["mapping"].items()), sorted(each["production"])) for each in found]


def _is_about_pi(path: Path) -> list[Any]:
    """The number of trials, and whether the estimate is one."""
    return [(total, abs(about - math.pi) < 0.1) for total, _, about in map(json.loads, lines(path))]


def _trained_models(path: Path) -> list[Any]:
    """What does not depend on chance of the models that are one after another in the file."""
    found: list[Any] = []
    with path.open("rb") as file:
        while file.peek(1):
            model = pickle.load(file)["m"]
            found.append((list(model.classes_), model.n_features_in_))
    return found


def _clusters(path: Path) -> list[Any]:
    return [joblib.load(path).cluster_centers_.shape]


_GAME = "--topic={inputs}/scores.csv --dataset=games --project=none --allow_unsafe_triggers"

EXAMPLES = [
    Example("avro_nyc_trips", "--input={inputs}/trips.avro --output=out"),
    Example("california_housing_clustering", "--input={inputs}/housing.csv --checkpoints_path=models", read=_clusters),
    Example("complete.autocomplete", "--input={inputs}/lines.txt --output=out"),
    Example("complete.distribopt", "--input={inputs}/crops.csv --output=out", read=_optimum),
    Example("complete.estimate_pi", "--output=out", read=_is_about_pi),
    Example("complete.game.game_stats", _GAME, read=_without_processing_time),
    Example(
        "complete.game.hourly_team_score",
        "--input={inputs}/scores.csv --dataset=games --project=none --start_min=2015-11-16-15-20",
    ),
    Example("complete.game.leader_board", _GAME, read=_without_processing_time),
    Example("complete.game.user_score", "--input={inputs}/scores.csv --output=out"),
    Example("complete.juliaset.juliaset.juliaset", "--coordinate_output=out --grid_size=12", read=_points),
    Example("complete.tfidf", "--uris={inputs}/document-*.txt --output=out"),
    Example("complete.top_wikipedia_sessions", "--input={inputs}/edits.json --output=out --sampling_threshold=1.0"),
    Example(
        "cookbook.bigquery_side_input", "--output=out --num_groups=5 --ignore_corpus=ignored --ignore_word=ignored"
    ),
    Example("cookbook.bigquery_tornadoes", "--input=weather --output=tornadoes"),
    Example("cookbook.coders", "--input={inputs}/matches.json --output=out"),
    Example("cookbook.custom_ptransform", "--input={inputs}/lines.txt --output=out"),
    Example("cookbook.filters", "--input=weather --output=cold_days"),
    Example("cookbook.group_with_coder", "--input={inputs}/players.csv --output=out"),
    Example(
        "cookbook.mergecontacts",
        "--input_email={inputs}/email.tsv --input_phone={inputs}/phone.tsv --input_snailmail={inputs}/address.tsv "
        "--output_tsv=out --output_stats=unused",
        read=_contacts,
    ),
    Example("cookbook.multiple_output_pardo", "--input={inputs}/lines.txt --output=out"),
    Example("dataframe.flight_delays", "--output=out", read=csv_rows),
    Example("dataframe.taxiride", "--input={inputs}/rides-*.csv --output=out", read=csv_rows),
    Example(
        "dataframe.taxiride",
        "--pipeline=borough_enrich --input={inputs}/rides-*.csv --zone_lookup={inputs}/zones.csv --output=out",
        read=csv_rows,
    ),
    Example("dataframe.wordcount", "--input={inputs}/lines.txt --output=out", read=csv_rows),
    Example(
        "inference.sklearn_japanese_housing_regression",
        "--input={inputs}/houses.csv --model_path={inputs}/ --output=out",
    ),
    Example(
        "inference.sklearn_mnist_classification",
        "--input={inputs}/digits.csv --model_path={inputs}/digits.pickle --output=out",
    ),
    Example(
        "inference.table_row_inference",
        "--input_file={inputs}/rows.jsonl --model_path={inputs}/rows.pickle --feature_columns=x,y --output_file=out",
    ),
    Example(
        "matrix_power",
        "--input_matrix={inputs}/matrix.txt --input_vector={inputs}/vector.txt --exponent=3 --output=out",
    ),
    Example("per_entity_training", "--input={inputs}/adults.csv --output-dir=models", read=_trained_models),
    Example("sinks.test_periodicimpulse", ""),
    Example("sinks.test_write_bounded", ""),
    Example("streaming_wordcount", "--input_topic={inputs}/words.topic --output_topic=counts"),
    Example(
        "windowed_wordcount",
        "--input_topic={inputs}/words.topic --output_table=counts",
        entry="main",
        services={"ReadFromPubSub": TextTopic},
    ),
    Example("wordcount", "--input={inputs}/lines.txt --output=out"),
    Example("wordcount_debugging", "--input={inputs}/lines.txt --output=out"),
    Example("wordcount_minimal", "--input={inputs}/lines.txt --output=out", entry="main"),
    Example("wordcount_with_metrics", "--input={inputs}/lines.txt --output=out", entry="main"),
]

_GOOGLE = "needs Google Cloud beyond what can stand in for it"
_TENSORFLOW = "TensorFlow is not installed"
_TORCH = "PyTorch is not installed"

LEFT_OUT = {
    "complete.juliaset.juliaset_main": "only calls complete.juliaset.juliaset.juliaset",
    "complete.juliaset.juliaset.juliaset_test_it": "a test",
    "complete.juliaset.setup": "builds a package",
    "cookbook.bigquery_schema": _GOOGLE,
    "cookbook.datastore_wordcount": _GOOGLE,
    "cookbook.ordered_window_elements.batch": "a transform, which Beam's own tests of it run",
    "cookbook.ordered_window_elements.streaming": "a transform for unbounded data",
    "flink.flink_streaming_impulse": "Flink",
    "inference.gemini_image_generation": _GOOGLE,
    "inference.gemini_text_classification": _GOOGLE,
    "inference.huggingface_language_modeling": _TORCH,
    "inference.huggingface_question_answering": _TENSORFLOW,
    "inference.milk_quality_prediction_windowing": "xgboost is not installed",
    "inference.onnx_sentiment_classification": _TORCH,
    "inference.pytorch_image_captioning": _TORCH,
    "inference.pytorch_image_classification": _TORCH,
    "inference.pytorch_image_classification_with_side_inputs": _TORCH,
    "inference.pytorch_image_object_detection": _TORCH,
    "inference.pytorch_image_segmentation": _TORCH,
    "inference.pytorch_imagenet_rightfit": _TORCH,
    "inference.pytorch_language_modeling": _TORCH,
    "inference.pytorch_model_per_key_image_segmentation": _TORCH,
    "inference.pytorch_sentiment": _TORCH,
    "inference.rate_limiter_vertex_ai": _GOOGLE,
    "inference.run_inference_side_inputs": "runs for twenty minutes",
    "inference.runinference_metrics.config": "no pipeline of its own",
    "inference.runinference_metrics.main": _TORCH,
    "inference.runinference_metrics.pipeline.options": "no pipeline of its own",
    "inference.runinference_metrics.pipeline.transformations": _TORCH,
    "inference.runinference_metrics.setup": "builds a package",
    "inference.table_row_batch_example": "only calls inference.table_row_inference, and names its runner",
    "inference.table_row_inference_utils": "no pipeline of its own",
    "inference.tensorflow_imagenet_segmentation": _TENSORFLOW,
    "inference.tensorflow_mnist_classification": _TENSORFLOW,
    "inference.tensorflow_mnist_with_weights": _TENSORFLOW,
    "inference.tensorrt_object_detection": "TensorRT is not installed",
    "inference.tensorrt_text_classification": "TensorRT is not installed",
    "inference.tfx_bsl.build_tensorflow_model": _TENSORFLOW,
    "inference.tfx_bsl.tensorflow_image_classification": _TENSORFLOW,
    "inference.vertex_ai_image_classification": _GOOGLE,
    "inference.vertex_ai_llm_text_classification": _GOOGLE,
    "inference.vllm_gemma_batch": "vLLM is not installed",
    "inference.vllm_text_completion": "vLLM is not installed",
    "inference.xgboost_iris_classification": "xgboost is not installed",
    "kafkataxi.kafka_taxi": "Kafka, and a transform in Java",
    "ml_transform.ml_transform_basic": _TENSORFLOW,
    "ml_transform.mltransform_generate_vocab": _TENSORFLOW,
    "ml_transform.mltransform_image_embedding": "sentence-transformers is not installed",
    "ml_transform.mltransform_one_hot_encoding": _TENSORFLOW,
    "ml_transform.mltransform_text_embedding": "sentence-transformers is not installed",
    "ml_transform.vocab_tfidf_processing": _TENSORFLOW,
    "online_clustering": "the parts of california_housing_clustering",
    "rate_limiter_simple": "a rate limit service",
    "sinks.generate_event": "TestStream",
    "sinks.test_write_unbounded": "TestStream",
    "sql_taxi": "a transform in Java",
    "streaming_wordcount_debugging": "joins different windows, which Beam's runner can't decode and ours refuses",
    "wordcount_dataframe": "another name of dataframe.wordcount",
    "wordcount_xlang": "a transform in Java",
    "wordcount_xlang_sql": "a transform in Java",
}

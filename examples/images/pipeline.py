"""Classify images, first files, then a column of a table, with a real model that is inside a Python package.

::

    lum run examples/images/pipeline.py
    lum run examples/images/pipeline.py photos/*.jpg --out=labelled

The default images are two photos of scikit-learn, and a copy of one that is cut off. It is plain Beam and runs on any
runner. Options that ``--help`` does not list go to Beam.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pyarrow.parquet as pq
import sklearn.datasets
from apache_beam.options.pipeline_options import PipelineOptions
from network import RECIPE, Features, label_names, make_classifier

from luminosity import Column, Enrich, ImageClassifier, ImageEmbedder, RunInference, WriteTable

CUT_OFF = "cut off.jpg"


def default_images(folder: Path) -> list[Path]:
    """Return two photos, and a third that can't be decoded."""
    photos = sorted((Path(sklearn.datasets.__file__).parent / "images").glob("*.jpg"))
    broken = folder / CUT_OFF
    broken.write_bytes(photos[0].read_bytes()[:20_000])
    return [*photos, broken]


def classify_files(paths: Sequence[Path], classifier: ImageClassifier, beam_args: Sequence[str]) -> None:
    """Print the label of each file; a file that can't be decoded is a dead letter."""
    with beam.Pipeline(options=PipelineOptions(list(beam_args))) as pipeline:
        examples = pipeline | beam.Create([str(path) for path in paths])
        both: Any = examples | RunInference(classifier).with_exception_handling()
        results, failed = both
        _ = results | beam.Map(lambda result: print(_line(result.example, result.inference)))
        _ = failed.failed_inferences | "Failed" >> beam.Map(
            lambda letter: print(f"file   {Path(letter[0][0]).name}: failed, {letter[1][1]}")
        )


def _line(path: str, prediction: dict[str, Any]) -> str:
    return f"file   {Path(path).name}: {prediction['label']} ({prediction['score']:.2f})"


def enrich_table(paths: Sequence[Path], classifier: ImageClassifier, out: Path, beam_args: Sequence[str]) -> None:
    """Add a label and a vector to a table whose column ``image`` holds files, and write good and failed rows."""
    table = pa.record_batch(
        {"name": [path.name for path in paths], "image": pa.array([path.read_bytes() for path in paths], pa.binary())}
    )
    embedder = ImageEmbedder(model_class=Features, recipe=RECIPE, normalize=True)
    with beam.Pipeline(options=PipelineOptions(list(beam_args))) as pipeline:
        # Both models prepare images alike, so each image is decoded once.
        columns = {"label": Column(classifier, "image"), "vector": Column(embedder, "image")}
        both: Any = pipeline | beam.Create([table]) | Enrich(**columns).with_exception_handling()
        good, failed = both
        _ = good | WriteTable(out / "labelled")
        _ = failed | "WriteFailed" >> WriteTable(out / "failed", allow_empty=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Classify the files, and the same images as a table."""
    parser = argparse.ArgumentParser(description="Classify images.", allow_abbrev=False)
    parser.add_argument("images", nargs="*", type=Path, help="files (default: two photos, and one that is cut off)")
    parser.add_argument("--out", type=Path, help="folder for the tables")
    arguments, beam_args = parser.parse_known_args(sys.argv[1:] if argv is None else argv)

    out = arguments.out or Path(tempfile.mkdtemp(prefix="images-"))
    out.mkdir(parents=True, exist_ok=True)
    paths = arguments.images or default_images(out)
    classifier = ImageClassifier(model_class=make_classifier, labels=label_names(), recipe=RECIPE)
    classify_files(paths, classifier, beam_args)
    enrich_table(paths, classifier, out, beam_args)
    for row in pq.read_table(out / "labelled").to_pylist():
        print(f"table  {row['name']}: {', '.join(each['label'] for each in row['label']['top'])}")
    print(f"tables {out}")


if __name__ == "__main__":
    main()

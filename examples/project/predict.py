"""Predict the cultivar of wines: a pipeline with a model, ``lum run predict.py --table=IN --model=MODEL --out=OUT``."""

from __future__ import annotations

import argparse

import apache_beam as beam
import pyarrow as pa
from apache_beam.ml.inference.sklearn_inference import SklearnModelHandlerNumpy
from apache_beam.options.pipeline_options import PipelineOptions
from raw import COLUMNS

from luminosity import Column, Enrich, ReadTable, WriteTable


def main() -> None:
    """Run the pipeline."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", required=True, help="the wines")
    parser.add_argument("--model", required=True, help="the model that train.py has saved")
    parser.add_argument("--out", required=True, help="the wines with a column more")
    parsed, options = parser.parse_known_args()
    with beam.Pipeline(options=PipelineOptions(options)) as pipeline:
        _ = (
            pipeline
            | "Read" >> ReadTable(parsed.table)
            | "Predict" >> Enrich(prediction=Column(SklearnModelHandlerNumpy(parsed.model), COLUMNS, pa.int64()))
            | "Write" >> WriteTable(parsed.out, if_exists="replace")
        )


if __name__ == "__main__":
    main()

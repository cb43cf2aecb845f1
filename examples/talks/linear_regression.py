"""RunInference with a torch model: the first example of most talks.

The model is a linear regression of the progression of diabetes on ten measurements of each of 442 patients. Its weights
are in a file. The handler names the module that they belong to, and RunInference does the rest: it loads the model once
per worker, makes batches, and returns every example with its prediction. Use it for any torch module whose inputs are
rows of one shape. KeyedModelHandler carries a key, here the patient and the measured progression, past the model::

    lum run examples/talks/linear_regression.py
    python examples/talks/linear_regression.py --runner=FnApiRunner

The handler is Beam's own. RunInference from apache_beam.ml.inference.base works, too, without other changes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import torch
from apache_beam.ml.inference.base import KeyedModelHandler, PredictionResult
from apache_beam.ml.inference.pytorch_inference import PytorchModelHandlerTensor
from apache_beam.options.pipeline_options import PipelineOptions
from sklearn.datasets import load_diabetes

from luminosity import RunInference

Patient = tuple[int, float]  # the patient's number, and the measured progression


def train(weights_file: Path, rows: torch.Tensor, targets: torch.Tensor) -> None:
    """Fit by least squares; the last column of ones finds the bias."""
    with_ones = torch.cat([rows, torch.ones(len(rows), 1)], dim=1)
    solution = torch.linalg.lstsq(with_ones, targets[:, None]).solution.T
    torch.save({"weight": solution[:, :-1], "bias": solution[:, -1]}, weights_file)


def compare(patient: Patient, result: PredictionResult) -> tuple[int, float, float]:
    number, measured = patient
    return number, measured, float(torch.as_tensor(result.inference))


def report(rows: list[tuple[int, float, float]]) -> None:
    print("patient  measured  predicted")
    for number, measured, predicted in sorted(rows)[:5]:
        print(f"{number:7}  {measured:8.0f}  {predicted:9.0f}")
    error = sum(abs(measured - predicted) for _, measured, predicted in rows) / len(rows)
    print(f"Of {len(rows)} patients, predictions are off by {error:.0f} on average.")


def run(weights_file: Path, patients: Sequence[tuple[Patient, list[float]]], beam_args: Sequence[str]) -> None:
    size: dict[str, Any] = {"in_features": 10, "out_features": 1}
    handler = PytorchModelHandlerTensor(str(weights_file), model_class=torch.nn.Linear, model_params=size)
    with beam.Pipeline(options=PipelineOptions(beam_args)) as pipeline:
        _ = (
            pipeline
            | "Patients" >> beam.Create(patients)
            | "ToTensors" >> beam.MapTuple(lambda patient, row: (patient, torch.tensor(row)))
            | "Predict" >> RunInference(KeyedModelHandler(handler))
            | "Compare" >> beam.MapTuple(compare)
            | "Gather" >> beam.combiners.ToList()
            | "Report" >> beam.Map(report)
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Predict the progression of diabetes.", allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=442, help="patients to predict (default: all 442)")
    arguments, beam_args = parser.parse_known_args(argv)

    features, targets = load_diabetes(return_X_y=True)
    rows, measured = torch.tensor(features).float(), torch.tensor(targets).float()
    patients = list(zip(enumerate(measured.tolist()), rows.tolist(), strict=True))[: arguments.rows]
    with tempfile.TemporaryDirectory() as folder:
        weights_file = Path(folder) / "weights.pt"
        train(weights_file, rows, measured)
        run(weights_file, patients, beam_args)


if __name__ == "__main__":
    main()

"""The predictions with Ray Data."""

import sys

import numpy as np
import ray
import ray.data

source, target, weights_file = sys.argv[1:]
weights = np.load(weights_file)
ray.init(num_cpus=2, logging_level="ERROR", log_to_driver=False)
ray.data.DataContext.get_current().enable_progress_bars = False


def score(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    batch["score"] = np.column_stack([batch[f"f{place}"] for place in range(len(weights))]) @ weights
    return batch


ray.data.read_parquet(source).map_batches(score, batch_format="numpy").write_parquet(target)

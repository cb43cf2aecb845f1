"""The predictions with Daft."""

import sys

import daft
import numpy as np

source, target, weights_file = sys.argv[1:]
weights = np.load(weights_file)


@daft.func.batch(return_dtype=daft.DataType.float64())
def score(*columns: daft.Series) -> daft.Series:
    matrix = np.column_stack([column.to_arrow().to_numpy() for column in columns])
    return daft.Series.from_numpy(matrix @ weights)


table = daft.read_parquet(f"{source}/*.parquet")
features = [daft.col(f"f{place}") for place in range(len(weights))]
table.with_column("score", score(*features)).write_parquet(target)

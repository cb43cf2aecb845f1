"""The lower bound: only pyarrow and numpy, one file after the other."""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

source, target, weights_file = sys.argv[1:]
weights = np.load(weights_file)
Path(target).mkdir()
for file in sorted(Path(source).glob("*.parquet")):
    table = pq.read_table(file)
    matrix = np.column_stack([table[f"f{place}"].to_numpy() for place in range(len(weights))])
    pq.write_table(table.append_column("score", pa.array(matrix @ weights)), Path(target) / file.name)

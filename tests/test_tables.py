"""`bisls fit` and `bisls predict`: a table in, a verdict, a page and predictions out; hostile tables; killed half-way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from bisls.report.table_page import table_page
from bisls.tables import command, reading
from bisls.tables.fitting import verdict_of
from bisls.tables.reading import TableError, read_table
from bisls.tables.recipe import Recipe, learn
from bisls_cli import app

pd = pytest.importorskip("pandas")


def patients(rows: int = 300, noise: int = 40) -> pd.DataFrame:
    """Six columns that matter, noise, text, holes, a date, a name."""
    rng = np.random.default_rng(0)
    columns = {"age": rng.integers(20, 90, rows).astype(float), "weight": rng.normal(75, 12, rows)}
    columns |= {f"gene_{i}": rng.normal(size=rows) for i in range(noise)}
    columns |= {f"lab.{i}": rng.normal(size=rows) for i in range(4)}
    columns |= {"town": rng.choice(["north", "south", "<b>&"], rows), "id": [f"p{i}" for i in range(rows)]}
    columns |= {"constant": np.ones(rows), "seen": [f"2024-01-{1 + i % 28:02d}" for i in range(rows)]}
    frame = pd.DataFrame(columns)
    eta = (
        1.5 * frame["lab.0"] - 1.2 * frame["lab.1"] + 0.03 * (frame["age"] - 55) + 1.5 * (frame["town"] == "north") - 1
    )
    frame["outcome"] = np.where(eta + 0.7 * rng.logistic(size=rows) > 0, "ill", "well")
    frame["score"] = eta + rng.normal(size=rows)
    frame.loc[rng.choice(rows, 30), "weight"] = np.nan
    frame.loc[:9, "town"] = None
    return frame


def run(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A table of each format, and one fit."""
    place = tmp_path_factory.mktemp("tables")
    frame = patients()
    frame.drop(columns="score").to_csv(place / "patients.csv", index=False)
    frame.drop(columns="outcome").to_parquet(place / "patients.parquet")
    done = run("fit", place / "patients.csv", "--target", "outcome", "--unpenalised", "age", "--out", place / "out")
    assert done.exit_code == 0, done.output
    return place


def test_a_verdict_a_page_and_a_model(folder):
    result = json.loads((folder / "out" / "result.json").read_text())
    assert result["improved"] is True
    assert result["verdict"].startswith("Group penalties: nested log-loss 0.")
    penalties = {group["name"]: group["penalty"] for group in result["groups"]}
    assert set(penalties) == {"numbers", "what is missing", "gene", "lab", "town"}
    assert penalties["gene"] > 10 * penalties["lab"]
    assert [rival["name"] for rival in result["rivals"]] == ["LogisticRegressionCV (L2)", "LogisticRegressionCV (L1)"]
    nested = {width: loss for width, loss, _ in result["nested"]}
    assert nested[result["spread"]] < result["rivals"][0]["loss"]
    said = " | ".join(result["said"])
    for words in (
        "'weight': 30 of 300",
        "the median stands for them",
        "almost every row",
        "'id'",
        "one value only: 'constant'",
    ):
        assert words in said, words
    page = (folder / "out" / "report.html").read_text()
    assert page.index(result["verdict"]) < page.index("<h2")  # it opens with it
    assert "<b>&<" not in page
    assert "town=&lt;b&gt;&amp;" in page
    assert page == table_page(result)


def test_parquet_regression_and_groups_from_files(folder):
    groups = folder / "groups.json"
    groups.write_text(json.dumps({"labs": [f"lab.{i}" for i in range(4)], "person": ["age", "town", "weight"]}))
    out = folder / "score"
    done = run("fit", folder / "patients.parquet", "--target", "score", "--groups", groups, "--out", out)
    assert done.exit_code == 0, done.output
    result = json.loads((out / "result.json").read_text())
    assert result["task"] == "regression"
    assert [group["name"] for group in result["groups"]] == ["person", "rest", "labs"]
    as_csv = folder / "groups.csv"
    rows = [(f"lab.{i}", "labs") for i in range(4)] + [(name, "person") for name in ("age", "town", "weight")]
    as_csv.write_text("column,group\n" + "\n".join(",".join(row) for row in rows))
    again = run("fit", folder / "patients.parquet", "--target", "score", "--groups", as_csv, "--out", out)
    assert again.output.count("there from an earlier command") == 3  # the same groups


def test_predictions(folder, tmp_path):
    out = tmp_path / "predicted.csv"
    done = run("predict", folder / "out", folder / "patients.csv", "--out", out)
    assert done.exit_code == 0, done.output
    assert "compared with 'outcome' in 300 rows: accuracy 0." in done.output
    found = pd.read_csv(out)
    assert list(found.columns) == ["prediction", "probability of ill", "probability of well"]
    np.testing.assert_allclose(found.iloc[:, 1] + found.iloc[:, 2], 1.0)
    truth = pd.read_csv(folder / "patients.csv")["outcome"]
    assert (found["prediction"] == truth).mean() > 0.75
    new = pd.read_csv(folder / "patients.csv").drop(columns=["outcome", "id", "constant"]).iloc[:5]
    new["town"] = "nowhere"
    new["weight"] = np.nan
    new.to_csv(tmp_path / "new.csv", index=False)
    done = run("predict", folder / "out" / "model.json", tmp_path / "new.csv", "--out", out)
    assert done.exit_code == 0, done.output
    assert "'town': 5 rows with values that the model does not know ('nowhere')" in done.output
    assert np.isfinite(pd.read_csv(out).iloc[:, 1]).all()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("{}", "is no model that `bisls fit` wrote"),
        ("[1]", "is no model that `bisls fit` wrote"),
        ("not json", "is no model that `bisls fit` wrote"),
        (
            '{"recipe": {"columns": []}, "coef": [[1.0]], "intercept": [0.0], "task": "regression"}',
            "do not fit its 0 features",
        ),
    ],
)
def test_models_that_are_none(model, said, tmp_path, folder):
    (tmp_path / "model.json").write_text(model)
    done = run("predict", tmp_path, folder / "patients.csv", "--out", tmp_path / "x.csv")
    assert done.exit_code == 2
    assert said in done.output


def test_a_table_without_the_columns_of_the_model(tmp_path, folder):
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    done = run("predict", folder / "out", tmp_path / "t.csv", "--out", tmp_path / "x.csv")
    assert done.exit_code == 2
    assert "lacks columns of the model: 'age', 'weight'" in done.output


# --- hostile tables

NUMBERS = "\n".join(f"{i},{i * 7 % 11},{'ab'[i % 2]}" for i in range(40))
HOSTILE = {
    "empty": (b"", "is empty"),
    "spaces": (b"  \n \n", "is empty"),
    "header alone": (b"a,y\n", "has a header and no rows"),
    "no such column": (
        f"a,outcomes,t\n{NUMBERS}".encode(),
        "--target 'outcome' is no column of the table; did you mean 'outcomes'?",
    ),
    "few rows": (b"a,outcome\n1,2\n3,4\n", "2 rows with a value of 'outcome': too few"),
    "no target": (b"a,outcome\n" + b"1,\n" * 30, "has no value at all"),
    "constant target": (b"a,outcome\n" + b"1,5\n2,5\n" * 30, "is 5 in every row: there is nothing to predict"),
    "one row of a class": (b"a,outcome\n" + b"1,x\n2,y\n" * 30 + b"3,z\n", "the class 'z' of 'outcome' has one row"),
    "names as target": (
        "a,outcome\n" + "\n".join(f"{i},n{i // 2}" for i in range(100)),
        "50 different values; at most 30",
    ),
    "nothing to use": (b"a,outcome\n" + b"1,x\n1,y\n" * 30, "no column beside the target can be used"),
    "the target alone": (b"outcome\n" + b"x\ny\n" * 30, "no column beside the target can be used"),
    "bytes": (b"PK\x03\x04\x00\x00\x00", "neither CSV nor Parquet"),
    "torn parquet": (b"PAR1 and no more", "is no Parquet file that can be read"),
    "the same name twice": (b" outcome,outcome\n" + b"1,2\n" * 30, "more than one column 'outcome'"),
    "the very same name twice": (b"a,outcome,outcome\n" + b"1,2,3\n" * 30, "more than one column 'outcome'"),
    "a target too large": (
        "a,outcome\n" + "\n".join(f"{i % 7},{i}e180" for i in range(40)),
        "whose squares are no numbers",
    ),
    "infinite target": (b"a,outcome\n" + b"1,2.5\n2,inf\n3,1.5\n" * 30, "no finite numbers"),
    "a title above": (
        b"my table,,\na,b,c,outcome\n" + b"1,2,3,4\n" * 30,
        "has rows with more values than its header has names (3)",
    ),
    "one value more": (
        b"a,outcome\n" + b"1,2\n" * 30 + b"1,2,3\n",
        "Expected 2 fields in line 32, saw 3",
    ),
    "another case": (b"a,Outcome\n" + b"1,2\n" * 30, "is no column of the table; did you mean 'Outcome'?"),
    "rows of other lengths": (b'a,outcome\n1,2\n"3,4\n' * 9, "is no CSV file that can be read"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_bad_tables_get_a_sentence(case, tmp_path):
    content, said = HOSTILE[case]
    (tmp_path / "t.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    done = run("fit", tmp_path / "t.csv", "--target", "outcome", "--out", tmp_path / "out")
    assert done.exit_code == 2, done.output
    assert said in done.output.replace("\n", " ")
    assert "Traceback" not in done.output
    assert not (tmp_path / "out" / "model.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.csv", "--target", "y"], "there is no file"),
        ([".", "--target", "y"], "is a folder"),
        (["t.csv", "--target", "y", "--task", "guess"], "none of auto, classification, regression"),
        (["t.csv", "--target", "t", "--task", "regression"], "is no column of numbers"),
        (["t.csv", "--target", "y", "--groups", "nowhere"], "cannot read --groups nowhere"),
        (["t.csv", "--target", "y", "--groups", "bad.json"], "is no JSON"),
        (["t.csv", "--target", "y", "--groups", "bad.csv"], 'CSV with the columns "column" and "group"'),
        (["t.csv", "--target", "y", "--groups", "both.json"], "column 'a' is in 'p' and in 'q'"),
        (["t.csv", "--target", "y", "--groups", "strange.json"], "'z' is no column of the table"),
        (["t.csv", "--target", "y", "--groups", "target.json"], "'y' is the target, so it is in no group"),
        (["t.csv", "--target", "y", "--groups", "twice.csv"], "column 'a' is in 'p' and in 'q'"),
        (["t.csv", "--target", "y", "--groups", "none.csv"], "column 'a' has no group"),
        (["t.csv", "--target", "y", "--unpenalised", "a,zz"], "--unpenalised 'zz' is no column"),
    ],
)
def test_bad_words_get_a_sentence(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text(f"a,y,t\n{NUMBERS}")
    Path("bad.json").write_text('{"a": ')
    Path("bad.csv").write_text("name;block\na;b\n")
    Path("both.json").write_text('{"p": ["a"], "q": ["a"]}')
    Path("strange.json").write_text('{"p": ["z"]}')
    Path("target.json").write_text('{"p": ["a", "y"]}')
    Path("twice.csv").write_text("column,group\na,p\na,q\n")
    Path("none.csv").write_text("column,group\na\n")
    done = run("fit", *words)
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.replace("│", " ").split())


def test_odd_tables_are_taken(tmp_path):
    """Semicolons, Latin-1, holes everywhere, numbers as text, infinite values, a boolean, a class that is rare."""
    rng = np.random.default_rng(0)
    rows = ["größe;wert;ja;y;leer"]
    for i in range(60):
        size = "?" if i == 3 else "inf" if i == 4 else f"{rng.normal():.3f}"
        rows.append(f"{size};{'' if i % 3 else rng.normal():.5};{i % 2 == 0};{['a', 'b', 'c'][min(i % 9, 2)]};")
    (tmp_path / "t.csv").write_bytes("\n".join(rows).encode("latin-1"))
    done = run("fit", tmp_path / "t.csv", "--target", "y", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "'größe' is read as numbers" in said
    assert "left out, since they have no value at all: 'leer'" in said
    assert json.loads((tmp_path / "out" / "result.json").read_text())["classes"] == ["a", "b", "c"]


def test_decimal_commas_bars_and_an_index_with_a_name(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"a": 1e3 * rng.normal(size=60), "t": rng.choice(["1,5 m", "2"], 60), "y": rng.normal(size=60)}
    )
    frame.to_csv(tmp_path / "bars.csv", sep="|", index=False)
    frame.to_csv(tmp_path / "commas.csv", sep=";", decimal=",", index=False)
    (tmp_path / "thousands.csv").write_text("a;y\n1.234,5;-2\n12;3,25\n")
    frame.set_index("a").to_parquet(tmp_path / "index.parquet")
    for name in ("bars.csv", "commas.csv", "index.parquet"):
        pd.testing.assert_frame_equal(read_table(tmp_path / name), frame, check_dtype=False)
    assert read_table(tmp_path / "thousands.csv").to_numpy().tolist() == [[1234.5, -2.0], [12.0, 3.25]]


@pytest.mark.parametrize("form", ["plain", "utf-16", "sep", "trailing"])
def test_what_spreadsheets_write(form, tmp_path):
    """Codes keep their zeros; money, per cent and thousands are numbers; dates of which the month is not known are no text."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"zip": [f"{code:05d}" for code in rng.choice([501, 8055, 99999], 60)], "row": np.arange(60)})
    frame["price"] = [f"${value:,.2f}" for value in rng.uniform(500, 5000, 60)]
    frame["share"] = [f"{value:.1f}%" for value in rng.uniform(0, 100, 60)]
    frame["count"] = [f"{value:,}" for value in rng.integers(1000, 99999, 60)]
    frame["paid"] = [f"{1 + i % 12}/{1 + i % 27}/2021" for i in range(60)]
    frame["yes"] = rng.choice([True, False, None], 60)
    frame["y"] = rng.normal(size=60)
    text = frame.to_csv(index=False)
    if form == "sep":
        text = "sep=,\n" + text
    if form == "trailing":
        text = "".join(f"{line},\n" if number else f"{line}\n" for number, line in enumerate(text.splitlines()))
    (tmp_path / "t.csv").write_text(text, encoding="utf-16" if form == "utf-16" else "utf-8")
    read = read_table(tmp_path / "t.csv")
    assert read["zip"].tolist() == frame["zip"].tolist()
    recipe, said = learn(read, list(frame.columns[:-1]))
    assert {column.name: column.kind for column in recipe.columns} == {
        "zip": "text", "row": "number", "price": "number", "share": "number", "count": "number", "yes": "number",
    }  # fmt: skip
    wanted = frame["price"].str.strip("$").str.replace(",", "").astype(float)
    np.testing.assert_allclose(recipe.numbers(read)[0][:, recipe.features.index("price")], wanted)
    told = " ".join(said)
    for sentence in (
        "'zip' has numbers that begin with 0",
        "'row' rises from row to row",
        "look like dates",
        "'price' is read",
    ):
        assert sentence in told


def test_letters_of_another_encoding_late_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LOOK", 1)
    table = tmp_path / "t.csv"
    table.write_bytes(("town,y\n" + "Bern,1\n" * 400 + "Zürich,2\n").encode("latin-1"))
    assert read_table(table)["town"].tolist()[-1] == "Zürich"


def test_classes_and_levels_that_look_like_numbers(tmp_path):
    """Truth values stay what they are, a hole among whole numbers makes no other class, a level that is a number is known."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=60), "t": rng.choice(["1", "2", "x"], 60)})
    for name, values in {"truth": frame["a"] > 0, "whole": (frame["a"] > 0).astype(int)}.items():
        table, out = tmp_path / f"{name}.csv", tmp_path / name
        frame.assign(y=values).to_csv(table, index=False)
        assert run("fit", table, "--target", "y", "--out", out).exit_code == 0
        new = frame.assign(y=values.astype(object))
        new.loc[0, "y"] = new.loc[1, "t"] = None
        new[new["t"] != "x"].to_csv(tmp_path / "new.csv", index=False)
        done = run("predict", out, tmp_path / "new.csv", "--out", tmp_path / "p.csv")
        assert float(done.output.split("accuracy ")[1].split()[0]) > 0.9, done.output
        assert "does not know" not in done.output, done.output
        assert pd.read_csv(tmp_path / "p.csv")["prediction"].dtype == values.dtype


def test_a_long_fit_says_how_far_it_is_where_there_is_no_terminal(folder, tmp_path, monkeypatch):
    words = ["fit", folder / "patients.csv", "--target", "outcome", "--out"]
    monkeypatch.setattr(command, "SELDOM", 1e9)
    assert "nested folds, width" not in run(*words, tmp_path / "short").output
    monkeypatch.setattr(command, "SELDOM", 0.0)
    assert "penalties by group: nested folds, width 1" in run(*words, tmp_path / "long").output


def test_groups_and_factors_of_columns_that_are_left_out(folder, tmp_path):
    groups = tmp_path / "g.json"
    groups.write_text('{"people": ["age", "weight", "constant"]}')
    words = ["fit", folder / "patients.csv", "--target", "outcome", "--groups", groups, "--unpenalised", "constant"]
    done = run(*words, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output


def test_predictions_of_numbers(tmp_path):
    """With the target there and not there, with a column of nothing that is known, and never over the table itself."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=60), "b": rng.normal(size=60)}).assign(y=lambda f: f["a"] + 0.1)
    table, out, new = tmp_path / "t.csv", tmp_path / "out", tmp_path / "new.csv"
    frame.to_csv(table, index=False)
    assert run("fit", table, "--target", "y", "--out", out).exit_code == 0
    done = run("predict", out, table, "--out", tmp_path / "p.csv")
    assert "compared with 'y' in 60 rows: mean squared error" in done.output, done.output
    np.testing.assert_allclose(pd.read_csv(tmp_path / "p.csv")["prediction"], frame["y"], atol=0.05)
    frame[["b", "a"]].assign(a="x", more=1).to_csv(new, index=False)
    done = run("predict", out, new, "--out", tmp_path / "p.csv")
    assert "'a': 60 of 60 values are missing; the median stands for them" in done.output, done.output
    assert "compared" not in done.output
    before = table.read_bytes()
    done = run("predict", out, table, "--out", table)
    assert (done.exit_code, table.read_bytes()) == (2, before)
    assert "is the table itself" in done.output


def test_a_header_of_thousands_of_names_is_read_to_its_end(tmp_path):
    """Half a name may be another one; names that are compared in pairs would take minutes."""
    names = [f"gene_{i}" for i in range(10_000)]
    table = tmp_path / "t.csv"
    for more in range(3):  # wherever a block of 64 KiB ends
        header = ",".join(["n" * (more + 1), *names])
        assert len(header) > 1 << 16
        table.write_text(f"{header}\n" + "1," * 10_000 + "2\n")
        assert list(read_table(table).columns)[-2:] == names[-2:]
    table.write_text(f"{header},gene_9999\n" + "1," * 10_001 + "2\n")
    with pytest.raises(TableError, match="more than one column 'gene_9999'"):
        read_table(table)


def test_a_rival_that_cannot_be_fitted_is_said(tmp_path):
    """Two rows of a class: their folds have none of it to train on, within."""
    rows = "\n".join(f"{i * 7 % 11},{'a' if i < 2 else 'b'}" for i in range(40))
    (tmp_path / "t.csv").write_text(f"x,y\n{rows}")
    done = run("fit", tmp_path / "t.csv", "--target", "y", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "is not shown, since it cannot be fitted on these folds" in done.output
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert len(result["rivals"]) < 2
    assert any("is not shown" in sentence for sentence in result["said"])


def test_verdicts():
    nested = [[0.0, 0.112, 0.0], [0.3, 0.1, 0.001], [1.0, 0.098, 0.002]]
    better = {"improved": True, "spread": 1.0, "nested": nested, "cv_loss": 0.09}
    assert verdict_of("log-loss", better) == "Group penalties: nested log-loss 0.112 to 0.098."
    worse = {"improved": False, "spread": 0.0, "nested": [[0.0, 0.1, 0.0], [0.3, 0.11, 0.01]], "cv_loss": 0.09}
    assert verdict_of("log-loss", worse).startswith("No gain: one penalty is used (nested log-loss 0.1;")
    assert verdict_of("log-loss", {**better, "nested": []}).startswith("One group: one penalty is used")


def test_a_recipe_is_plain_data():
    frame = patients(50, 2)
    recipe, _ = learn(frame, [name for name in frame.columns if name != "outcome"])
    again = Recipe.from_dict(json.loads(json.dumps(recipe.to_dict())))
    assert again == recipe
    np.testing.assert_array_equal(again.numbers(frame)[0], recipe.numbers(frame)[0])
    assert np.isfinite(recipe.numbers(frame)[0]).all()
    assert recipe.numbers(frame)[0].shape == (50, len(recipe.features))


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_killed_half_way_and_repeated(how, tmp_path, folder):
    words = ["fit", folder / "patients.csv", "--target", "outcome", "--unpenalised", "age", "--out", tmp_path / "out"]
    command = [sys.executable, "-c", "import bisls_cli; bisls_cli.main()", *map(str, words)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        first = tmp_path / "out" / "stages" / "groups.json"
        end = time.monotonic() + 60
        while not first.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.005)
        os.kill(process.pid, how)
        _, told = process.communicate(timeout=60)
    if how is signal.SIGTERM:
        assert process.returncode == 130, told
        assert "the same command goes on from there" in told
    assert not (tmp_path / "out" / "report.html").exists()
    done = run(*words)
    assert done.exit_code == 0, done.output
    assert "penalties by group: there from an earlier command" in done.output
    for name in ("result.json", "model.json", "report.html"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / "out" / name).read_bytes()


def test_a_stage_of_another_table_is_not_believed(tmp_path, folder):
    frame = pd.read_csv(folder / "patients.csv")
    frame.loc[5, "age"] += 1
    frame.to_csv(tmp_path / "patients.csv", index=False)
    stages = tmp_path / "out" / "stages"
    stages.mkdir(parents=True)
    (stages / "groups.json").write_text((folder / "out" / "stages" / "groups.json").read_text())
    (stages / "rival-1.json").write_text('{"fingerprint": ')
    done = run("fit", tmp_path / "patients.csv", "--target", "outcome", "--groups", "none", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "there from an earlier command" not in done.output
    assert "One group: one penalty is used" in done.output


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (380, False), (1280, True), (380, True)])
def test_the_page_in_a_browser(browser, folder, width, dark):
    browser.open(folder / "out" / "report.html", width, dark)
    assert browser.complaints() == []
    assert browser.requests() == []
    assert browser.overflow() <= 0
    assert browser.worst_contrast()[0] >= 4.5
    assert len(browser.sizes(".plot > svg")) == 3
    assert all(w > 200 and h > 100 for w, h in browser.sizes(".plot > svg"))

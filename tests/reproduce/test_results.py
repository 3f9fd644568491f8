"""results.csv, the tables and the figure made from it, and the order of the queue's runs."""

from dataclasses import replace
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest

from torchcaps.recipes import list_recipes, load_recipe
from torchcaps.reproduce import queue
from torchcaps.reproduce.plan import plan
from torchcaps.reproduce.report import BLOCK, table, with_tables
from torchcaps.reproduce.results import IN_PACKAGE, Result, add_results, in_unit, read_results, summary

ROW = "zhao2019/table2/resnet20-average"
RESULT = Result(
    recipe=ROW,
    overrides="",
    data="",
    seed=0,
    value=8.5,
    unit="test error",
    parameters=269722,
    published="8.73 % test error (mean of 3 runs)",
    command=f"torchcaps train {ROW} --seed_everything=0",
    commit="abc",
    hardware="a processor, 1 thread",
    precision="32-true",
    date="2026-11-22",
    hours=7.25,
)


def test_results_are_read_as_they_were_written_and_written_once(tmp_path):
    path = tmp_path / "deep" / "results.csv"
    assert read_results(path) == []
    other = replace(RESULT, seed=1, hardware='"quoted", with a comma')
    assert add_results(path, [RESULT]) == [RESULT]
    assert add_results(path, [other, replace(RESULT, value=1.0)]) == read_results(path) == [RESULT, other]


def test_results_of_several_processes_are_all_kept(tmp_path):
    path = tmp_path / "results.csv"
    with ThreadPool(20) as pool:
        pool.map(lambda seed: add_results(path, [replace(RESULT, seed=seed)]), range(20))
    assert sorted(result.seed for result in read_results(path)) == list(range(20))


@pytest.mark.parametrize(
    ("content", "said"),
    [("recipe,seed\na,1\n", "expected the columns recipe, overrides, data, seed"), (None, "line 2: could not convert")],
)
def test_what_is_no_file_of_results(tmp_path, content, said):
    path = tmp_path / "results.csv"
    add_results(path, [RESULT])
    path.write_text(content or path.read_text().replace("8.5", "low"))
    with pytest.raises(ValueError, match=said):
        read_results(path)


def test_values_are_in_the_unit_of_the_table():
    assert (load_recipe(ROW).unit, load_recipe("quickstart").unit) == ("test error", "test accuracy")
    metrics = {"test/accuracy": 0.9151, "test/dice": 0.5}
    assert [in_unit(metrics, f"test {unit}") for unit in ("error", "accuracy", "Dice")] == [8.49, 91.51, 50]


def test_the_table_of_a_paper():
    other = replace(RESULT, data="torchcaps.data.AffineMNIST", value=5.0, hardware="another")
    text = table("zhao2019", [RESULT, other])
    published_rows = [name for name in list_recipes() if name.startswith("zhao2019/") and load_recipe(name).has_number]
    assert all(f"| `{name}` |" in text for name in published_rows)
    assert "| ours, test error | by seed | on AffineMNIST | hours |" in text
    row = f"| `{ROW}` | Table 2: 20 layers, baseline | 269,722 | {RESULT.published}"
    assert f"{row} | 8.50 % | 8.50 | 5.00 % | 7.2 |" in text
    assert "SEED`; 32-true; commit abc; 2026-11-22; a processor, 1 thread.\n" in text
    assert "The order of the samples" not in text
    assert f"numbers: {len(published_rows) - 1}</summary>" in text


def test_the_table_of_small_versions():
    runs = [replace(RESULT, recipe=f"{ROW} --small", seed=seed, value=value) for seed, value in ((1, 10.0), (0, 9.0))]
    longer = replace(runs[1], overrides="--trainer.max_steps 9", precision="bf16-mixed")
    text = table("zhao2019/table2", [*runs, longer, RESULT], small=True)
    published = "8.73 % test error (mean of 3 runs)"
    row = f"20 layers, baseline | 269,722 | {published}"
    assert "| published, full size | ours, test error | by seed | precision | hours |" in text
    assert f"| `{ROW}` | {row} | 9.50 ± 0.71 % | 9.00, 10.00 | 32-true | 14 |" in text
    assert f"| `{ROW} --trainer.max_steps 9` | {row} | 9.00 % | 9.00 | bf16-mixed | 7.2 |" in text
    assert text.count(f"`{ROW}") == 2
    assert "options in the first column; commit abc; 2026-11-22; a processor, 1 thread.\n" in text
    old = table("zhao2019/table2", [replace(longer, date="2026-11-21")], small=True)
    assert "`torchcaps train RECIPE --small --seed_everything SEED --trainer.precision bf16-mixed`, with" in old
    assert "commit abc; 2026-11-21; a processor, 1 thread.\nThe order of the samples changed" in old
    elsewhere = table("zhao2019/table2", [RESULT, replace(RESULT, overrides="--a=1", hardware="another")])
    assert "| by seed | hardware | hours |" in elsewhere
    compiled = replace(RESULT, command=f"{RESULT.command} --model.compile=true")
    text = table("zhao2019/table2", [compiled])
    assert " --model.compile=true` | " in text
    assert "SEED`, with the options in the first column; " in text
    seeds = [replace(RESULT, seed=seed, hardware=f"machine {seed > 0}") for seed in range(3)]
    assert "machine False (seed 0); machine True (seeds 1, 2)" in table("zhao2019/table2", seeds)


def test_the_list_names_the_option_of_the_hashes(tmp_path):
    (line,) = queue.table(tmp_path, plan([ROW], check_hashes=False))
    assert line[0] == f"{ROW} --data.check_hashes=false"


def test_the_list_names_the_seeds_that_are_left(tmp_path, monkeypatch):
    """A lone number would be read as how many are left."""
    monkeypatch.setattr(queue, "steps_done", lambda run, root: 1200 * run.seed)
    left = ["seeds 0, 1, 2", "seed 2"]
    for done in (), (0, 1):
        add_results(tmp_path / "results.csv", [replace(RESULT, seed=seed) for seed in done])
        (line,) = queue.table(tmp_path, plan([ROW]), again=True)
        cells = dict(zip(queue.HEADER, line, strict=True))
        assert cells["still to train"] == left.pop(0)
        assert cells["steps taken"].endswith("2,400 (seed 2)")
    assert cells["ours"] == "8.50 ± 0.00 % (2 seeds)"


def test_the_list_names_overrides_that_were_not_asked_for():
    other = replace(RESULT, overrides="--a=1", value=9.0)
    assert summary([RESULT, other], ROW) == "8.50 % (1 seed)"
    assert summary([RESULT, other], ROW, "--a=1") == "9.00 % (1 seed)"
    assert summary([RESULT], ROW, "--a=1") == "8.50 % (1 seed, no overrides)"
    assert summary([other], ROW) == "9.00 % (1 seed, --a=1)"
    assert summary([other], ROW, in_short=True) == "9.00 % (1 seed, options)"


def test_the_tables_of_the_pages_are_made_from_the_file():
    pages = (Path(__file__).parents[2] / "docs").glob("**/*.md")
    page = "".join(path.read_text(encoding="utf-8") for path in sorted(pages))
    papers = {name.partition("/")[0] for name in list_recipes() if load_recipe(name).has_number}
    assert {block[3] for block in BLOCK.finditer(page) if not block[2]} == {
        *papers,
        "quickstart",
        "compare/affine",
        "compare/clutter",
    }
    results = read_results(IN_PACKAGE)
    for result in results:
        name, *small = result.recipe.split()
        assert load_recipe(name, small == ["--small"]).unit == result.unit
    assert with_tables(page, results) == page, "run make results"
    small = {result.recipe.partition(" ")[0] for result in results if result.recipe.endswith(" --small")}
    shown = tuple(f"{block[3]}/" for block in BLOCK.finditer(page) if block[2])
    assert {name for name in small if not name.startswith(shown)} == set()


def test_the_plan():
    runs = plan()
    assert len(runs) == len(set(runs))
    recipes = {run.recipe for run in runs}
    assert recipes == {name for name in list_recipes() if load_recipe(name).has_number}
    table1 = [run for run in runs if run.recipe.startswith("zhao2019/table1/")]
    assert runs[: len(table1)] == table1
    assert [run.seed for run in table1] == sorted(run.seed for run in table1)
    assert [str(run) for run in runs[len(table1) :][:3]] == [f"sabour2017/table1/capsnet, seed {n}" for n in (0, 1, 2)]
    (tested,) = {run.tested_on for run in runs if run.recipe.startswith("zhao2019/table4/")}
    assert tested == ("torchcaps.data.AffineMNIST",)


def test_parts_of_the_plan():
    assert {run.recipe.partition("/")[0] for run in plan(["sabour2017", "li2018"])} == {"sabour2017", "li2018"}
    assert {run.recipe for run in plan([ROW])} == {ROW}
    with pytest.raises(ValueError, match="is called 'zhoa2019'; did you mean zhao2019"):
        plan(["zhoa2019"])
    with pytest.raises(ValueError, match="no paper, table or row is called 'quickstart'"):
        plan(["quickstart"])


def test_small_versions_and_tables_without_published_numbers():
    (first, *_) = runs = plan(["mazzia2021 --small"])
    assert [run.seed for run in runs] == [0, 1, 2]
    assert first.recipe == "mazzia2021/mnist/efficient-capsnet --small"
    assert first.load().is_small
    assert first.keys == [("mazzia2021/mnist/efficient-capsnet --small", "", "", 0)]
    assert first.folder(Path("runs")) == Path("runs/seed-0/mazzia2021/mnist/efficient-capsnet-small")
    compared = {run.recipe for run in plan(["compare/clutter"])}
    assert {"compare/clutter/uniform", "compare/clutter/dynamic"} < compared
    assert "heinsen2019/table1/em" not in {run.recipe for run in plan(["heinsen2019/table1"])}
    assert plan(["compare/clutter", "compare/clutter/uniform"]) == plan(["compare/clutter"])
    assert {run.recipe for run in plan(["heinsen2019/table1/em"])} == {"heinsen2019/table1/em"}

"""The attack as a command, and a seeded slice of its random losses and of its runs that are cut and resumed."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import attack as command
import attacks
import pytest
import torch
from attacks import probes, resumes

logging.getLogger("bisls").addHandler(logging.NullHandler())


# --- the command


@pytest.fixture
def call(monkeypatch, tmp_path):
    """The command, in this process."""
    monkeypatch.setattr(command.warnings, "simplefilter", lambda *_: None)
    level, threads = logging.getLogger("bisls").level, torch.get_num_threads()

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["attack.py", "--out", str(tmp_path), *arguments])
        return command.main()

    yield run
    logging.getLogger("bisls").setLevel(level)
    torch.set_num_threads(threads)


def pretend(monkeypatch, tried, n=6, **more):
    """An attack of so many cases, in the place of one of the four."""
    module = SimpleNamespace(ABOUT="numbers", cases=lambda seed: iter(range(seed, seed + n)), tried=tried, **more)
    monkeypatch.setitem(sys.modules, "attacks.junk", module)


def test_counts_are_written_with_the_call_that_repeats_what_broke(call, monkeypatch, tmp_path, capsys):
    def tried(case):
        if case == 12:
            raise ZeroDivisionError("by [nothing]")
        return "it is odd" if case % 2 else None

    pretend(monkeypatch, tried, kind=lambda case: "many" if case > 10 else "few")
    assert call("--only", "junk", "--seed", "10") == 1
    said = capsys.readouterr().out
    assert "| junk | few | 1 | 1 | 0 |" in said
    assert "| junk | many | 5 | 1 | 4 |" in said
    assert "ZeroDivisionError: by [nothing]" in said
    found = json.loads((tmp_path / "attack.json").read_text())
    assert (found["facts"]["seed"], found["facts"]["torch"]) == (10, torch.__version__)
    assert [row["case"] for row in found["results"]["failures"]] == [1, 2, 3, 5]
    assert found["results"]["failures"][0]["repeat"].endswith("attack.py --seed 10 --only junk --case 1")
    assert (tmp_path / "attack.md").read_text().startswith("| attack | cases | tried | held | broken |")
    assert call("--only", "junk", "--seed", "10", "--case", "1") == 1
    assert "it is odd" in capsys.readouterr().out
    assert call("--only", "junk", "--seed", "10", "--case", "2") == 1
    assert "Traceback" in capsys.readouterr().out
    assert call("--only", "junk", "--seed", "10", "--case", "0") == 0
    with pytest.raises(ValueError, match="`--case 6`: junk has fewer cases with seed 10"):
        call("--only", "junk", "--seed", "10", "--case", "6")


def test_what_is_not_promised_is_counted_and_no_failure(call, monkeypatch, capsys):
    pretend(monkeypatch, lambda case: "odd", promised=lambda case: False)
    assert call("--only", "junk", "--seed", "0") == 0
    assert "| junk |  (not promised) | 6 | 0 | 6 |" in capsys.readouterr().out


def test_an_interrupt_prints_the_counts_up_to_there(call, monkeypatch, capsys):
    def tried(case):
        if case == 3:
            raise KeyboardInterrupt

    pretend(monkeypatch, tried)
    assert call("--only", "junk", "--seed", "0") == 130
    assert "| junk |  | 3 | 3 | 0 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--minutes", "0"), "--minutes must be positive, got 0"),
        (("--minutes", "inf"), "--minutes must be positive"),
        (("--case", "3"), "--case needs the seed and the attack it belongs to"),
        (("--only", "nothing"), "invalid choice: 'nothing'"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(call, capsys, arguments, text):
    with pytest.raises(SystemExit, match="2"):
        call(*arguments)
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("name", attacks.NAMES)
def test_the_cases_of_a_seed_are_always_the_same_and_those_of_another_are_not(name):
    attack = attacks.load(name)
    first, again, other = (list(map(repr, islice(attack.cases(seed), 30))) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert repr(attack.case(1, 7)) == first[7]
    assert attack.about
    assert all(isinstance(attack.kind(case), str) for case in islice(attack.cases(1), 5))


# --- random losses under probes


def losses(name: str, level: str) -> probes.Losses:
    """A loss with one operation, at one level."""
    dtypes = ("float64", "float32", "float32", "float32")
    blank = probes.Losses(name.partition(": ")[0], (), (), (5, 3), ((4, 1), (4,)), dtypes, 7)
    return replace(blank, **{level: (name,)})


ODD = [f"{kind}: {name}" for kind in ("random numbers", "buffers") for name in probes.KINDS[kind]]


@pytest.mark.filterwarnings("ignore")  # some of what a loss may do is deprecated
@pytest.mark.parametrize("level", ["upper", "lower"])
@pytest.mark.parametrize("name", ODD)
def test_probes_leave_no_trace_and_draw_the_same_numbers_again(name, level):
    assert probes.tried(losses(name, level)) is None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(40))
def test_probes_of_random_losses_leave_no_trace(number):
    assert probes.tried(attacks.load("probes").case(2026, number)) is None


@pytest.mark.filterwarnings("ignore")
def test_probes_of_random_losses_seldom_fail():
    """Or the attack would compare errors."""
    failed = 0
    for case in islice(probes.cases(2026), 40):
        world = probes.World(case)
        with torch.no_grad():
            failed += any("Error: " in probes._outcome(look) for look in probes.looks(world).values())
    assert failed < 4


def test_a_trace_would_be_seen(monkeypatch):
    monkeypatch.setattr(probes.bisls.Bilevel, "probing", lambda self, moment: nullcontext())
    assert "two probes lower from one moment differ" in probes.tried(losses("random numbers: numpy", "lower"))
    assert "the probe lower leaves a trace: buffer norm.running_mean" in probes.tried(
        losses("buffers: batch norm", "lower")
    )


# --- runs that are cut and resumed

PLAIN = resumes.Composition(
    method="BiSLS",
    upper="quadratic",
    lower="quadratic",
    extras=(),
    container="tuple",
    upper_data="a callable",
    lower_data="a loader",
    step_data=None,
    sizes=(5,),
    steps=7,
    every=2,
    cuts=((3, "callback"), (5, "loss")),
    bounded=False,
    double=True,
    evaluate=1,
    seed=5,
)
EQUAL = {"upper_data": "fresh and equal", "cuts": ((3, "steps"),)}
MANY = {"upper_data": "a callable with a state", "lower_data": "a loader of its own", "sizes": (2, 3, 4, 5, 6, 7)}
VARIANTS = {
    **{f"batches as {name}": {"container": name} for name in resumes.CONTAINERS},
    **{f"losses with {name}": {"extras": (name,)} for name in resumes.EXTRAS},
    **{f"upper: {name}": {"upper_data": name} for name in resumes.DATA},
    **{f"lower: {name}": {"lower_data": name} for name in resumes.DATA},
    **{f"judged by {name}": {"step_data": name} for name in resumes.DATA},
    "fresh and equal upper batches": EQUAL,
    "fresh and equal upper batches, below too": {**EQUAL, "lower_data": "fresh and equal"},
    "a validation loader of one batch": {**EQUAL, "upper_data": "a loader of one batch"},
    "many shapes": MANY,
    **{
        f"{name} below ends": {"lower_data": name, "cuts": ((3, "end of data"),), "seed": 5 + i}
        for name in resumes.ENDING
        for i in range(3)
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_that_is_cut_and_resumed_is_the_run(variant):
    assert resumes.tried(replace(PLAIN, **VARIANTS[variant])) is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(8))
def test_random_runs_are_resumed_bit_for_bit(number):
    assert resumes.tried(attacks.load("resumes").case(2026, number)) is None


def test_a_resumed_run_that_differs_would_be_seen(monkeypatch):
    monkeypatch.setattr(resumes.Anneal, "load_state_dict", lambda self, state: None)
    assert "in the one that was cut" in resumes.tried(
        replace(PLAIN, extras=("annealed",), steps=4, cuts=((2, "steps"),))
    )

"""Runs that are asked for, kept, resumed and judged; the command around them."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from typer.testing import CliRunner
from watching import Quiet

import bisls_cli as cli
from bisls import console, optim
from bisls._files import write_whole
from bisls.data import DataError
from bisls.experiments import NAMES, Plan, Store, bilevel, figure, reproduce, sweep
from bisls.experiments.base import Config, Figure, Findings, RunRecord
from bisls.experiments.bilevel import Distillation, Representation
from bisls.experiments.judging import alike, at_most, below, both, claim, mean, yes
from bisls.experiments.method import Method
from bisls.experiments.rates import RateRun
from bisls.fit import fit
from bisls.hypergrad import Implicit
from bisls.linear import CG
from bisls.methods import Alternating, BiSLS, BiSPS
from bisls.outcome import Judgement, Outcome, Panel, Series
from bisls.problem import Bilevel
from bisls.steps import Constant, Keep, Restart

runner = CliRunner()
PAPER = Method(BiSLS.paper)


@dataclass(frozen=True)
class Made(Config):
    """A run that only counts how often it is made."""

    kind: ClassVar[str] = "made"
    value: float = 1.0
    made: ClassVar[list] = []

    @property
    def work(self):
        return self.value

    def execute(self):
        self.made.append(self)
        return RunRecord(self.described(), {"loss": (self.value, float("inf"), float("nan"))}, {"end": self.value})


def two_stages(plan):
    first = yield [Made(seed, value) for value in (3.0, 1.0, 2.0) for seed in plan.each_seed]
    best = min(record.numbers["end"] for record in first)
    second = yield [Made(seed, best + 10) for seed in plan.each_seed]
    numbers = str([record.numbers["end"] for record in (*first, *second)])
    return Findings((), (claim("it is so", yes(best == 1.0), numbers),), {"a": "b"})


def one_stage(plan):
    records = yield [Made(0, 1.0)]
    return Findings((), (claim("one", yes(records[0].numbers["end"] == 1.0), ""),), {})


TWO = Figure("two", "Two stages", "", two_stages)
ONE = Figure("one", "One stage", "", one_stage)


@pytest.fixture(autouse=True)
def forget():
    Made.made.clear()


def test_a_figure_is_sent_what_it_asks_for_in_its_order(tmp_path):
    watcher = Quiet()
    two, one = reproduce([TWO, ONE], Plan("smoke", 2), Store(tmp_path), watcher)
    assert two.verdicts[0].numbers == "[3.0, 3.0, 1.0, 1.0, 2.0, 2.0, 11.0, 11.0]"
    assert [[run.value for run in runs] for runs in watcher.asked] == [
        [3.0, 3.0, 2.0, 2.0, 1.0, 1.0],
        [11.0, 11.0],
    ]  # the long ones first
    assert len(Made.made) == 8  # what both ask for is run once
    assert [one.verdicts[0].judgement, two.verdicts[0].judgement] == [Judgement.HOLDS] * 2
    assert watcher.names == ["one", "two"]
    assert two.facts["runs"] == 8
    assert two.facts["seeds"] == [0, 1]
    assert two.command == "bisls reproduce two --scale smoke --seeds 2"


def test_a_finished_run_is_never_repeated(tmp_path):
    first = reproduce([TWO], Plan("smoke", 1), Store(tmp_path), Quiet())
    made = len(Made.made)
    watcher = Quiet()
    again = reproduce([TWO], Plan("smoke", 1), Store(tmp_path), watcher)
    assert len(Made.made) == made
    assert watcher.found == 4
    assert first[0].to_json() == again[0].to_json()
    reproduce([TWO], Plan("smoke", 2), Store(tmp_path), Quiet())
    assert len(Made.made) == 2 * made  # the new seed alone


def test_a_run_that_raises_leaves_out_its_figures_and_no_other(tmp_path, monkeypatch):
    def fail(self):
        if self.value == 3.0:
            raise MemoryError("no room")
        return execute(self)

    execute = Made.execute
    monkeypatch.setattr(Made, "execute", fail)
    watcher = Quiet()
    outcomes = reproduce([TWO, ONE], Plan("smoke", 1), Store(tmp_path), watcher)
    assert [outcome.name for outcome in outcomes] == ["one"]
    assert watcher.broken == [(Made(0, 3.0), "MemoryError: no room")]
    assert watcher.left_out == [("two", "MemoryError: no room")]
    assert len(list(tmp_path.glob("*.json"))) == 2
    monkeypatch.setattr(Made, "execute", execute)
    Made.made.clear()
    reproduce([TWO], Plan("smoke", 1), Store(tmp_path), Quiet())
    assert [run.value for run in Made.made] == [3.0, 11.0]


def test_a_run_leaves_the_process_as_it_was(tmp_path):
    before = logging.getLogger("bisls").level, torch.get_num_threads()
    reproduce([ONE], Plan("smoke", 1), Store(tmp_path), Quiet())
    assert (logging.getLogger("bisls").level, torch.get_num_threads()) == before


def test_a_figure_may_ask_for_nothing(tmp_path):
    def nothing(plan):
        assert (yield []) == []
        return Findings((), (), {})

    outcomes = reproduce([Figure("none", "", "", nothing)], Plan("smoke", 1), Store(tmp_path), Quiet())
    assert outcomes[0].facts["runs"] == 0


def test_facts_are_those_of_the_records(tmp_path):
    (two,) = reproduce([TWO], Plan("smoke", 2), Store(tmp_path), Quiet())
    assert two.facts["seeds"] == [0, 1]
    assert two.facts["versions"]["torch"] == "unknown"  # these records have none


@pytest.mark.parametrize("content", ["", "{", "[]", '{"curves": 3}', "null"])
def test_a_record_that_cannot_be_read_is_made_again(tmp_path, content):
    store, config = Store(tmp_path), Made(0, 4.0)
    store.put(config, config.execute())
    record = store.get(config)
    assert record.curves["loss"][:2] == (4.0, float("inf"))
    assert np.isnan(record.curves["loss"][2])
    store.path(config).write_text(content)
    assert store.get(config) is None


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_whole(path, "old")

    def full(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_key_is_of_one_configuration():
    configs = [
        Made(0),
        Made(1),
        Made(0, 2.0),
        Representation(0, PAPER),
        Distillation(0, PAPER),
        Representation(0, PAPER, steps=5),
        Representation(0, PAPER.but(hypergrad=Implicit(CG(iters=5)))),
        Representation(0, Method(Alternating)),
        RateRun(0),
        RateRun(0, rule=optim.SLSB),
    ]
    assert len({config.key for config in configs}) == len(configs)
    assert Made(0, 2.0).key == Made(0, 2.0).key
    # one method has one text, however it is written
    assert Representation(0, PAPER).key == Representation(0, PAPER.but(slack=0.0, alpha=10.0)).key


def test_a_new_option_keeps_the_runs_that_were_made_without_it():
    """Of the configuration, and of a part that it holds."""

    @dataclass(frozen=True)
    class Smooth:
        factor: float = 2.0
        power: float = 1.0

    def make(problem, rule=None):
        return problem

    def make_later(problem, rule=None, patience=3):
        return problem

    @dataclass(frozen=True)
    class Later(Made):
        more: float = 0.0

    make_later.__qualname__ = make.__qualname__
    before = Method(make, rule=Smooth(3.0))

    @dataclass(frozen=True)
    class Smooth:
        factor: float = 2.0
        power: float = 1.0
        decay: float = 0.0

    assert repr(Method(make_later, rule=Smooth(3.0))) == repr(before) == f"{make.__qualname__}(rule=Smooth(factor=3.0))"
    assert Method(make_later, rule=Smooth(3.0), patience=4) != before
    assert Later(0, 2.0).key == Made(0, 2.0).key
    assert Later(0, 2.0, 1.0).key != Made(0, 2.0).key


def test_a_run_survives_the_way_to_a_worker():
    """Also those whose method holds parts: pickled, the key is the same, and so is what the method makes."""
    asked = [config for name in NAMES for config in next(figure(name).ask(Plan("smoke", 1)))]
    for config in asked:
        again = pickle.loads(pickle.dumps(config))
        assert again == config
        assert again.key == config.key
        json.dumps(config.described())
    assert {config.kind for config in asked} == {"single", "rate", "distillation", "representation"}


def test_the_paper_methods_are_those_of_the_package():
    """A figure's BiSLS-Adam is `BiSLS.paper` itself, with the figure's settings."""
    asked = []
    for name in NAMES:
        asked += next(figure(name).ask(Plan("paper", 1)))
    methods = {config.method.name for config in asked if config.kind in ("distillation", "representation")}
    assert methods == {"BiSLS", "BiSLS.paper", "BiSPS", "Alternating"}


def test_the_paper_searches_at_one_level_alone():
    """A figure of the paper has a constant step at the other one: no trial points are made there, so y responds to none."""
    x, y = (torch.tensor([value], dtype=torch.float64, requires_grad=True) for value in (0.5, 2.0))
    problem = Bilevel(lambda _: ((y - 3) ** 2).sum(), lambda _: ((y - x) ** 2).sum() + y.sum(), [x], [y])
    lower = BiSLS.paper(problem, upper_step=Constant(0.01), lower_restart=Restart(), lower_iters=3).step(None, None)
    assert (lower.alpha, lower.upper_checks) == (0.01, 0)
    assert lower.lower_checks > 3
    upper = BiSLS.paper(problem, lower_step=Constant(0.1), lower_iters=3).step(None, None)
    assert (upper.beta, upper.lower_checks) == (0.1, 0)
    assert upper.upper_checks >= 1
    own = BiSLS.paper(problem, restart=Keep(), lower_restart=Restart())
    assert "restart=Keep()" in repr(own)
    assert "restart=Restart()" in repr(own)
    with pytest.raises(ValueError, match="upper_step"):
        BiSLS.paper(problem, upper_step=0.1)


def test_two_samples_are_judged_by_batches_of_their_own(monkeypatch):
    """Two samples: `fit` draws the judge from a source of its own; the upper batches are those of one sample."""
    seen = []

    def watched(solver, upper, lower, *arguments, step_data=None, **more):
        seen.append((upper, step_data))
        return fit(solver, upper, lower, *arguments, step_data=step_data, **more)

    monkeypatch.setattr(bilevel, "fit", watched)
    method = Method(BiSPS, alpha=10.0, lower_step=Constant(1e-2), hypergrad=Implicit(CG(iters=2)))
    short = {"data": "digits", "batch": 8, "steps": 4, "lower_iters": 2, "every": 2}
    one, two = (Distillation(0, method.but(samples=n), **short).execute() for n in (1, 2))
    assert seen[0][1] is None
    upper, judges = seen[1]
    assert judges.seed != upper.seed
    assert judges.batch_size == upper.batch_size == 8
    assert one.curves["upper_value"][0] == two.curves["upper_value"][0]  # the first upper batch is the same
    assert one.curves["alpha"] != two.curves["alpha"]  # the steps are judged on others


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"steps": 0}, "steps"),
        ({"data": "cifar"}, "data"),
        ({"lower_iters": 0}, "lower_iters"),
        ({"batch": -1}, "batch"),
    ],
)
def test_a_configuration_is_checked(wrong, named):
    with pytest.raises(ValueError, match=named):
        Representation(0, PAPER, **wrong)


def test_a_method_is_set_by_names_that_it_has():
    with pytest.raises(ValueError, match=r"`Method\(BiSLS.paper, ...\)`: got an unexpected keyword argument 'samples'"):
        PAPER.but(samples=2)
    with pytest.raises(ValueError, match="rule"):
        RateRun(0, theorem=3)


def test_plans_are_checked():
    with pytest.raises(ValueError, match="scale"):
        Plan("huge", 1)
    with pytest.raises(ValueError, match="seeds"):
        Plan("quick", 0)


def test_rules_of_judging():
    inf = float("inf")
    assert at_most([1.0, 1.2], [1.3, 1.1]) is Judgement.HOLDS
    assert at_most([1.31, 1.1], [1.3, 1.1]) is Judgement.UNDECIDED
    assert at_most([2.0, 2.1], [1.0, 1.1]) is Judgement.FAILS
    assert at_most([1.0], [inf]) is Judgement.HOLDS
    assert at_most([inf], [1.0]) is Judgement.FAILS
    assert at_most([inf], [inf]) is Judgement.UNDECIDED
    assert below([1.0, 1.1], [2.0, 2.1]) is Judgement.HOLDS
    assert below([1.0, 1.3], [1.05, 1.35]) is Judgement.UNDECIDED
    assert below([2.0], [1.0]) is Judgement.FAILS
    assert below([1.001], [1.0]) is Judgement.UNDECIDED
    assert below([inf], [inf]) is Judgement.UNDECIDED
    assert alike({"a": [1.0], "b": [1.1]}, 0.2) == (Judgement.HOLDS, 1.1)
    assert alike({"a": [1.0], "b": [2.0]}, 0.2)[0] is Judgement.FAILS
    assert alike({"a": [1.0], "b": [inf]}, 0.2) == (Judgement.FAILS, inf)
    assert alike({"a": [1.0, 2.0], "b": [1.0, 2.8]}, 0.2)[0] is Judgement.UNDECIDED
    assert both(Judgement.HOLDS, Judgement.UNDECIDED) is Judgement.UNDECIDED
    assert both(Judgement.HOLDS, Judgement.FAILS, Judgement.UNDECIDED) is Judgement.FAILS
    assert both() is Judgement.UNDECIDED
    assert mean([1.0, float("nan")]) == inf


def test_an_outcome_survives_json():
    series = Series("s", (1.0, "b"), (1.0, float("inf")), low=(0.5, 0.5), high=(2.0, float("-inf")))
    one = Outcome(
        "n",
        "t",
        "p",
        "s",
        "smoke",
        {"a": "b"},
        (Panel("t", "x", "y", (series,), ylim=(0.0, 1.0)),),
        (),
        facts={"k": [1]},
    )
    assert Outcome.from_json(one.to_json()) == one
    gap = Outcome.from_json(
        Outcome(
            "n", "", "", "", "quick", {}, (Panel("", "", "", (Series("", (1.0,), (float("nan"),)),)),), ()
        ).to_json()
    )
    assert np.isnan(gap.panels[0].series[0].y[0])


def test_every_figure_is_known_and_says_what_the_paper_says():
    for name in NAMES:
        one = figure(name)
        assert one.name == name
        assert len(one.paper) > 30
        assert one.title


# --- the command


def invoke(*arguments):
    return runner.invoke(cli.app, list(arguments))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("reproduce", "qudratics"), "did you mean quadratics"),
        (("reproduce", "--scale", "huge"), "smoke, quick, standard, paper"),
        (("reproduce", "--reading", "tea leaves"), "paper, penalised, pool, once, divided, second"),
        (("reproduce", "--backend", "slurm"), "local, dask, ray"),
        (("reproduce", "--seeds", "0"), "--seeds"),  # the rest of the sentence is typer's, and changes
        (("sensitivity", "chess"), "penalties"),
        (("sensitivity", "--method", "magic"), "bisls"),
        (("bench", "magic"), "regret"),
    ],
)
def test_misuse_ends_with_2_and_a_hint(arguments, said):
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert said in re.sub(r"[│\s]+", " ", result.output)
    assert "Traceback" not in result.output


def test_lists_name_everything():
    listed = invoke("list").output
    assert all(name in listed for name in NAMES)
    assert "regret" in invoke("bench").output


def test_every_command_has_help_with_examples():
    for command in ("demo", "list", "data", "reproduce", "report", "fit", "predict", "sensitivity", "bench"):
        result = invoke(command, "--help")
        assert result.exit_code == 0
        assert f"bisls {command}" in re.sub(r"\s+", " ", result.output), command


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    result = invoke(
        "reproduce", "quadratics", "--scale", "smoke", "--jobs", "1", "--out", str(tmp_path / "file" / "out")
    )
    assert result.exit_code == 1
    assert "cannot write to --out" in result.output


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    def full(self, config, record):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Store, "put", full)
    result = invoke("reproduce", "quadratics", "--scale", "smoke", "--jobs", "1", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "No space left on device" in result.output
    assert "finished runs are kept" in result.output


def test_ctrl_c_is_said(tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep.Pool, "runs", stop)
    result = invoke("reproduce", "quadratics", "--scale", "smoke", "--out", str(tmp_path))
    assert result.exit_code == 130
    assert "the same command goes on" in result.output


def test_figures_without_data_are_left_out_and_the_others_made(tmp_path, monkeypatch):
    def unreachable(name, *_):
        raise DataError(f"no source of {name} answers; put the file there")

    def none(plan):
        yield []
        return Findings((), (claim("nothing", yes(True), ""),), {})

    monkeypatch.setattr(console, "fetch", unreachable)
    monkeypatch.setattr(
        console, "chosen_figures", lambda names: [Figure("a", "A", "", none, ("mnist",)), Figure("b", "B", "", none)]
    )
    result = invoke("reproduce", "--scale", "quick", "--out", str(tmp_path))
    assert result.exit_code == 1
    said = re.sub(r"\s+", " ", result.output)
    assert "no source of mnist answers; put the file there" in said
    assert "left out: a (the reasons are above)" in said
    assert [path.stem for path in (tmp_path / "outcomes").iterdir()] == ["b"]


def test_a_folder_without_outcomes_yet_has_no_scale(tmp_path):
    (tmp_path / "outcomes").mkdir()
    (tmp_path / "outcomes" / ".a.json.x1").write_text("{")  # what a command that was killed may leave
    console.of_one_kind(tmp_path, "smoke", "paper")


def test_one_folder_has_one_scale(tmp_path):
    write_whole(tmp_path / "outcomes" / "a.json", Outcome("a", "A", "", "", "paper", {}, (), ()).to_json())
    result = invoke("reproduce", "quadratics", "--scale", "smoke", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "has outcomes of the scale 'paper'" in re.sub(r"[│\s]+", " ", result.output)


def test_a_cluster_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", "tcp://127.0.0.1:9")
    monkeypatch.setenv("DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT", "1s")
    result = invoke("reproduce", "quadratics", "--scale", "smoke", "--backend", "dask", "--out", str(tmp_path))
    assert result.exit_code == 1
    assert "no scheduler answers at tcp://127.0.0.1:9" in result.output


def test_sensitivity_of_a_task(tmp_path):
    result = invoke("sensitivity", "quadratic", "--steps", "15", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "spread" in result.output
    report = json.loads((tmp_path / "sensitivity-quadratic-bisls.json").read_text())
    assert report["spread"] < 1.2
    assert (tmp_path / "sensitivity-quadratic-bisls.png").stat().st_size > 1000


COMMAND = [sys.executable, "-m", "bisls", "reproduce", "quadratics", "trajectories", "--scale", "smoke", "--seeds", "3"]


def without_times(page):
    """The page but for how long the runs took."""
    return re.sub(r"(?i)(cpu.seconds</dt>\s*<dd>)[\d.,]+", r"\1", page)


@pytest.mark.slow
def test_a_command_that_is_killed_goes_on_where_it_was(tmp_path):
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run([*COMMAND, "--jobs", "1", "--out", str(whole)], check=True, timeout=300, **quiet)
    total = len(list((whole / "runs").glob("*.json")))
    assert total >= 6
    finished: dict[Path, int] = {}
    for goal in (2, total // 2):
        process = subprocess.Popen([*COMMAND, "--jobs", "1", "--out", str(killed)], **quiet)
        while len(list((killed / "runs").glob("*.json"))) < goal and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        there = {path: path.stat().st_mtime_ns for path in (killed / "runs").glob("*.json")}
        assert all(there[path] == when for path, when in finished.items())
        finished = there
    assert len(finished) >= 2
    subprocess.run([*COMMAND, "--jobs", "1", "--out", str(killed)], check=True, timeout=300, **quiet)
    there = {path: path.stat().st_mtime_ns for path in (killed / "runs").glob("*.json")}
    assert all(there[path] == when for path, when in finished.items())  # no finished run was repeated
    assert {path.name for path in there} == {path.name for path in (whole / "runs").glob("*.json")}
    pages = [without_times((folder / "report.html").read_text()) for folder in (whole, killed)]
    assert "quadratics" in pages[0]
    assert pages[0] == pages[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_is_stopped_leaves_nobody_behind(tmp_path, kind):
    """Workers end with the command; what was finished is there."""
    command = [*COMMAND, "--jobs", "2", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    while len(list((tmp_path / "runs").glob("*.json"))) < 2 and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(kind)
    _, said = process.communicate(timeout=60)
    if process.returncode == 0:
        pytest.skip("it was done before it could be stopped")
    assert process.returncode == 130, said
    assert "the same command goes on from there" in said
    deadline = time.monotonic() + 20
    while _members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _members(process.pid) == []


@pytest.mark.slow
@pytest.mark.parametrize("when", ["workers start", "runs are made"])
def test_a_command_that_is_killed_leaves_nobody_behind(tmp_path, when):
    """Nobody tells the workers: they notice. Those that have not yet done anything, too."""
    command = [*COMMAND, "--jobs", "2", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment, start_new_session=True
    )
    while process.poll() is None:
        if when == "workers start" and len(_members(process.pid)) > 3:
            break
        if when == "runs are made" and len(list((tmp_path / "runs").glob("*.json"))) >= 2:
            break
        time.sleep(0.005)
    assert process.poll() is None, "it was done before it could be killed"
    assert len(_members(process.pid)) > 2  # workers, and joblib's keeper of files
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30  # a worker that has just started imports torch before it looks
    while (left := _members(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def _members(session):
    """The processes of a session that are alive."""
    alive = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            after = status.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(after[3]) == session and after[0] != "Z":
            alive.append(int(status.parent.name))
    return alive


CLUSTERS = ["dask", pytest.param("ray", marks=pytest.mark.skipif(find_spec("ray") is None, reason="not installed"))]


def swept(backend, out):
    """The runs of a small sweep by the command, as files."""
    command = [*COMMAND[:4], "quadratics", "--scale", "smoke", "--seeds", "2", "--jobs", "2", "--backend", backend]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return {path.name: json.loads(path.read_text()) for path in (out / "runs").glob("*.json")}


@pytest.fixture(scope="module")
def swept_here(tmp_path_factory):
    return swept("local", tmp_path_factory.mktemp("local"))


@pytest.mark.slow
@pytest.mark.parametrize("backend", CLUSTERS)
def test_a_cluster_runs_the_same_sweep(backend, swept_here, tmp_path):
    there = swept(backend, tmp_path)
    assert swept_here.keys() == there.keys()
    assert all(own["curves"] == there[name]["curves"] for name, own in swept_here.items())


@pytest.mark.slow
@pytest.mark.parametrize("backend", CLUSTERS)
def test_a_worker_that_is_killed_loses_nothing_and_nothing_comes_twice(backend, tmp_path):
    """In a process of its own: a cluster leaves threads behind. What a dead worker had begun is begun again, and that alone.

    A run of dask's that has ended is made again where its result died with the worker before anybody had it.
    """
    script = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # what the workers begin with
from mortal import Mortal
from bisls.experiments.backends import Pool
if __name__ == "__main__":
    configs = [Mortal(seed, {str(tmp_path)!r}, seed == 3) for seed in range(8)]
    with Pool(2, {backend!r}) as pool:
        made = [config.seed for config, record in pool.runs(configs) if record.curves["f"] == (config.seed,)]
    print(sorted(made))
"""
    file = tmp_path / "sweep.py"
    file.write_text(script)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip().endswith(str(list(range(8)))), done.stderr
    began, ended = (
        [len((tmp_path / f"{what}.{k}").read_text().split()) for k in range(8)] for what in ("began", "ended")
    )
    assert ended == [1] * 8 if backend == "ray" else 8 <= sum(ended) <= 10
    assert began[3] >= 2
    assert sum(began) <= (9 if backend == "ray" else 12)

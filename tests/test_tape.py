"""A loss played from its tape is the loss: to the last bit, or not at all."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import bisls
from bisls.evaluate import tape as taping
from bisls.evaluate import unit_vectors
from bisls.evaluate.player import CHANGES, KINDS
from bisls.evaluate.program import NotPlayable
from bisls.evaluate.tape import Tape
from bisls.oracle import Oracle


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def logistic(tape: bool, penalty=torch.sigmoid, dtype=torch.float32):
    """Penalties of a logistic regression: sums, products, a matrix, and a loss that torch has fused."""
    rng = generator()
    features, labels = torch.randn(60, 5, generator=rng, dtype=dtype), (torch.rand(60, generator=rng) > 0.5).to(dtype)
    x = torch.linspace(-1, 1, 5, dtype=dtype).requires_grad_()
    w = torch.linspace(1, 2, 5, dtype=dtype).requires_grad_()

    def fit(rows):
        return functional.binary_cross_entropy_with_logits(features[rows] @ w, labels[rows])

    problem = bisls.Bilevel(fit, lambda rows: fit(rows) + 0.5 * (penalty(x) * w * w).sum(), [x], [w], tape=tape)
    return problem, slice(40, 60), slice(0, 40)


def network(tape: bool):
    """Weights of samples, for a network of several tensors with batches that are dictionaries."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    weights = torch.zeros(8, requires_grad=True)
    rows = {"input": torch.randn(8, 3), "label": torch.arange(8) % 2}

    def lower(batch):
        each = functional.cross_entropy(model(batch["input"]), batch["label"], reduction="none")
        return (weights.softmax(0) * each).sum() + 0.01 * sum((p**2).sum() for p in model.parameters())

    def upper(batch):
        return functional.cross_entropy(model(batch["input"]), batch["label"])

    return bisls.Bilevel(upper, lower, [weights], model.parameters(), tape=tape), rows, rows


def convolution(tape: bool):
    """Pictures as upper parameters: convolution, pooling, reshaping."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2 * 2 * 2, 2))
    pictures = torch.randn(4, 1, 6, 6, requires_grad=True)
    labels, real = torch.arange(4) % 2, (torch.randn(6, 1, 6, 6), torch.arange(6) % 2)

    def lower(_):
        return functional.cross_entropy(model(pictures), labels) + 0.05 * sum((p**2).sum() for p in model.parameters())

    def upper(batch):
        return functional.cross_entropy(model(batch[0]), batch[1])

    return bisls.Bilevel(upper, lower, [pictures], model.parameters(), tape=tape), real, None


def half(tape: bool):
    """Parameters of two types."""
    a, b = torch.full((3,), 0.5, dtype=torch.bfloat16, requires_grad=True), torch.full((2,), 1.5, requires_grad=True)
    x = torch.tensor([1.0, -2.0], requires_grad=True)

    def lower(_):
        return ((a.float() - x[0]) ** 2).sum() + ((b - x) ** 2 * torch.tensor([1.0, 3.0])).sum()

    return (
        bisls.Bilevel(lambda _: (a.float() ** 2).sum() + ((b - 3) ** 2).sum(), lower, [x], [a, b], tape=tape),
        None,
        None,
    )


CASES = {"logistic": logistic, "network": network, "convolution": convolution, "half": half}
METHODS = {
    "Alternating": lambda p: bisls.Alternating(p, lower_iters=5),
    "paper": lambda p: bisls.BiSLS.paper(p, lower_iters=5),
    "BiSLS": lambda p: bisls.BiSLS(p, lower_iters=5),
    "BiSLS by products": lambda p: bisls.BiSLS(
        p, lower_iters=5, hypergrad=bisls.Implicit(bisls.CG(tol=1e-3)), polish=None
    ),
    "BiSPS": lambda p: bisls.BiSPS(p, lower_iters=5),
    "unrolled": lambda p: bisls.Alternating(p, lower_iters=5, hypergrad=bisls.Unrolled(3, step=0.01)),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case == "convolution")) for case in CASES]
)
def test_played_and_called_losses_give_the_same_run(case, method):
    ends = []
    for tape in (True, False):
        problem, upper, lower = CASES[case](tape)
        solver = METHODS[method](problem)
        records = [solver.step(upper, lower) for _ in range(6)]
        played = solver.oracle._lower_players._players
        assert len(played) == tape  # it was really played, or really called
        ends.append((repr(records), problem.x.read(), problem.y.read()))
    assert torch.equal(ends[0][1], ends[1][1])
    assert torch.equal(ends[0][2], ends[1][2])
    assert ends[0][0] == ends[1][0]


@pytest.mark.parametrize("case", CASES)
def test_every_product_agrees_with_autograd(case):
    problem, _, lower = CASES[case](True)
    taped, plain = Oracle(problem, tape=True), Oracle(problem)
    with torch.no_grad():
        played, called = taped.lower_graph(lower), plain.lower_graph(lower)
        rng = generator(3)
        v, d = (
            torch.randn(n, generator=rng, dtype=t)
            for n, t in ((problem.y.numel, problem.y.dtype), (problem.x.numel, problem.x.dtype))
        )
        assert torch.equal(played.grad, called.grad)
        assert played.value == called.value
        for mine, true in (
            (played.hessian(v), called.hessian(v)),
            (played.mixed(v), called.mixed(v)),
            (played.mixed_transposed(d), called.mixed_transposed(d)),
        ):
            assert true.norm() > 0
            assert torch.equal(mine, true)


def test_a_small_hessian_is_written_out_once_and_is_right():
    problem, _, lower = logistic(True, dtype=torch.float64)
    oracle = Oracle(problem, tape=True)
    with torch.no_grad():
        graph = oracle.lower_graph(lower)
        matrix = graph.hessian.matrix()
        assert matrix is graph.hessian.matrix()
        assert oracle.cost.hessian_products == 5
        columns = torch.stack([graph.hessian(column) for column in torch.eye(5, dtype=torch.float64)])
        torch.testing.assert_close(matrix, columns, rtol=1e-12, atol=1e-14)
        b = torch.linspace(1, 2, 5, dtype=torch.float64)
        solution = bisls.Direct().solve(graph.hessian, b, {})
        torch.testing.assert_close(graph.hessian(solution.z), b, rtol=1e-10, atol=0)
        assert solution.residual < 1e-12


@pytest.mark.parametrize("case", CASES)
def test_columns_at_once_are_those_of_torchs_own_batched_call(case):
    problem, _, lower = CASES[case](True)
    units = unit_vectors(problem.y)
    if units is None:  # too many, or of several types: never written out
        assert problem.y.numel > 64 or not problem.y.alike
        return
    with torch.no_grad():
        played, called = (Oracle(problem, tape=tape).lower_graph(lower)._products for tape in (True, False))
        truth = torch.autograd.grad(called._graph, called._y, units, retain_graph=True, is_grads_batched=True)
        for products in (played, called):
            mine = products.together(units)
            assert mine is not None
            assert all(torch.equal(one, two) for one, two in zip(mine, truth, strict=True))


@pytest.mark.parametrize("tape", [True, False])
def test_a_lower_loss_without_second_derivatives_has_a_hessian_of_zeros(tape):
    x, y = torch.tensor([1.0], requires_grad=True), torch.tensor([0.5, 2.0], requires_grad=True)
    problem = bisls.Bilevel(lambda _: y.sum(), lambda _: (y * x).sum(), [x], [y], tape=tape)
    with torch.no_grad():
        matrix = Oracle(problem, tape).lower_graph(None).hessian.matrix()
    assert torch.equal(matrix, torch.zeros(2, 2))


@pytest.mark.parametrize("tape", [True, False])
def test_a_lower_parameter_without_numbers_is_no_obstacle(tape):
    x, nothing, y = (torch.full(shape, 0.5, requires_grad=True) for shape in ((), (0,), (1,)))
    problem = bisls.Bilevel(
        lambda _: ((y - 2.0) ** 2).sum() + nothing.sum(), lambda _: ((y - x) ** 2).sum() + nothing.sum(), [x], [nothing, y],
        tape=tape,
    )  # fmt: skip
    solver = bisls.BiSLS(problem)
    for _ in range(10):
        solver.step(None, None)
    assert x.item() == pytest.approx(2.0, rel=1e-5)


def test_an_operation_without_a_rule_for_batches_is_multiplied_one_by_one():
    class Cube(torch.autograd.Function):
        """Has no rule for vmap."""

        @staticmethod
        def forward(ctx, y):
            ctx.save_for_backward(y)
            return y**3

        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            return Square.apply(grad, y)

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, grad, y):
            ctx.save_for_backward(grad, y)
            return torch.from_numpy((grad * 3 * y**2).detach().numpy())

        @staticmethod
        def backward(ctx, grad):
            own, y = ctx.saved_tensors
            return torch.from_numpy((grad * 3 * y**2).numpy()), torch.from_numpy((grad * own * 6 * y).numpy())

    x, y = torch.tensor([1.0], requires_grad=True), torch.tensor([0.5, 2.0], requires_grad=True)
    problem = bisls.Bilevel(lambda _: y.sum(), lambda _: (Cube.apply(y) * x).sum(), [x], [y], tape=False)
    with torch.no_grad():
        matrix = Oracle(problem).lower_graph(None).hessian.matrix()
    assert torch.equal(matrix, torch.diag(torch.tensor([3.0, 12.0])))


def test_direct_leaves_negative_curvature_to_the_other_solver():
    x, y = torch.tensor([1.0], requires_grad=True), torch.tensor([0.5, 0.5], requires_grad=True)
    curvature = torch.tensor([1.0, -1.0])
    problem = bisls.Bilevel(lambda _: (y * x).sum(), lambda _: (curvature * y * y).sum() + (x * y).sum(), [x], [y])
    with torch.no_grad():
        graph = Oracle(problem, tape=True).lower_graph(None)
        assert graph.hessian.matrix() is not None
        solution = bisls.Direct().solve(graph.hessian, torch.tensor([0.0, 1.0]), {})
    assert solution.status is bisls.Status.NEGATIVE_CURVATURE


def players(loss, steps: int = 4):
    """The lower players after some iterations on a loss of (x, y), with its final parameters."""
    torch.manual_seed(0)
    x, y = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([0.5, -0.5], requires_grad=True)
    problem = bisls.Bilevel(lambda _: ((y - 1) ** 2).sum(), lambda _: loss(x, y), [x], [y], tape=True)
    solver = bisls.Alternating(problem, lower_iters=3)
    for _ in range(steps):
        solver.step(None, None)
    return solver.oracle._lower_players, x, y


def plain(x, y):
    return ((y - x) ** 2).sum()


norm = nn.BatchNorm1d(1)
outside = torch.tensor([0.1, 0.2])


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: plain(x, y) * (1 + 0.0 * torch.rand(1)[0]),
        lambda x, y: plain(x, functional.dropout(y, 0.5)),
        lambda x, y: plain(x, y) if y.sum() > -100 else plain(x, 2 * y),
        lambda x, y: plain(x, y) * max(1.0, y.detach().abs().max().item() * 0),
        lambda x, y: plain(x, norm((y * 1.0)[:, None])[:, 0] + y),
        lambda x, y: plain(x, y[y > -100]),
        lambda x, y: plain(x, y) + 0 * outside.add_(0.0).sum(),
    ],
    ids=["random", "dropout", "branch", "item", "batch norm", "shape", "writes"],
)
def test_what_can_not_be_played_is_called(loss):
    found, x, y = players(loss)
    assert not found._players
    assert not found._on
    assert torch.isfinite(x).all()
    assert torch.isfinite(y).all()


def test_large_operations_are_called_and_nothing_is_kept_of_them(monkeypatch):
    monkeypatch.setattr(taping, "LARGE", 0.01)
    assert not players(plain)[0]._players


def test_a_loss_that_changes_is_noticed_at_once():
    weight = [1.0]

    def run(tape: bool):
        weight[0] = 1.0
        x, y = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([0.5, -0.5], requires_grad=True)
        problem = bisls.Bilevel(
            lambda _: weight[0] * ((y - 1) ** 2).sum(),
            lambda _: ((y - x) ** 2).sum() + weight[0] * (y**4).sum(),
            [x],
            [y],
            tape=tape,
        )
        solver = bisls.Alternating(problem, lower_iters=3)
        for k in range(12):
            weight[0] = 1.0 + (k >= 4) + (k >= 8)
            solver.step(None, None)
        return solver, x, y

    taped, x, y = run(True)
    _, true_x, true_y = run(False)
    assert torch.equal(x, true_x)
    assert torch.equal(y, true_y)
    assert taped.oracle._lower_players._players  # two changes: it is recorded anew
    assert CHANGES == 3


def test_a_loss_that_keeps_changing_is_called():
    count = [0]

    def counting(x, y):
        count[0] += 1
        return plain(x, y) * (1 + 0.1 * count[0])

    found, x, _ = players(counting)
    assert not found._on
    assert torch.isfinite(x).all()


def test_tensors_from_outside_may_be_written_to_between_iterations():
    def run(tape: bool):
        shift = torch.tensor([0.1, 0.2])
        x, y = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([0.5, -0.5], requires_grad=True)
        problem = bisls.Bilevel(
            lambda _: ((y - 1) ** 2).sum(), lambda _: ((y - x - shift.exp()) ** 2).sum(), [x], [y], tape=tape
        )
        solver = bisls.Alternating(problem, lower_iters=3)
        for k in range(6):
            if k == 3:
                shift.mul_(2.0)
            solver.step(None, None)
        return x.detach()

    assert torch.equal(run(True), run(False))


def test_one_tape_serves_all_batches_of_a_kind_and_there_are_few():
    x, y = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([0.5, -0.5], requires_grad=True)
    problem = bisls.Bilevel(lambda b: ((y - b) ** 2).mean(), lambda b: ((y - x * b) ** 2).mean(), [x], [y], tape=True)
    solver = bisls.Alternating(problem, lower_iters=2)
    for rows in (3, 4, 3, 5, 6, 7, 8, 9):
        solver.step(torch.rand(rows, 2), [torch.rand(rows, 2), torch.rand(rows, 2)])
    assert len(solver.oracle._lower_players._players) == KINDS


def test_a_tape_in_stages_computes_what_does_not_change_once():
    a, b = torch.tensor([0.3, 0.7], requires_grad=True), torch.tensor([2.0, 5.0], requires_grad=True)
    tape = Tape(lambda: {"out": [(a.exp() * b).sum()]}, [[a], [b]])
    program = tape.program("out")
    with torch.no_grad():
        before = program.carry(0, (), [a])
        assert torch.equal(before[0][0], a.exp())
        assert torch.equal(program.ready("out", before)([b])[0], (a.exp() * b).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_on_a_tape_is_computed_twice(dtype):
    w, y = torch.rand(5, dtype=dtype, requires_grad=True), torch.rand(5, dtype=dtype, requires_grad=True)

    def compute():
        (gradient,) = torch.autograd.grad(0.5 * (w * y**2).sum() + 0.5 * (w * y * y).sum(), y)
        return {"gradient": [gradient], "third": [(0.3 * w) * y], "many": [(2.0**-40 * w) * y]}

    tape = Tape(compute, [[w], [y]])
    expected = compute()
    with torch.no_grad():
        for name, [own] in expected.items():
            program = tape.program(name)
            assert torch.equal(program.ready(name, program.carry(0, (), [w]))([y])[0], own), name
    products = [op for op in tape.ops if op.call is torch.ops.aten.mul.Tensor and op.level == 2]
    assert len({(tuple(op.args), tuple(op.kwargs.items())) for op in products}) == len(products) > 1


def test_an_output_in_place_of_a_view_is_refused():
    a = torch.tensor([0.3, 0.7], requires_grad=True)

    def compute():
        base = a.detach() * 2
        view = base[:1]
        base.add_(1.0)
        return {"out": [view.sum() + base.sum()]}

    with pytest.raises(NotPlayable, match="writes into a tensor"):
        Tape(compute, [[a]])


def test_a_batch_that_is_no_plain_value_is_never_recorded():
    """A source of samples as a batch gives another one at every call, which no tape can know."""
    x, y = torch.tensor([1.0], requires_grad=True), torch.tensor([0.5], requires_grad=True)
    drawn = []

    class Source:
        def draw(self):
            drawn.append(len(drawn))
            return 0.1 * drawn[-1]

    problem = bisls.Bilevel(
        lambda _: (y**2).sum(), lambda batch: ((y - x - batch.draw()) ** 2).sum(), [x], [y], tape=True
    )
    solver = bisls.Alternating(problem, lower_iters=3)
    for _ in range(3):
        solver.step(None, Source())
    assert len(drawn) == 3 * 4 + 1  # three lower steps and the hypergradient; once to see how exact the loss is
    assert not solver.oracle._lower_players._players

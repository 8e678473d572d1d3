"""Values, gradients and products of second derivatives of a problem's losses: against finite differences and torch itself."""

import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import bisls
from bisls.evaluate import Graph, unit_vectors
from bisls.operators import Learnt, Memory, Operator, block_rows
from bisls.oracle import Oracle

EXACT = torch.float64


def logistic():
    """Penalties of a logistic regression: sums, products, a matrix, and a loss that torch has fused."""
    rng = torch.Generator().manual_seed(0)
    features, labels = torch.randn(60, 5, generator=rng, dtype=EXACT), (torch.rand(60, generator=rng) > 0.5).to(EXACT)
    x, w = torch.linspace(-1, 1, 5, dtype=EXACT).requires_grad_(), torch.linspace(1, 2, 5, dtype=EXACT).requires_grad_()

    def fit(rows):
        return functional.binary_cross_entropy_with_logits(features[rows] @ w, labels[rows])

    problem = bisls.Bilevel(fit, lambda rows: fit(rows) + 0.5 * (torch.sigmoid(x) * w * w).sum(), [x], [w])
    return problem, slice(40, 60), slice(0, 40)


def weighted():
    """Weights of samples, for a network of several tensors with batches that are dictionaries."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(EXACT)
    weights = torch.linspace(-1, 1, 8, dtype=EXACT).requires_grad_()
    rows = {"input": torch.randn(8, 3, dtype=EXACT), "label": torch.arange(8) % 2}

    def lower(batch):
        each = functional.cross_entropy(model(batch["input"]), batch["label"], reduction="none")
        return (weights.softmax(0) * each).sum() + 0.01 * sum((p**2).sum() for p in model.parameters())

    def upper(batch):
        return functional.cross_entropy(model(batch["input"]), batch["label"])

    return bisls.Bilevel(upper, lower, [weights], model.parameters()), rows, rows


def pictures():
    """Pictures as upper parameters: convolution, pooling, reshaping."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Softplus(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(2 * 2 * 2, 2))
    model = model.to(EXACT)
    images = torch.randn(4, 1, 6, 6, dtype=EXACT).requires_grad_()
    labels, real = torch.arange(4) % 2, (torch.randn(6, 1, 6, 6, dtype=EXACT), torch.arange(6) % 2)

    def lower(_):
        return functional.cross_entropy(model(images), labels) + 0.05 * sum((p**2).sum() for p in model.parameters())

    def upper(batch):
        return functional.cross_entropy(model(batch[0]), batch[1])

    return bisls.Bilevel(upper, lower, [images], model.parameters()), real, None


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(3, 4), nn.Linear(4, 1)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, rows):
        inner = self.into(rows)[None]
        return self.out(self.attention(inner, inner, inner, need_weights=True)[0][0])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.LSTM(3, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, rows):
        return self.out(self.cell(rows[None])[0][0])


def between(*inner):
    return lambda: nn.Sequential(nn.Linear(3, 4), *(make() for make in inner), nn.Linear(4, 1))


# operations that torch runs in other ways where a gradient, or its derivative, is wanted
NETWORKS = {
    "SiLU": between(nn.SiLU),
    "Mish": between(nn.Mish),
    "GELU": between(nn.GELU),
    "Softplus": between(nn.Softplus),
    "LayerNorm": between(lambda: nn.LayerNorm(4), nn.Tanh),
    "GroupNorm": between(lambda: nn.GroupNorm(2, 4), nn.Tanh),
    "weight_norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 1)),
    "LSTM": Recurrent,
    "MultiheadAttention": Attending,
    "MultiheadAttention, eval": lambda: Attending().eval(),
}


def network(make):
    """One penalty for all weights of a network."""
    torch.manual_seed(1)
    model, penalty = make().to(EXACT), torch.tensor([-3.0], dtype=EXACT, requires_grad=True)
    rows = torch.randn(7, 3, dtype=EXACT)
    labels = rows.sum(1, keepdim=True).sin()

    def fit(batch):
        return functional.mse_loss(model(batch[0]), batch[1])

    def lower(batch):
        return fit(batch) + penalty.exp().sum() * sum((p**2).sum() for p in model.parameters())

    return (
        bisls.Bilevel(fit, lower, [penalty], list(model.parameters())),
        (rows[4:], labels[4:]),
        (rows[:4], labels[:4]),
    )


CASES = {"logistic": logistic, "weighted": weighted, "pictures": pictures} | {
    name: lambda make=make: network(make) for name, make in NETWORKS.items()
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def direction(numel: int) -> Tensor:
    return torch.arange(1, numel + 1, dtype=EXACT).cos()


def slope(vector, d: Tensor, value):
    """How a value changes along d, by central differences."""
    here, t = vector.read(), 1e-5
    with vector.lent(here + t * d):
        ahead = value()
    with vector.lent(here - t * d):
        behind = value()
    return (ahead - behind) / (2 * t)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_gradients_and_products_are_those_of_finite_differences(name):
    problem, upper, lower = CASES[name]()
    oracle, x, y = Oracle(problem), problem.x, problem.y
    v, d = direction(y.numel), direction(x.numel)
    here, point, graph = oracle.upper(upper), oracle.lower(lower), oracle.lower_graph(lower)
    # to rounding: torch may have one kernel for a value alone, another for its gradient
    assert here.value == pytest.approx(oracle.upper_value(upper), rel=1e-14)
    assert point.value == pytest.approx(oracle.lower_value(lower), rel=1e-14)
    assert graph.value == pytest.approx(point.value, rel=1e-14)
    torch.testing.assert_close(graph.grad, point.grad, rtol=1e-12, atol=1e-14)

    assert (here.grad_y @ v).item() == pytest.approx(slope(y, v, lambda: oracle.upper_value(upper)), rel=1e-6)
    assert (here.grad_x @ d).item() == pytest.approx(
        slope(x, d, lambda: oracle.upper_value(upper)), rel=1e-6, abs=1e-12
    )
    assert (point.grad @ v).item() == pytest.approx(slope(y, v, lambda: oracle.lower_value(lower)), rel=1e-6)
    if name == "weight_norm":  # torch's own second derivative of it is wrong on the CPU: gradgradcheck says so too
        return
    pull = slope(x, d, lambda: oracle.lower(lower).grad)
    for mine, true in (
        (graph.hessian(v), slope(y, v, lambda: oracle.lower(lower).grad)),
        (graph.mixed_transposed(d), pull),
        (graph.mixed(v) @ d, pull @ v),
    ):
        assert true.norm() > 1e-2
        torch.testing.assert_close(mine, true, rtol=1e-5, atol=1e-7 * true.norm().item())


@each_case
@torch.no_grad()
def test_columns_at_once_are_those_of_torchs_own_batched_call(case):
    problem, _, lower = case()
    units = unit_vectors(problem.y)
    graph = Graph(problem, lower, None)
    try:
        with torch.enable_grad():
            parts = torch.autograd.grad(problem.lower_loss(lower), problem.y.tensors, create_graph=True)
        truth = torch.autograd.grad(parts, problem.y.tensors, units, is_grads_batched=True)
    except RuntimeError:  # no rule for batches: by single products, which the test above compares
        truth = None
    mine = graph.columns(units)
    if truth is not None:
        for one, two in zip(mine, truth, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)
    for i in (0, problem.y.numel - 1):
        single = graph.hessian([unit[i] for unit in units])
        for whole, one in zip(mine, single, strict=True):
            torch.testing.assert_close(whole[i], one, rtol=1e-10, atol=1e-13)


@each_case
def test_the_default_runs(case):
    problem, upper, lower = case()
    solver, start = bisls.BiSLS(problem, lower_iters=4), problem.x.read()
    records = [solver.step(upper, lower) for _ in range(5)]
    assert not any(record.status is bisls.Status.NON_FINITE for record in records)
    assert not torch.equal(problem.x.read(), start)


def test_parameters_of_two_types():
    a, b = torch.full((3,), 0.5, dtype=torch.bfloat16, requires_grad=True), torch.full((2,), 1.5, requires_grad=True)
    x = torch.tensor([1.0, -2.0], requires_grad=True)

    def lower(_):
        return ((a.float() - x[0]) ** 2).sum() + ((b - x) ** 2 * torch.tensor([1.0, 3.0])).sum()

    problem = bisls.Bilevel(lambda _: (a.float() ** 2).sum() + ((b - 3) ** 2).sum(), lower, [x], [a, b])
    with torch.no_grad():
        graph = Oracle(problem).lower_graph(None)
        assert not graph.hessian.writable
        assert graph.hessian.matrix() is None
        assert graph.hessian(torch.ones(5)).tolist() == [2.0, 2.0, 2.0, 2.0, 6.0]
        assert graph.mixed(torch.ones(5)).tolist() == [-8.0, -6.0]
        assert graph.mixed_transposed(torch.ones(2)).tolist() == [-2.0, -2.0, -2.0, -2.0, -6.0]


def test_a_small_hessian_is_written_out_once_and_is_right():
    problem, _, lower = logistic()
    oracle = Oracle(problem)
    with torch.no_grad():
        graph = oracle.lower_graph(lower)
        matrix = graph.hessian.matrix()
        assert torch.equal(matrix, graph.hessian.matrix())
        assert oracle.cost.hessian_products == 5
        columns = torch.stack([graph.hessian(column) for column in torch.eye(5, dtype=EXACT)])
        torch.testing.assert_close(matrix, columns, rtol=1e-12, atol=1e-14)
        b = torch.linspace(1, 2, 5, dtype=EXACT)
        solution = bisls.Direct().solve(graph.hessian, b, {})
        torch.testing.assert_close(graph.hessian(solution.z), b, rtol=1e-10, atol=0)
        assert solution.residual < 1e-12


def several(n, moved, seed=0, points=8, shift=0.0):
    """Ill-conditioned Hessians at successive points, and what shares a memory: operators that count their products."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(2 * n, n, generator=draw, dtype=EXACT) * torch.logspace(0, -1.5, n, dtype=EXACT)
    memory, counts, made = Memory(), [], []
    for k in range(points):
        h = rows.T @ rows / (2 * n) + torch.diag(torch.logspace(-4, 0, n, dtype=EXACT) * (1 + moved * k) - shift)
        counts.append([0, 0])
        size, count = block_rows(n), counts[-1]

        def product(v, h=h, count=count):
            count[0] += 1
            return h @ v

        def blocks(h=h, size=size, count=count):
            count[1] += 1
            padded = torch.eye(size * -(-n // size), dtype=EXACT)
            padded[:n, :n] = h
            return torch.stack([padded[i : i + size, i : i + size] for i in range(0, len(padded), size)])

        made.append((h, Operator(product, blocks, memory)))
    return made, counts, torch.randn(n, generator=draw, dtype=EXACT)


@pytest.mark.parametrize(("n", "moved"), [(5, 0.5), (60, 0.1), (60, 10.0), (200, 0.1), (1200, 0.05)])
def test_what_was_learnt_of_a_hessian_saves_products_and_never_costs_accuracy(n, moved):
    made, counts, b = several(n, moved)
    plain, solver = [], bisls.Direct(bisls.CG(tol=1e-8, iters=20 * n))
    for h, operator in made:
        calls = []
        bisls.CG(tol=1e-8, iters=20 * n).solve(lambda v, h=h, calls=calls: calls.append(1) or h @ v, b, {})
        plain.append(len(calls))
        for right in (b, b.flip(0)):  # the hypergradient's and the tangent's
            solution = solver.solve(operator, right, {})
            assert (right - h @ solution.z).norm() <= 1e-7 * right.norm()
            assert solution.residual <= 1e-8
            assert solution.status is bisls.Status.OK
    spent = sum(products + (2 + n / 4) * written for products, written in counts)
    assert spent < {5: 1.3, 1200: 0.8}.get(n, 0.6) * 2 * sum(plain)
    assert sum(written for _, written in counts) >= 1


def test_a_hessian_that_hardly_changes_is_not_written_out_again():
    made, counts, b = several(80, 1e-4)
    for _, operator in made:
        bisls.Direct(bisls.CG(tol=1e-6, iters=500)).solve(operator, b, {})
    assert sum(written for _, written in counts) == 1
    assert all(products <= 4 for products, _ in counts[3:])


def test_a_hessian_that_is_not_positive_definite_is_written_out_ever_more_seldom():
    made, counts, b = several(80, 1e-4, points=60, shift=0.02)
    for _, operator in made:
        assert (
            bisls.Direct(bisls.CG(tol=1e-3, iters=50, damp=True)).solve(operator, b, {}).status is bisls.Status.DAMPED
        )
    at = [k for k, (_, written) in enumerate(counts) if written]
    gaps = [after - before for before, after in pairwise(at)]
    assert len(at) >= 4
    assert all(after >= 1.5 * before for before, after in pairwise(gaps[2:]))
    assert made[0][1].memory.learnt.last == 2 ** len(at) * (2 + 80 / 4)


def test_an_inverse_that_is_none_is_given_up():
    made, _, b = several(80, 0.1)
    h, operator = made[0]
    operator.memory.learnt = Learnt(-torch.eye(80, dtype=EXACT)[None], points=3, spent=30.0)
    solution = bisls.Direct(bisls.CG(tol=1e-6, iters=500)).solve(operator, b, {})
    assert (b - h @ solution.z).norm() <= 1e-5 * b.norm()


def test_a_hessian_on_bounds_is_written_out_with_what_is_held_left_out():
    x, y = (
        torch.tensor([0.5], dtype=EXACT, requires_grad=True),
        torch.tensor([0.0, 1.0], dtype=EXACT, requires_grad=True),
    )
    problem = bisls.Bilevel(
        lambda _: y.sum(), lambda _: (2 * y[0] ** 2 + y[0] * y[1] + 3 * y[1] ** 2) + y[0] * x[0], [x], [y],
        lower_bounds=bisls.Box(0.0, 5.0),
    )  # fmt: skip
    with torch.no_grad():
        hessian = Oracle(problem).lower_graph(None).hessian
        columns = torch.stack([hessian(unit) for unit in torch.eye(2, dtype=EXACT)])
        assert columns[0].tolist() == [1.0, 0.0]
        torch.testing.assert_close(hessian.matrix(), columns)


def test_a_run_goes_on_with_what_it_has_learnt():
    def make():
        made = bisls.tasks.logistic_penalties()
        return made, bisls.BiSLS(made.problem)

    task, solver = make()
    for _ in range(4):
        solver.step(task.upper_data, task.lower_data)
    saved, x, y = solver.state_dict(), task.problem.x.read(), task.problem.y.read()
    assert saved["learnt"]["inverse"].shape == (1, 30, 30)
    other, again = make()
    again.load_state_dict(saved)
    other.problem.x.write_(x)
    other.problem.y.write_(y)
    for _ in range(4):
        assert again.step(other.upper_data, other.lower_data) == solver.step(task.upper_data, task.lower_data)
    assert torch.equal(task.problem.x.read(), other.problem.x.read())
    wrong = {**saved, "learnt": {**saved["learnt"], "inverse": torch.zeros(1, 3, 3)}}
    with pytest.raises(ValueError, match=r"state\['learnt'\]\['inverse'\]"):
        again.load_state_dict(wrong)


def test_a_lower_loss_without_second_derivatives_has_a_hessian_of_zeros():
    x, y = torch.tensor([1.0], requires_grad=True), torch.tensor([0.5, 2.0], requires_grad=True)
    problem = bisls.Bilevel(lambda _: y.sum(), lambda _: (y * x).sum(), [x], [y])
    with torch.no_grad():
        graph = Oracle(problem).lower_graph(None)
        assert torch.equal(graph.hessian.matrix(), torch.zeros(2, 2))
        assert torch.equal(graph.hessian(torch.ones(2)), torch.zeros(2))


def test_a_lower_parameter_without_numbers_is_no_obstacle():
    x, nothing, y = (torch.full(shape, 0.5, requires_grad=True) for shape in ((), (0,), (1,)))
    problem = bisls.Bilevel(
        lambda _: ((y - 2.0) ** 2).sum() + nothing.sum(), lambda _: ((y - x) ** 2).sum() + nothing.sum(), [x], [nothing, y]
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
    problem = bisls.Bilevel(lambda _: y.sum(), lambda _: (Cube.apply(y) * x).sum(), [x], [y])
    with torch.no_grad():
        matrix = Oracle(problem).lower_graph(None).hessian.matrix()
    assert torch.equal(matrix, torch.diag(torch.tensor([3.0, 12.0])))


def test_direct_leaves_negative_curvature_to_the_other_solver():
    x, y = torch.tensor([1.0], requires_grad=True), torch.tensor([0.5, 0.5], requires_grad=True)
    curvature = torch.tensor([1.0, -1.0])
    problem = bisls.Bilevel(lambda _: (y * x).sum(), lambda _: (curvature * y * y).sum() + (x * y).sum(), [x], [y])
    with torch.no_grad():
        graph = Oracle(problem).lower_graph(None)
        assert graph.hessian.matrix() is not None
        solution = bisls.Direct().solve(graph.hessian, torch.tensor([0.0, 1.0]), {})
    assert solution.status is bisls.Status.NEGATIVE_CURVATURE


@pytest.mark.skipif(torch.__version__ < "2.5", reason="the graphs of this torch do not tell their types")
def test_how_exact_a_loss_is_counts_from_x_too():
    """Half precision on the way from x alone, which a lower gradient does not record."""
    x, y = torch.tensor([0.3, -0.4], requires_grad=True), torch.tensor([0.5, -0.5], requires_grad=True)
    problem = bisls.Bilevel(lambda _: ((y - 1) ** 2).sum(), lambda _: ((y - x.bfloat16().float()) ** 2).sum(), [x], [y])
    oracle = Oracle(problem)
    with torch.no_grad(), oracle.upper_frozen():
        assert oracle.lower(None).eps == torch.finfo(torch.bfloat16).eps
    with torch.no_grad():
        assert oracle.lower_graph(None).eps == torch.finfo(torch.bfloat16).eps


def test_a_batch_may_be_any_object_and_a_loss_is_called_as_often_as_it_is_asked_for():
    """A source of samples as a batch gives another one at every call."""
    x, y = torch.tensor([1.0], requires_grad=True), torch.tensor([0.5], requires_grad=True)
    drawn = []

    class Source:
        def draw(self):
            drawn.append(len(drawn))
            return 0.1 * drawn[-1]

    problem = bisls.Bilevel(lambda _: (y**2).sum(), lambda batch: ((y - x - batch.draw()) ** 2).sum(), [x], [y])
    solver = bisls.Alternating(problem, lower_iters=3)
    for _ in range(3):
        solver.step(None, Source())
    assert len(drawn) == 3 * 4 + 1  # three lower steps and the hypergradient; once to see how exact the loss is


def test_a_loss_that_is_annealed_between_iterations_is_followed():
    """At y = 0 neither the value nor the gradient of the lower loss shows that x has got an influence."""
    x, y = torch.tensor([0.3, -0.4], requires_grad=True), torch.tensor([0.5, -0.5], requires_grad=True)
    factor = [0.0]
    problem = bisls.Bilevel(
        lambda _: ((y - 1) ** 2).sum(), lambda _: ((y - factor[0] * x.exp()) ** 2).sum() + 0.0 * x.sum(), [x], [y]
    )
    solver = bisls.BiSLS(problem, lower_iters=4)
    for _ in range(3):
        record = solver.step(None, None)
    assert record.hypergrad_norm == 0.0
    factor[0] = 1.0
    for _ in range(20):
        record = solver.step(None, None)
    assert record.upper_value < 1e-4


@pytest.mark.skipif(torch.__version__ < "2.5", reason="the optimisers of this torch import it themselves")
def test_an_iteration_imports_no_algebra_system():
    """`torch.autograd.grad` with vectors would, to compare their shapes: longer than a small run."""
    script = """
import sys, torch, bisls
x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
before = "sympy" in sys.modules
for method in (bisls.BiSLS, bisls.Alternating):
    problem = bisls.Bilevel(lambda _: ((y - 3) ** 2).sum(), lambda _: ((y - x) ** 2).sum(), [x], [y])
    method(problem).step(None, None)
assert ("sympy" in sys.modules) == before
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("tape", [True, False, None])
def test_the_option_tape_has_no_effect(tape):
    ends = []
    for options in ({}, {"tape": tape}):
        problem, upper, lower = logistic()
        made = bisls.Bilevel(problem.upper_loss, problem.lower_loss, problem.x.tensors, problem.y.tensors, **options)
        solver = bisls.BiSLS(made)
        records = [solver.step(upper, lower) for _ in range(3)]
        ends.append((repr(records), made.x.read().tolist(), solver.identity, repr(made), repr(solver.state_dict())))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("junk", ["yes", 2, 0.5, [True]])
def test_an_option_tape_that_means_nothing_is_named(junk):
    x, y = torch.tensor([1.0], requires_grad=True), torch.tensor([0.5], requires_grad=True)
    with pytest.raises(ValueError, match=r"`Bilevel\(tape=.*\)`: tape must be True or False, or None"):
        bisls.Bilevel(lambda _: y.sum(), lambda _: (y * x).sum(), [x], [y], tape=junk)

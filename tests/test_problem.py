"""Problem, oracle and stillness: bad input is named, probes leave no trace, counts are right, ranks agree."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import bisls
from bisls.vector import Vector


def tensors():
    return torch.tensor([1.0, -2.0], requires_grad=True), torch.tensor([[0.5, 3.0]], requires_grad=True)


def quadratic(x, y):
    return lambda _: (y**2).sum() + (x**2).sum(), lambda _: ((y - x) ** 2).sum()


GOOD = torch.tensor([1.0], requires_grad=True)
BAD_PARAMS = [
    ([], "is empty"),
    ([torch.ones(2)], r"tensor 0 \(shape \(2,\)\) does not require grad; call requires_grad_"),
    ([GOOD * 2], "not a leaf"),
    ([3.0], "entry 0 is a float, not a tensor"),
    (GOOD, "put the single tensor into a list"),
    (nn.Linear(2, 1), r"pass module.parameters\(\)"),
    ([GOOD, GOOD], "lists the same tensor twice"),
    ([torch.ones(2, dtype=torch.complex64, requires_grad=True)], "only real floating-point"),
    ([torch.ones(2, 2).to_sparse().requires_grad_()], "is sparse"),
    ([torch.ones(0, requires_grad=True)], "all tensors are empty"),
]


@pytest.mark.parametrize("level", ["upper_params", "lower_params"])
@pytest.mark.parametrize(("bad", "message"), BAD_PARAMS, ids=[message for _, message in BAD_PARAMS])
def test_bad_parameters_are_named(level, bad, message):
    x, y = tensors()
    upper, lower = quadratic(x, y)
    arguments = {"upper_params": [x], "lower_params": [y], level: bad}
    with pytest.raises(ValueError, match=message) as info:
        bisls.Bilevel(upper, lower, **arguments)
    assert f"`Bilevel({level}=...)`" in str(info.value)


def test_a_parameter_at_both_levels_and_mixed_devices_are_named():
    x, y = tensors()
    upper, lower = quadratic(x, y)
    with pytest.raises(ValueError, match=r"tensor 1 .* is also in upper_params"):
        bisls.Bilevel(upper, lower, [x], [y, x])
    with pytest.raises(ValueError, match="spread over cpu, meta"):
        bisls.Bilevel(upper, lower, [x], [torch.ones(1, device="meta", requires_grad=True)])
    with pytest.raises(ValueError, match=r"`Bilevel\(upper_loss=tensor.*\)`: upper_loss must be a callable"):
        bisls.Bilevel(torch.ones(1), lower, [x], [y])
    with pytest.raises(ValueError, match=r"`Bilevel\(buffers=...\)`: entry 0"):
        bisls.Bilevel(upper, lower, [x], [y], buffers=[1.0])


BAD_LOSSES = [
    ("lower_loss", lambda x, y: (x**2).sum(), "does not depend on lower_params"),
    ("lower_loss", lambda x, y: (y.detach() - x).sum(), "does not depend on lower_params"),
    ("upper_loss", lambda x, y: torch.tensor(1.0), "does not depend on upper_params or lower_params"),
    ("lower_loss", lambda x, y: (y - x) ** 2, r"got shape \(1, 2\); reduce it"),
    ("upper_loss", lambda x, y: 3.0, "must return a scalar tensor, got float"),
    ("upper_loss", lambda x, y: None, "got NoneType"),
    ("upper_loss", lambda x, y: torch.tensor(1), "got dtype torch.int64"),
]


@pytest.mark.parametrize(("name", "loss", "message"), BAD_LOSSES)
def test_bad_losses_are_named(name, loss, message):
    x, y = tensors()
    upper, lower = quadratic(x, y)
    losses = {"upper_loss": upper, "lower_loss": lower, name: lambda _: loss(x, y)}
    problem = bisls.Bilevel(**losses, upper_params=[x], lower_params=[y])
    with pytest.raises(ValueError, match=message) as info:
        bisls.hypergradient(problem, None, None, bisls.Implicit(bisls.CG()))
    assert f"`Bilevel({name}=...)`" in str(info.value)


def test_sparse_gradients_are_named():
    table, x = nn.Embedding(4, 2, sparse=True), torch.ones(2, requires_grad=True)
    problem = bisls.Bilevel(
        lambda _: (x**2).sum(), lambda _: (table(torch.tensor([1])) * x).sum(), [x], table.parameters()
    )
    with pytest.raises(ValueError, match="sparse"):
        bisls.Oracle(problem).lower(None)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_an_error_with_advice(bad):
    x, y = tensors()
    upper, lower = quadratic(x, y)
    problem = bisls.Bilevel(lambda _: upper(_) * bad, lower, [x], [y])
    with pytest.raises(FloatingPointError, match=r"upper_loss is (nan|inf) .* Look for log\(0\)"):
        bisls.hypergradient(problem, None, None, bisls.Implicit(bisls.CG()))
    problem = bisls.Bilevel(upper, lambda _: lower(_) * bad, [x], [y])
    with pytest.raises(FloatingPointError, match="not finite"):
        bisls.hypergradient(problem, None, None, bisls.Implicit(bisls.Identity()))
    assert x.tolist() == [1.0, -2.0]


def test_what_the_lower_loss_does_not_reach_counts_as_zero():
    x, y = tensors()
    idle = torch.tensor([4.0], requires_grad=True)
    upper, lower = quadratic(x, y)
    problem = bisls.Bilevel(upper, lower, [x, idle], [y])
    hg = bisls.hypergradient(problem, None, None, bisls.Implicit(bisls.CG()))
    torch.testing.assert_close(hg.grads[0], 2 * x.detach() + 2 * y.detach()[0])
    assert hg.grads[1].tolist() == [0.0]


# --- the oracle


def test_counts_by_level():
    x, y = tensors()
    oracle = bisls.Oracle(bisls.Bilevel(*quadratic(x, y), [x], [y]))
    before = oracle.cost.copy()
    oracle.upper(None)
    oracle.lower(None)
    oracle.upper_value(None)
    oracle.lower_value(None)
    graph = oracle.lower_graph(None)
    graph.hessian(torch.ones(2))
    graph.mixed(torch.ones(2))
    graph.mixed_transposed(torch.ones(2))
    assert oracle.cost - before == bisls.Cost(1, 1, 1, 1, 1, 1, 2)


def test_the_lower_loop_records_nothing_of_x_and_probes_record_nothing():
    x, y = tensors()
    seen = []

    def lower(_):
        seen.append((x.requires_grad, torch.is_grad_enabled()))
        return ((y - x) ** 2).sum()

    oracle = bisls.Oracle(bisls.Bilevel(lambda _: (y * x).sum(), lower, [x], [y]))
    oracle.lower(None)  # the first of all looks at the whole graph, to learn how precise its numbers are
    seen.clear()
    oracle.lower(None)
    oracle.lower_value(None)
    oracle.lower_graph(None)
    with oracle.upper_frozen():
        oracle.lower(None)
        assert not x.requires_grad
    assert seen == [(False, True), (True, False), (True, True), (False, True)]
    assert x.requires_grad


def test_an_error_in_the_loss_leaves_the_parameters_requiring_grad():
    x, y = tensors()

    def lower(_):
        raise KeyError("data")

    oracle = bisls.Oracle(bisls.Bilevel(lambda _: (y * x).sum(), lower, [x], [y]))
    with pytest.raises(KeyError):
        oracle.lower(None)
    assert x.requires_grad


def test_probes_put_back_random_state_found_buffers_and_declared_ones():
    torch.manual_seed(0)
    x = torch.ones(3, requires_grad=True)
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))
    data, calls = torch.randn(16, 3), torch.zeros(())

    def lower(_):
        calls.add_(1)
        return (net(data * x) ** 2).mean()

    problem = bisls.Bilevel(lower, lower, [x], net.parameters(), buffers=[calls])
    oracle = bisls.Oracle(problem)
    point = oracle.lower(None)  # a real evaluation: it counts
    state = [b.clone() for b in net.buffers()], calls.clone(), torch.get_rng_state()
    assert oracle.lower_value(None, point.moment) == point.value  # the same mask
    assert len({oracle.lower_value(None) for _ in range(2)}) == 1  # no replay, but nothing drawn either
    assert all(torch.equal(a, b) for a, b in zip(state[0], net.buffers(), strict=True))
    assert torch.equal(state[1], calls)
    assert torch.equal(state[2], torch.get_rng_state())


def test_an_error_inside_a_probe_still_puts_everything_back():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(2)
    x, y = tensors()

    def upper(_):
        norm(torch.randn(4, 2))
        raise KeyError("data")

    problem = bisls.Bilevel(upper, quadratic(x, y)[1], [x], [y])
    state = torch.get_rng_state()
    with pytest.raises(KeyError):
        bisls.Oracle(problem).upper_value(None)
    assert norm.num_batches_tracked == 0
    assert torch.equal(state, torch.get_rng_state())


def test_half_precision_parameters_are_added_up_in_single_precision():
    x = torch.full((300,), 0.1, dtype=torch.bfloat16, requires_grad=True)
    y = torch.full((300,), 0.2, dtype=torch.bfloat16, requires_grad=True)
    problem = bisls.Bilevel(lambda _: (y**2).float().sum(), lambda _: ((y - x) ** 2).float().sum(), [x], [y])
    hg = bisls.hypergradient(problem, None, None, bisls.Implicit(bisls.CG()))
    assert hg.flat.dtype is torch.float32
    torch.testing.assert_close(hg.flat, 2 * y.detach().float(), rtol=2e-2, atol=0)


def test_vector_reads_splits_and_writes_in_place():
    x, y = tensors()
    vector = Vector([x, y])
    flat = vector.read()
    assert flat.tolist() == [1.0, -2.0, 0.5, 3.0]
    address = x.data_ptr()
    vector.write_(flat * 2)
    assert x.tolist() == [2.0, -4.0]
    assert x.data_ptr() == address
    flat[0] = 9.0  # a copy, not a view
    assert x[0].item() == 2.0
    assert [part.shape for part in vector.split(flat)] == [x.shape, y.shape]
    assert vector.join([None, y]).tolist() == [0.0, 0.0, 1.0, 6.0]


@pytest.mark.slow
def test_a_compiled_model_is_not_compiled_again_at_every_iteration():
    torch._dynamo.reset()
    torch.manual_seed(0)
    counter = CompileCounter()
    body = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1))
    model = torch.compile(body, backend=counter)
    decay = torch.zeros(1, requires_grad=True)
    data = torch.randn(20, 3), torch.randn(20, 1)

    def loss(batch):
        return ((model(batch[0]) - batch[1]) ** 2).mean()

    def lower(batch):
        return loss(batch) + decay.exp().sum() * sum((p**2).sum() for p in body.parameters())

    solver = bisls.BiSLS(bisls.Bilevel(loss, lower, [decay], body.parameters()), lower_iters=2)
    counts = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of global hooks, and of too many recompilations
        for _ in range(8):
            solver.step(data, data)
            counts.append(counter.frame_count)
    assert counts[3] == counts[-1] <= 3  # with and without gradients, of one level and of both
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.5", reason="there the words of torch's compiler come through")
def test_compiled_code_that_can_be_differentiated_once_is_run_uncompiled_where_twice_is_asked_for():
    """What the compilers of torch make has no second derivative."""
    torch._dynamo.reset()
    data, found = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)), []
    for backend in ("none", "aot_eager"):
        torch.manual_seed(0)
        body, x = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)), torch.zeros(20, requires_grad=True)
        model = body if backend == "none" else torch.compile(body, backend=backend)
        problem = bisls.Bilevel(
            lambda rows, model=model: model(data[rows]).square().mean(),
            lambda rows, model=model, x=x: (x[rows].sigmoid() * (model(data[rows]) - 1).square()[:, 0]).mean(),
            [x],
            body.parameters(),
        )
        solver = bisls.BiSLS(
            problem, lower_optimizer=torch.optim.SGD(body.parameters(), 0.1), hypergrad=bisls.Lookahead()
        )
        record = solver.step(slice(10), [slice(10), slice(10, 20)])
        assert record.alpha > 0
        found.append(problem.x.read())
    torch.testing.assert_close(*found)
    torch._dynamo.reset()

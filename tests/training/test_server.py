"""Parameter servers: ranges of columns, missing workers, non-finite steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phocas.rules import parse_rule
from phocas.training.server import Aggregate, NonfiniteError, ParameterServer

HOSTILE = [np.nan, np.inf, -np.inf, 1e38, -1e38, 1e-42, 0.0]
RULES = [
    "mean",
    "median",
    "trimmed-mean:b=3",
    "phocas:b=3",
    "heraclius:b=3",
    "monitor:rule=heraclius:b=3",
    "krum:b=3",
    "multi-krum:b=3",
    "nnm:b=3|phocas:b=3",
]


def make(num_servers: int, rule: str, **options: object) -> ParameterServer:
    torch.manual_seed(0)
    model = torch.nn.Linear(52, 3)
    return ParameterServer(
        model,
        num_workers=11,
        num_servers=num_servers,
        rule=parse_rule(rule),
        **options,  # type: ignore[arg-type]
    )


def rows(seed: int) -> torch.Tensor:
    """Draw honest rows with up to three Byzantine values in each column."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((11, 159)).astype(np.float32)
    for column in range(159):
        byzantine = rng.choice(11, rng.integers(0, 4), replace=False)
        values[byzantine, column] = rng.choice(HOSTILE, len(byzantine))
    return torch.from_numpy(values)


@pytest.mark.parametrize("rule", RULES)
def test_the_number_of_servers_changes_no_bit(rule: str) -> None:
    found = []
    for num_servers in (1, 4, 20, 159):
        server = make(num_servers, rule, on_nonfinite="apply")
        for seed in range(3):
            server.rows.copy_(rows(seed))
            aggregate = server.step()
        found.append((server.vector.numpy().view(np.uint32).copy(), aggregate))
    for vector, aggregate in found[1:]:
        assert np.array_equal(vector, found[0][0])
        np.testing.assert_allclose(aggregate.dropped, found[0][1].dropped, atol=1e-12)
        assert aggregate.expected == found[0][1].expected


@pytest.mark.parametrize("rule", ["phocas:b=3", "heraclius:b=3", "krum:b=3"])
def test_shares_by_server_add_up_to_the_whole(rule: str) -> None:
    server = make(4, rule)
    server.rows.copy_(rows(5))
    detailed, quick = server.aggregate(), server.aggregate(by_server=False)
    assert detailed.value.numpy().tobytes() == quick.value.numpy().tobytes()
    widths = np.array([bounds.stop - bounds.start for bounds in server.bounds])
    assert widths.sum() == 159
    assert widths.max() - widths.min() <= 1
    np.testing.assert_allclose(widths @ detailed.by_server / 159, quick.dropped, atol=1e-12)


def test_shares_by_server_show_where_a_worker_was_dropped() -> None:
    server = make(3, "phocas:b=3")
    server.rows.copy_(torch.from_numpy(np.random.default_rng(0).standard_normal((11, 159))))
    server.rows[5, server.bounds[1]] = 1e20
    shares = server.aggregate().by_server
    assert shares[1, 5] == 1
    assert max(shares[0, 5], shares[2, 5]) < 0.6


def test_a_missing_worker_is_survived() -> None:
    server = make(4, "phocas:b=3")
    for worker in range(9):
        server.push(worker, np.full(159, 2.0, np.float32))
    before = server.pull()
    aggregate = server.step()
    assert aggregate.finite
    torch.testing.assert_close(server.vector, before - 0.2)
    assert aggregate.dropped[:9].tolist() == [0.0] * 9
    assert aggregate.dropped[9:].tolist() == [1.0, 1.0]
    for worker in range(11):  # both are back in the next round, and nothing of the last remains
        server.push(worker, torch.ones(159))
    assert server.step().dropped.tolist() == [0.0] * 11


def test_pushes_of_unknown_workers_or_wrong_size_are_rejected() -> None:
    server = make(1, "median")
    with pytest.raises(ValueError, match="workers are 0 to 10: got worker 11"):
        server.push(11, torch.zeros(159))
    with pytest.raises(ValueError, match=r"must push d=159 values: got shape \(158,\)"):
        server.push(0, torch.zeros(158))


def test_servers_without_columns_and_impossible_rules_are_rejected() -> None:
    with pytest.raises(ValueError, match="160 servers for d=159"):
        make(160, "mean")
    with pytest.raises(ValueError, match="b=6"):
        make(1, "trimmed-mean:b=6")
    with pytest.raises(ValueError, match="did you mean 'skip'"):
        make(1, "mean", on_nonfinite="skp")


@pytest.mark.parametrize("policy", ["skip", "stop", "apply"])
def test_non_finite_result_follows_the_policy(policy: str) -> None:
    server = make(4, "phocas:b=3", on_nonfinite=policy)
    server.rows.copy_(rows(1))
    server.rows[:6, 7] = float("nan")
    before = server.pull()
    if policy == "stop":
        with pytest.raises(NonfiniteError, match="1 values that are not finite, of 159"):
            server.step()
    else:
        assert not server.step().finite
    if policy == "apply":
        assert not torch.isfinite(server.vector[7])
        assert torch.isfinite(server.vector[8])
    else:
        assert torch.equal(server.vector, before)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.RMSprop, {}),
    ],
)
def test_any_optimizer_gives_the_same_steps_as_alone(
    optimizer: type[torch.optim.Optimizer], options: dict[str, float]
) -> None:
    server = make(4, "mean", optimizer=optimizer, lr=0.05, optimizer_options=options)
    torch.manual_seed(0)
    twin = torch.nn.Linear(52, 3)
    alone = optimizer(twin.parameters(), lr=0.05, **options)  # type: ignore[arg-type, call-arg]
    for seed in range(4):
        gradient = torch.randn(159, generator=torch.Generator().manual_seed(seed))
        server.rows.copy_(gradient.expand(11, -1))
        twin.weight.grad, twin.bias.grad = (
            gradient[:156].view(3, 52).clone(),
            gradient[156:].clone(),
        )
        server.step(factor=1.0 if seed < 2 else 0.5)
        for group in alone.param_groups:
            group["lr"] = 0.05 if seed < 2 else 0.025
        alone.step()
    flat = torch.cat([twin.weight.flatten(), twin.bias]).detach()
    torch.testing.assert_close(server.vector, flat, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_plain_step_over_all_columns_has_the_bits_of_one_over_each_parameter(
    dtype: torch.dtype,
) -> None:
    """Parameters of odd sizes start anywhere in a vector register, where bits could differ."""
    torch.manual_seed(0)
    shapes = [(1,), (7, 3), (1, 5), (2, 2, 2), (33,), (3, 17), (1,)]
    twin = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    model = torch.nn.ParameterList([tensor.detach().clone() for tensor in twin])
    server = ParameterServer(model, num_workers=1, rule="mean", lr=0.3, on_nonfinite="apply")
    alone = torch.optim.SGD(twin, lr=0.3)
    for round_, factor in enumerate((1.0, 0.7, 1e-3)):
        gradient = torch.randn(server.vector.numel()).to(dtype)
        gradient[round_::29] = float(np.random.default_rng(round_).choice(HOSTILE))
        server.rows.copy_(gradient)
        server.step(factor=factor)
        for tensor, view in zip(twin, server.parameters.views(gradient), strict=True):
            tensor.grad = view.clone()
        alone.param_groups[0]["lr"] = 0.3 * factor
        alone.step()
    wanted = torch.cat([tensor.detach().flatten() for tensor in twin])
    assert server.vector.view(torch.uint8).equal(wanted.view(torch.uint8))


def test_large_values_with_overflowing_norm_are_finite() -> None:
    nobody = np.zeros(1)
    for values, norm, finite in (
        ([3.0, -4.0], 5.0, True),
        ([3e38, -3e38], np.inf, True),
        ([3e38, np.inf], np.inf, False),
        ([1.0, np.nan], np.nan, False),
    ):
        aggregate = Aggregate(torch.tensor(values), nobody, 0.0, nobody[None])
        assert aggregate.finite == finite
        np.testing.assert_equal(aggregate.norm, norm)

"""torch.linalg in a pipeline: the same results, and the same errors where there is none."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal

from models import WIDTH
from parity import Deep, dense, eager_outcome, made, pipe_outcome, pipeline
from pipeloom.local import compile_local
from pipeloom.strategy import Strategy

STRATEGY = Strategy(pp_degree=3, accumulate_steps=2, costs="roofline")


class Solver(nn.Module):
    """What `solve` makes of a matrix for each sample, between two layers."""

    def __init__(self, solve: object, shift: float = 3.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(2, 2)
        self.solve, self.shift = solve, shift

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.first(x).view(-1, 2, WIDTH // 2)
        matrix = matrix @ matrix.mT + self.shift * torch.eye(2, dtype=x.dtype)
        return self.last(self.solve(matrix))  # type: ignore[operator]


SOLVERS = {
    "inv": torch.linalg.inv,
    "solve": lambda m: torch.linalg.solve(m, m.sin()),
    "solve_ex, checked": lambda m: torch.linalg.solve_ex(m, m.sin(), check_errors=True)[0],
    "cholesky": torch.linalg.cholesky,
    "lu_factor": lambda m: torch.linalg.lu_factor(m)[0],
    "power": lambda m: torch.linalg.matrix_power(m, -2),
    "eig": lambda m: torch.linalg.eigvals(m).abs().unsqueeze(-1) * m,
}


def loss(output: Tensor, _target: Tensor) -> Tensor:
    return output.square().mean()


@pytest.mark.parametrize("name", SOLVERS)
def test_what_is_solved_is_eager_pytorchs(name: str) -> None:
    case = made(lambda: Deep(Solver(SOLVERS[name]), loss, dense).double())
    found = pipe_outcome(pipeline(case, STRATEGY, case.batch(4)), case.batch(4))
    assert found.error(eager_outcome(case, case.batch(4), [2, 2])) <= 1e-10


def test_a_weight_kept_orthogonal_by_solving() -> None:
    layers = [orthogonal(nn.Linear(WIDTH, WIDTH), orthogonal_map="cayley") for _ in range(3)]
    case = made(lambda: Deep(nn.Sequential(*layers), F.mse_loss, dense).double())
    found = pipe_outcome(pipeline(case, STRATEGY, case.batch(4)), case.batch(4))
    assert found.error(eager_outcome(case, case.batch(4), [2, 2])) <= 1e-10


def test_what_can_not_be_solved_is_said_by_the_step() -> None:
    case = made(lambda: Deep(Solver(torch.linalg.inv, shift=0.0), loss, dense))
    with torch.no_grad():
        case.model.first.weight.zero_()
        case.model.first.bias.zero_()
    pipe = compile_local(case.model, case.loss_fn, example=case.batch(4), strategy=STRATEGY)
    with pytest.raises(RuntimeError, match=r"job F\d\.0 .*linalg\.inv: .*singular"):
        pipe.step(*case.batch(4))


@pytest.mark.parametrize("schedule", ["1F1B", "auto"])
def test_made_up_values_that_can_not_be_solved_are_not_timed(schedule: str) -> None:
    """While chunks are timed they are given zeros."""
    case = made(lambda: Deep(Solver(torch.linalg.inv, shift=0.0), loss, dense).double())
    case.model.first.weight.data.copy_(torch.eye(WIDTH))
    strategy = Strategy(pp_degree=2, accumulate_steps=2, schedule_mode=schedule, search_seconds=1.0)
    pipe = compile_local(copy.deepcopy(case.model), case.loss_fn, example=case.batch(4), strategy=strategy)
    assert pipe.plan.predicted.step_time > 0
    found = pipe_outcome(pipe, case.batch(4))
    assert found.error(eager_outcome(case, case.batch(4), [2, 2])) <= 1e-9

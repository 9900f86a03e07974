"""Agreement between the ranks of a run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from pipeloom.training.config import ConfigError
from pipeloom.training.ranks import Ranks
from pipeloom.training.stop import Stop


def test_one_rank_agrees_with_itself() -> None:
    ranks = Ranks()
    assert (ranks.rank, ranks.size, ranks.maximum(3), ranks.from_first(lambda: "here")) == (0, 1, 3, "here")


def fail() -> str:
    raise ConfigError("no room")


def test_one_rank_s_error_is_its_own() -> None:
    with pytest.raises(ConfigError, match="no room"):
        Ranks().from_first(fail)


def agree(rank: int, _size: int) -> list[object]:
    together = Ranks()
    made: list[int] = []

    def name() -> str:
        made.append(rank)
        return "läufe/1"

    return [
        together.rank,
        together.maximum(10 - rank),
        together.from_first(name),
        made,
        together.from_first(str),
    ]


def refuse(_rank: int, _size: int) -> str:
    try:
        return Ranks().from_first(fail)
    except ConfigError as error:
        return f"refused: {error}"


def test_several_ranks_agree(ranks: Callable[..., list[object]]) -> None:
    assert ranks(agree, 2) == [[0, 10, "läufe/1", [0], ""], [1, 10, "läufe/1", [], ""]]


def test_the_first_rank_s_error_is_everyone_s(ranks: Callable[..., list[object]]) -> None:
    assert ranks(refuse, 2) == ["refused: no room"] * 2


def stop(rank: int, _size: int, number: int) -> list[str]:
    """Only the last rank is told to stop; all find out after the same step."""
    with Stop(Ranks()) as asked:
        steps = [asked.agree().name]
        if rank == 1:
            os.kill(os.getpid(), number)
        return [*steps, asked.agree().name]


def test_a_signal_to_one_rank_stops_all_after_the_same_step(ranks: Callable[..., list[object]]) -> None:
    assert ranks(stop, 2, int(signal.SIGTERM)) == [["NONE", "INTERRUPTED"]] * 2

"""Stopping: signals leave a note, the second one interrupts, handlers come back."""

from __future__ import annotations

import os
import signal

import pytest

from pipeloom.training.ranks import Ranks
from pipeloom.training.stop import Reason, Stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_waits_for_the_step_and_the_second_doesn_t(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Stop(Ranks()) as stop:
        assert stop.agree() is Reason.NONE
        os.kill(os.getpid(), number)
        assert stop.agree() is Reason.INTERRUPTED
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_of_several_reasons_the_greatest_counts() -> None:
    stop = Stop(Ranks())
    stop.ask(Reason.INTERRUPTED)
    stop.ask(Reason.TIME)
    assert stop.agree() is Reason.INTERRUPTED

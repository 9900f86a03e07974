"""One rank of `pipeloom generate`: `python -m pipeloom.prompting.rank ORDER`, where ORDER is the launcher's JSON.

Exit codes: 0, 2 for what can't be run (told by the first rank alone), 1 for a failure, 130 for an interrupt. The first
Ctrl-C cancels all prompts, so that their texts so far are printed; the second one ends at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from types import FrameType

from ..strategy import Strategy, StrategyError
from ..training.rank import INTERRUPTED, die_with_parent
from .order import Order, OrderError


def run(order: str) -> int:
    """Run this process's rank to its end; gives the exit code."""
    warnings.filterwarnings("ignore", message="TF32 acceleration on top of oneDNN")
    first = os.environ.get("RANK", "0") == "0"
    try:
        from ..generation import GenerationError, StreamError
        from ..runtime.errors import PeerError
        from ..training.config import ConfigError
        from ..training.data import DataError
    except KeyboardInterrupt:
        return INTERRUPTED
    try:
        return _generate(Order.load(order), first=first)
    except (OrderError, GenerationError, ConfigError, DataError, StrategyError) as error:
        if first:
            print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except StreamError as error:
        if not isinstance(error.__cause__, PeerError) and error.__cause__ is not None:
            cause = error.__cause__.__cause__ or error.__cause__
            traceback.print_exception(cause)
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        traceback.print_exc()
        print(f"rank {os.environ.get('RANK', '0')} failed: {error}", file=sys.stderr)
        return 1


def _generate(order: Order, *, first: bool) -> int:
    import torch

    from ..generation import GenerationError, Stream, StreamError, compile
    from .models import open_model
    from .show import Show

    opened = open_model(order.model)
    words = opened.words
    prompts = [dict(prompt) for prompt in order.prompts]
    if order.chat:
        chat = getattr(words, "chat", None)
        if chat is None:
            raise GenerationError(
                "--chat: this model was trained on plain text, not on conversations; leave it out"
            )
        for prompt in prompts:
            prompt["prompt"] = chat(prompt["prompt"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // order.stages) if order.stages == 1 else 1)
    gen = compile(
        opened.model, opened.spec, Strategy(pp_degree=order.stages), words=words, weights=opened.weights
    )
    stream: Stream = gen.stream(
        prompts,
        batch=order.batch,
        in_flight=order.in_flight,
        refill=order.refill,  # type: ignore[arg-type]
        **order.limits,
    )
    show = None
    if first:  # after the checks of `stream`: a prompt that is refused isn't shown
        texts = [p["prompt"] if isinstance(p["prompt"], str) else words.decode(p["prompt"]) for p in prompts]
        show = Show([""] if order.chat and len(texts) == 1 else texts, as_json=order.json)
    shown: set[int] = set()
    with _interrupts(stream, len(prompts)) as interrupted:
        try:
            for token in stream:
                if show is not None:
                    show.token(token)
                    if token.stopped:
                        shown.add(token.prompt)
                        show.result(next(r for r in stream.results if r.index == token.prompt))
        except StreamError as error:
            for result in error.results:
                if show is not None and result.index not in shown:
                    show.result(result)
            raise
    if show is not None:
        show.figures(stream.figures)
    gen.close()
    return INTERRUPTED if interrupted else 0


@contextlib.contextmanager
def _interrupts(stream: object, prompts: int) -> Iterator[list[int]]:
    """While open, the first SIGINT or SIGTERM cancels all prompts; it is in the list that this gives."""
    seen: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        for prompt in range(prompts):
            stream.cancel(prompt)  # type: ignore[attr-defined]

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> int:
    """The process's entry."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    die_with_parent(int(os.environ.get("PIPELOOM_LAUNCHER", os.getppid())))
    code = run(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    sys.exit(main())

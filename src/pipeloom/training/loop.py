"""A training run, as each of its ranks sees it.

Takes a checked TrainConfig (and a run folder to resume from), gives an exit code: 0 for a run that ended,
130 for one that was stopped. It is the Python API at work and nothing more: `pipeloom.compile`, then
`pipe.step` on a batch that each rank draws for itself from (seed, step), with a look at held-out text now
and then. Only the first rank prints and keeps the run folder.

Resumed runs are the runs that they would have been: batches depend on (seed, step), the learning rate on the
step, dropout on (seed, step, micro-batch), and all else is in the checkpoint.
"""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path

import torch

from .. import api
from ..report.console import TrainingConsole
from ..report.timeline import write_timeline
from ..report.trace import write_trace
from .config import ConfigError, TrainConfig
from .data import Corpus
from .folder import RunFolder, replace_file
from .model import GPT, character_loss
from .ranks import Ranks
from .sample import read_weights, write_text
from .stop import Reason, Stop

INTERRUPTED = 130
#: steps over which tokens/s is averaged, and between two readings of the ranks' busy shares
RECENT = 10
#: characters of held-out text that the sample continues
PROMPT = 64


def train(config: TrainConfig, resume: Path | None = None, *, plain: bool | None = None) -> int:
    """Run the whole of `config` on this rank; collective over all ranks.

    resume: a run folder, to go on from its latest checkpoint. plain: lines instead of a live table (None:
    decide by the terminal). Returns 0, or 130 if the run was interrupted. Raises ConfigError, DataError or
    StrategyError for what can't be run, and whatever a failing rank raises.
    """
    world, stages = int(os.environ.get("WORLD_SIZE", 1)), config.strategy.pp_degree
    if world != stages:
        raise ConfigError(
            f"{world} ranks were started for a pipeline of {stages} stages: start one rank a stage"
        )
    run = Run(config)
    run.begin(resume)
    console = TrainingConsole(_title(config), stages, config.steps, plain) if run.first else None
    if run.done >= config.steps:
        if console is not None:
            console.message(
                f"all {config.steps} steps are done in {run.folder.path}: give more --steps to go on"
            )
        return 0
    with Stop(run.ranks) as stop:
        if console is None:
            reason = run.steps(stop)
        else:
            with console:
                reason = run.steps(stop, console)
        run.save()
    run.finish(reason, console)
    return INTERRUPTED if reason is Reason.INTERRUPTED else 0


class Run:
    """A run on this rank: the compiled pipeline, the text, the run folder, and how far it has come.

    All methods are collective. first: this rank prints and writes. done: optimizer steps behind it.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.corpus = Corpus.load(config.text)
        self.corpus.check(config.model.sequence)
        self.model = GPT(len(self.corpus.vocabulary), config.model, config.seed)
        self.pipe = api.compile(
            self.model,
            character_loss,
            example=self._batch(0),
            strategy=config.strategy,
            optimizer=lambda named: torch.optim.AdamW(
                named, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
            ),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, config.lr_share),
        )
        self.ranks = Ranks()
        self.first = self.ranks.rank == 0
        self.done = 0
        self._saved = -1
        self._eval_set = self.corpus.held_out_batches(
            config.eval_batches, config.batch_size, config.model.sequence
        )
        self._before = self._after = float("nan")

    def begin(self, resume: Path | None) -> None:
        """Make a run folder, or go on from the latest checkpoint of `resume`."""
        if resume is None:
            self.folder = RunFolder(
                Path(self.ranks.from_first(lambda: str(RunFolder.create(self.config).path)))
            )
            return
        self.folder = RunFolder(resume)
        latest = self.folder.latest()
        if latest.text != self.corpus.digest:
            raise ConfigError(f"{resume}: was trained on another text; give the same --text as then")
        self.pipe.load(resume / latest.checkpoint)
        self.done = self._saved = latest.step
        if self.first:
            self.folder.rewind(self.done)

    def steps(self, stop: Stop, console: TrainingConsole | None = None) -> Reason:
        """Train until the last step, the time limit or an interrupt; says which."""
        config = self.config
        self._before = self._after = self.held_out()
        if console is not None:
            console.message(f"run folder: {self.folder.path}")
            console.message(f"held-out loss before step {self.done + 1}: {self._before:.4f} nats a character")
        began = time.monotonic()
        recent: deque[float] = deque(maxlen=RECENT)
        busy: list[float] = []
        reason = Reason.NONE
        while self.done < config.steps and reason is Reason.NONE:
            start = time.monotonic()
            result = self.pipe.step(*self._batch(self.done))
            loss = float(result.loss)
            recent.append(time.monotonic() - start)
            self.done += 1
            held_out = None
            if self.done % config.eval_every == 0 or self.done == config.steps:
                held_out = self._after = self.held_out()
            if console is not None:
                if len(recent) == 1 or self.done % RECENT == 0:
                    busy = self._busy()
                speed = len(recent) * config.batch_size * config.model.sequence / sum(recent)
                lr = config.lr * config.lr_share(self.done - 1)
                console.update(self.done, loss, held_out, speed, busy, lr)
                self.folder.append(
                    {
                        "step": self.done,
                        "loss": loss,
                        "held_out": held_out,
                        "tokens_per_second": round(speed, 1),
                        "lr": lr,
                        "busy": [round(share, 4) for share in busy],
                    }
                )
            if config.minutes is not None and time.monotonic() - began > 60 * config.minutes:
                stop.ask(Reason.TIME)
            reason = stop.agree()
            if self.done % config.save_every == 0:
                self.save()
        return reason

    def held_out(self) -> float:
        """Mean loss over the fixed held-out batches, nats a character."""
        losses = [float(self.pipe.eval(inputs, targets).loss) for inputs, targets in self._eval_set]
        weights = [len(inputs) for inputs, _ in self._eval_set]
        return sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)

    def save(self) -> None:
        """A checkpoint of where the run is, unless it has one already."""
        if self.done == self._saved:
            return
        self.pipe.save(self.folder.checkpoint(self.done))
        self._saved = self.done
        if self.first:
            self.folder.publish(self.done, self.corpus.digest, self.config.keep)

    def finish(self, reason: Reason, console: TrainingConsole | None) -> None:
        """The end of the run: timelines and a sample into the folder, figures on the console."""
        if reason is Reason.INTERRUPTED:
            if console is not None:
                console.message(
                    f"stopped after step {self.done}; go on with: pipeloom train --resume {self.folder.path}"
                )
            return
        if self.done != self.config.steps:
            self._after = self.held_out()
        predicted, measured = self.pipe.plan.timeline(), self.pipe.timeline()
        if console is None:
            return
        path = self.folder.path
        write_trace(path / "trace.json", [predicted, measured])
        thought, was = self.pipe.plan.predicted, self.pipe.measured or measured.figures()
        write_timeline(
            path / "timeline.html", [predicted, measured], title=_title(self.config), figures=[thought, was]
        )
        sample = self._sample()
        console.show_figures(thought, was)
        rows = [
            ("held-out loss", f"{self._before:.4f} before, {self._after:.4f} after (nats a character)"),
            ("run folder", str(path)),
            ("timeline", str(path / "timeline.html")),
            ("trace", f"{path / 'trace.json'} (open it at ui.perfetto.dev)"),
        ]
        console.summary(rows, sample)

    def _busy(self) -> list[float]:
        figures = self.pipe.measured
        return list(figures.busy) if figures is not None else [0.0] * self.config.strategy.pp_degree

    def _batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.corpus.batch(self.config.seed, step, self.config.batch_size, self.config.model.sequence)

    def _sample(self) -> str | None:
        """What the trained model writes: the first rank has only its own stages, so it reads the
        checkpoint.
        """
        if not self.config.sample:
            return None
        model = GPT(len(self.corpus.vocabulary), self.config.model)
        read_weights(model, self.folder.checkpoint(self.done))
        prompt = self.corpus.decode(self.corpus.held_out[:PROMPT])
        text = prompt + write_text(model, self.corpus, prompt, self.config.sample, seed=self.config.seed)
        replace_file(self.folder.path / "sample.txt", text + "\n")
        return text


def _title(config: TrainConfig) -> str:
    strategy = config.strategy
    return (
        f"{strategy.schedule_name}, {strategy.pp_degree} × {strategy.vpp_degree} chunks, "
        f"{len(strategy.micro_batches(config.batch_size))} micro-batches"
    )

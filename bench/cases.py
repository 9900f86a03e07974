"""What breaks elsewhere: each case a small model, a batch, and how it is run by torch.distributed.pipelining, by
pipeloom and by plain PyTorch in one process.

A `Recipe` says what is trained; `by_torch`, `by_pipeloom` and `by_pytorch` run one, each as its users would write it,
and give an answer: losses, gradients, weights and buffers under the model's own names. `judge` compares two answers in
a few words. A case that isn't a plain recipe brings functions of its own.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pipeloom
from pipeloom.local import compile_local

WIDTH, WORDS = 8, 16
Answer = dict[str, Any]
Batch = tuple[Any, Any]
#: relative errors above this are wrong (float32)
BOUND = 1e-5


class Model(nn.Module):
    """Parts in a row: one a stage for torch.distributed.pipelining, cut points by name for pipeloom."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        for number, part in enumerate(parts):
            self.add_module(f"part{number}", part)

    @property
    def parts(self) -> list[nn.Module]:
        return list(self.children())

    def forward(self, *inputs: Any) -> Any:
        for part in self.parts:
            inputs = (part(*inputs),)
            inputs = inputs[0] if isinstance(inputs[0], tuple) else inputs
        return inputs[0] if len(inputs) == 1 else inputs


def seeded(make: Callable[[], Model]) -> Callable[[], Model]:
    def build() -> Model:
        torch.manual_seed(0)
        return make()

    return build


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())


@seeded
def chain() -> Model:
    return Model(layer(), layer())


def dense(*sizes: int) -> Callable[[], list[Batch]]:
    def make() -> list[Batch]:
        torch.manual_seed(1)
        return [(torch.randn(n, WIDTH), torch.randn(n, WIDTH)) for n in sizes]

    return make


def words(samples: int, *times: int, ignore: bool = False) -> Callable[[], list[Batch]]:
    def make() -> list[Batch]:
        torch.manual_seed(1)
        found = []
        for time in times:
            tokens, targets = (torch.randint(0, WORDS, (samples, time)) for _ in range(2))
            for i in range(samples if ignore else 0):
                targets[i, : i * time // samples] = -100
            found.append((tokens, targets))
        return found

    return make


def word_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


@dataclass(frozen=True)
class Recipe:
    """What is trained. batches: one a step. optimizer: None leaves the gradients of the last step (of all steps
    together where `zero` is False). strategy: fields for pipeloom. checkpointing: of torch's, for ZBV say."""

    model: Callable[[], Model] = chain
    loss: Callable[[Any, Any], Tensor] = F.mse_loss
    batches: Callable[[], list[Batch]] = field(default_factory=lambda: dense(8))
    micro_batches: int = 4
    optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] | None = None
    clip: float | None = None
    zero: bool = True
    autocast: bool = False
    schedule: str = "1F1B"

    @property
    def chunks(self) -> int:
        return 2 if self.schedule == "ZBV" else 1


def names_of(model: nn.Module) -> dict[int, str]:
    return {id(p): n for n, p in model.named_parameters()}


def answer_of(model: nn.Module, held: Iterable[nn.Module], losses: list[Tensor]) -> Answer:
    """What a rank has of the model after its steps."""
    names, buffers = names_of(model), {id(b): n for n, b in model.named_buffers()}
    parameters = {names[id(p)]: p for part in held for p in part.parameters()}
    return {
        "losses": losses,
        "gradients": {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None},
        "weights": {n: p.detach().clone() for n, p in parameters.items()},
        "buffers": {buffers[id(b)]: b.clone() for part in held for b in part.buffers()},
    }


def amp(recipe: Recipe) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=recipe.autocast)


def by_pytorch(recipe: Recipe, *, sequential: bool = False) -> Answer:
    """Plain PyTorch on whole batches, in one process. sequential: micro-batch by micro-batch, as BatchNorm needs it."""
    model = recipe.model()
    optimizer = recipe.optimizer(model.parameters()) if recipe.optimizer else None
    losses = []
    for x, y in recipe.batches():
        if recipe.zero:
            model.zero_grad()
        pieces = recipe.micro_batches if sequential else 1
        total = torch.zeros(())
        for a, b in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
            with amp(recipe):
                loss = recipe.loss(model(a), b) / pieces
            loss.backward()
            total = total + loss.detach()
        losses.append(total)
        if optimizer is not None:
            if recipe.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimizer.step()
    return answer_of(model, [model], losses)


def torch_stages(recipe: Recipe, model: Model, rank: int, size: int) -> tuple[Any, list[nn.Module]]:
    """torch's schedule with this rank's stages, and the stages' modules."""
    parts = model.parts
    mine = [rank, 2 * size - 1 - rank] if recipe.schedule == "ZBV" else [rank]
    stages = [pipelining.PipelineStage(parts[i], i, len(parts), torch.device("cpu")) for i in mine]
    if recipe.schedule == "ZBV":
        schedule = pipelining.ScheduleZBVZeroBubble(stages, recipe.micro_batches, loss_fn=recipe.loss)
    else:
        schedule = pipelining.Schedule1F1B(stages[0], recipe.micro_batches, loss_fn=recipe.loss)
    return schedule, [parts[i] for i in mine]


def torch_step(
    recipe: Recipe, schedule: Any, rank: int, size: int, batch: Batch, losses: list[Tensor]
) -> None:
    x, y = batch
    last = 0 if recipe.schedule == "ZBV" else size - 1
    inputs = (x if isinstance(x, tuple) else (x,)) if rank == 0 else ()
    found: list[Tensor] = []
    with amp(recipe):
        if rank == last:
            schedule.step(*inputs, target=y, losses=found)
            losses.append(torch.stack([loss.detach() for loss in found]).mean())
        else:
            schedule.step(*inputs)


def by_torch(recipe: Recipe, rank: int, size: int) -> Answer:
    """torch.distributed.pipelining, with stages built by hand."""
    model = recipe.model()
    schedule, held = torch_stages(recipe, model, rank, size)
    parameters = [p for part in held for p in part.parameters()]
    optimizer = recipe.optimizer(parameters) if recipe.optimizer else None
    losses: list[Tensor] = []
    for batch in recipe.batches():
        if recipe.zero:
            for part in held:
                part.zero_grad()
        torch_step(recipe, schedule, rank, size, batch, losses)
        if optimizer is not None:
            if recipe.clip is not None:
                nn.utils.clip_grad_norm_(parameters, recipe.clip)
            optimizer.step()
    return answer_of(model, held, losses)


def compiled(recipe: Recipe, size: int, **fields: Any) -> Any:
    """The model's pipeline on these ranks, cut where torch's stages begin."""
    model = recipe.model()
    strategy = pipeloom.Strategy(
        pp_degree=size,
        vpp_degree=recipe.chunks,
        schedule_mode=recipe.schedule,
        accumulate_steps=recipe.micro_batches,
        cuts=[f"part{i}" for i in range(1, size * recipe.chunks)],
        max_norm=recipe.clip,
        autocast="bfloat16" if recipe.autocast else None,
        **fields,
    )
    example = recipe.batches()[0]
    return pipeloom.compile(
        model, recipe.loss, example=example, strategy=strategy, optimizer=recipe.optimizer
    )


def by_pipeloom(recipe: Recipe, size: int, **fields: Any) -> Answer:
    pipe = compiled(recipe, size, **fields)
    losses = []
    for x, y in recipe.batches():
        if recipe.zero:
            pipe.zero_grad()
        losses.append(pipe.step(x, y, update=recipe.optimizer is not None).loss.detach().clone())
    return pipeloom_answer(pipe, losses)


def pipeloom_answer(pipe: Any, losses: list[Tensor]) -> Answer:
    first = pipe.store.first_name
    return {
        "losses": losses,
        "gradients": {n: g.clone() for n, g in pipe.gradients().items()},
        "weights": {first[n]: p.detach().clone() for n, p in pipe.store.parameters.items()},
        "buffers": {n: b.clone() for n, b in pipe.store.buffers.items()},
    }


# ---- comparing


def merged(answers: list[Answer]) -> Answer:
    """One answer of all ranks'. "copies": names whose weights differ between ranks."""
    whole: Answer = {
        "losses": [],
        "gradients": {},
        "weights": {},
        "buffers": {},
        "copies": [],
        "ranks": answers,
    }
    for answer in answers:
        whole["losses"] = whole["losses"] or answer["losses"]
        for name, weight in answer["weights"].items():
            if name in whole["weights"] and not torch.equal(weight, whole["weights"][name]):
                whole["copies"].append(name)
        for what in ("gradients", "weights", "buffers"):
            whole[what] |= {n: t for n, t in answer[what].items() if n not in whole[what]}
    return whole


def off(value: Tensor, reference: Tensor) -> float:
    value, reference = value.double(), reference.double()
    if value.shape != reference.shape:
        return float("inf")
    return float((value - reference).norm() / reference.norm().clamp_min(1e-12))


def judge(found: Answer, reference: Answer, *, bound: float = BOUND, what: str = "gradients") -> str:
    """What is wrong, or that it is right. what: "gradients", or "weights" where an optimizer has run."""
    wrong = []
    if len(found["losses"]) != len(reference["losses"]):
        wrong.append(f"{len(found['losses'])} losses for {len(reference['losses'])} steps")
    for step, (loss, right) in enumerate(zip(found["losses"], reference["losses"], strict=False)):
        if off(loss, right) > bound:
            wrong.append(f"loss of step {step} off by {percent(off(loss, right))}")
            break
    scale = max((float(t.norm()) for t in reference[what].values()), default=1.0)
    errors = {}
    for name, right in reference[what].items():
        value = found[what].get(name)
        small = float(right.norm()) < 1e-6 * scale
        if value is None:
            errors[name] = 1.0 if not small else 0.0
        elif not small:
            errors[name] = off(value, right)
    if errors and max(errors.values()) > bound:
        name = max(errors, key=errors.__getitem__)
        wrong.append(f"{what.removesuffix('s')} of {name} off by {percent(errors[name])}")
    for name, right in reference["buffers"].items():
        value = found["buffers"].get(name)
        if value is None or off(value, right) > bound:
            shown = (
                f"{value.item():g}, not {right.item():g}"
                if value is not None and value.numel() == 1
                else "wrong"
            )
            wrong.append(f"buffer {name} is {shown}")
            break
    if found["copies"]:
        wrong.append(f"the copies of {found['copies'][0]} differ")
    return "right" if not wrong else "silently wrong: " + "; ".join(wrong)


def percent(error: float) -> str:
    if error == float("inf") or error != error:
        return "infinitely much"
    return f"{100 * error:.0f} %" if error < 10 else f"{error:.0f} times"


# ---- models of single cases


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


@seeded
def tied() -> Model:
    embedding, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
    head.weight = embedding.weight
    return Model(nn.Sequential(embedding, layer()), nn.Sequential(layer(), head))


@seeded
def text() -> Model:
    return Model(
        nn.Sequential(nn.Embedding(WORDS, WIDTH), Attention()),
        nn.Sequential(Attention(), nn.Linear(WIDTH, WORDS)),
    )


@seeded
def dropout() -> Model:
    return Model(nn.Sequential(layer(), nn.Dropout(0.5)), nn.Sequential(layer(), nn.Dropout(0.5)))


@seeded
def normed() -> Model:
    return Model(nn.Sequential(layer(), nn.BatchNorm1d(WIDTH)), layer())


def frozen(*which: int) -> Callable[[], Model]:
    def build() -> Model:
        model = chain()
        for i in which:
            model.parts[i].requires_grad_(False)
        return model

    return build


class Down(nn.Module):
    def __init__(self, last: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4 if last else 2, 2, 3, padding=1)
        self.last = last

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        return self.conv(x if skip is None else torch.cat([x, skip], 1)).relu()


class UNet(Model):
    """The first part's output is read by the last of four."""

    def __init__(self) -> None:
        super().__init__(Down(), Down(), Down(), Down(last=True))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        first = self.part0(x)
        return self.part3(self.part2(self.part1(first)), first)


def images() -> list[Batch]:
    torch.manual_seed(1)
    return [(torch.randn(8, 2, 4, 4), torch.randn(8, 2, 4, 4))]


class Ordered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y, y.argsort(dim=-1)


class Gathered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        return self.layer(x.gather(1, order))


class Named(nn.Module):
    """Hands on a dict, or a dataclass."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.layer, self.form = layer(), form

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return {"state": y, "gate": y.sigmoid()} if self.form == "dict" else Hidden(y, y.sigmoid())


@dataclass
class Hidden:
    state: Tensor
    gate: Tensor


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, hidden: Any) -> Tensor:
        state, gate = (
            (hidden["state"], hidden["gate"]) if isinstance(hidden, dict) else (hidden.state, hidden.gate)
        )
        return self.layer(state) * gate


class Several(nn.Module):
    """A tuple of which one element is never read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.spare = layer(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.spare(x)


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, x: Tensor, _unused: Tensor) -> Tensor:
        return self.layer(x)


class Turned(nn.Module):
    def __init__(self, back: bool) -> None:
        super().__init__()
        self.layer, self.back = layer(), back

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(1, 2)) if self.back else self.layer(x).transpose(1, 2)


def sequences() -> list[Batch]:
    torch.manual_seed(1)
    return [(torch.randn(8, 3, WIDTH), torch.randn(8, 3, WIDTH))]


class Routed(nn.Module):
    """The first part has a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.layer(x)
        return y, y.pow(2).mean()


class PassesOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, x: Tensor, auxiliary: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), auxiliary


def with_auxiliary(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return F.mse_loss(output[0], target) + output[1]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(layer(), layer())

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


class Tiny(nn.Module):
    """Its gradient is 5e37 times as large as others: under a large loss scale it alone overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny = nn.Parameter(torch.full((WIDTH,), 2e-38))
        self.layer = layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer((x * 5e37) * self.tiny)


def sgd(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def adamw(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


# ---- cases that are no plain recipe

DROPOUT = Recipe(dropout, micro_batches=2)
SCALED = Recipe(seeded(lambda: Model(Tiny(), layer())), micro_batches=2)
RESUMED = Recipe(
    seeded(lambda: Model(*(layer() for _ in range(4)))), batches=dense(*[8] * 10), optimizer=adamw
)
EVALUATED = Recipe()


def dropout_of_one_stage() -> Answer:
    """What pipeloom draws without a cut."""
    batches = DROPOUT.batches()
    pipe = compile_local(
        DROPOUT.model(),
        DROPOUT.loss,
        example=batches[0],
        strategy=pipeloom.Strategy(accumulate_steps=DROPOUT.micro_batches),
    )
    losses = [pipe.step(*batch, update=False).loss.clone() for batch in batches]
    return {"losses": losses, "gradients": pipe.gradients(), "weights": {}, "buffers": {}}


def scaler_by_torch(rank: int, size: int) -> Answer:
    scaler = torch.amp.GradScaler("cpu")
    model = SCALED.model()
    recipe = Recipe(lambda: model, loss=lambda o, t: scaler.scale(F.mse_loss(o, t)), micro_batches=2)
    schedule, held = torch_stages(recipe, model, rank, size)
    optimizer = torch.optim.SGD([p for part in held for p in part.parameters()], lr=1e-3)
    torch_step(recipe, schedule, rank, size, recipe.batches()[0], [])
    before = [p.detach().clone() for part in held for p in part.parameters()]
    scaler.scale(torch.zeros(()))  # a scaler makes its factor at its first loss, which other ranks never see
    scaler.step(optimizer)
    scaler.update()
    after = [p for part in held for p in part.parameters()]
    moved = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return {**answer_of(model, held, []), "skipped": not moved}


def scaler_by_pipeloom(_rank: int, size: int) -> Answer:
    recipe = Recipe(SCALED.model, micro_batches=2, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3))
    pipe = compiled(recipe, size, loss_scale="dynamic")
    result = pipe.step(*recipe.batches()[0])
    return {**pipeloom_answer(pipe, []), "skipped": bool(result.skipped), "scale": pipe.updater.scaler.scale}


def judge_scaler(found: Answer, _reference: Answer) -> str:
    skipped = [answer["skipped"] for answer in found["ranks"]]
    if all(skipped):
        return "right: every rank skips"
    which = ", ".join(f"rank {r} {'skips' if s else 'updates'}" for r, s in enumerate(skipped))
    return f"silently wrong: {which}"


def saved_by_pipeloom(rank: int, size: int) -> Answer:
    """Five steps at S 2, V 2, saved; five more at S 1."""
    batches = RESUMED.batches()
    fields = {"schedule_mode": "ZBV", "pp_degree": size, "vpp_degree": 2, "accumulate_steps": 4}
    _, pipe = RESUMED.model(), None
    model = RESUMED.model()
    pipe = pipeloom.compile(
        model, F.mse_loss, example=batches[0], strategy=pipeloom.Strategy(**fields), optimizer=adamw
    )
    losses = [pipe.step(*batch).loss.clone() for batch in batches[:5]]
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    pipe.save(Path(folder[0]) / "checkpoint")
    dist.barrier()
    alone = compile_local(
        RESUMED.model(),
        F.mse_loss,
        example=batches[0],
        strategy=pipeloom.Strategy(accumulate_steps=4),
        optimizer=adamw,
    )
    alone.load(Path(folder[0]) / "checkpoint")
    losses += [alone.step(*batch).loss.clone() for batch in batches[5:]]
    return {"losses": losses, "gradients": {}, "weights": alone.parameters(), "buffers": {}}


def evaluated_by_pytorch() -> Answer:
    model = EVALUATED.model()
    losses = []
    (x, y), (a, b) = dense(8, 6)()
    with torch.no_grad():
        losses.append(F.mse_loss(model(x), y))
    F.mse_loss(model(x), y).backward()
    with torch.no_grad():
        losses.append(F.mse_loss(model(a), b))
    return answer_of(model, [model], losses)


def evaluated_by_torch(rank: int, size: int) -> Answer:
    model = EVALUATED.model()
    schedule, held = torch_stages(EVALUATED, model, rank, size)
    losses: list[Tensor] = []
    (x, y), (a, b) = dense(8, 6)()

    def evaluate(inputs: Tensor, target: Tensor) -> None:
        found: list[Tensor] = []
        if rank == 0:
            schedule.eval(inputs)
        else:
            schedule.eval(target=target, losses=found)
            losses.append(torch.stack(found).mean())

    evaluate(x, y)
    torch_step(EVALUATED, schedule, rank, size, (x, y), [])
    evaluate(a, b)
    return answer_of(model, held, losses)


def evaluated_by_pipeloom(_rank: int, size: int) -> Answer:
    pipe = compiled(EVALUATED, size)
    (x, y), (a, b) = dense(8, 6)()
    losses = [pipe.eval(x, y).loss.clone()]
    pipe.step(x, y, update=False)
    losses.append(pipe.eval(a, b).loss.clone())
    return pipeloom_answer(pipe, losses)


def unet_by_torch(rank: int, size: int) -> Answer:
    """Through torch's tracer, since stages by hand pass values to the next one only."""
    torch.manual_seed(0)
    model = UNet()
    ((x, y),) = images()
    spec = {f"part{i}": pipelining.SplitPoint.BEGINNING for i in range(1, size)}
    traced = pipelining.pipeline(model, (x[:2],), split_spec=spec)
    stage = traced.build_stage(rank, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, 4, loss_fn=F.mse_loss)
    losses: list[Tensor] = []
    torch_step(Recipe(), schedule, rank, size, (x, y), losses)
    module = stage.submod
    return {
        "losses": losses,
        "gradients": {n: p.grad for n, p in module.named_parameters() if p.grad is not None},
        "weights": {},
        "buffers": {},
    }


def layers_by_pipeloom(_rank: int, size: int) -> Answer:
    """Five equal layers over two stages, cut by cost."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))
    ((x, y),) = dense(8)()
    pipe = pipeloom.compile(
        model,
        F.mse_loss,
        example=(x, y),
        strategy=pipeloom.Strategy(pp_degree=size, accumulate_steps=4, costs="roofline"),
    )
    pipe.step(x, y, update=False)
    return pipeloom_answer(pipe, [])


def judge_layers(found: Answer, _reference: Answer) -> str:
    held = [sorted(answer["weights"]) for answer in found["ranks"]]
    names = {f"{i}.{what}" for i in range(5) for what in ("weight", "bias")}
    if set().union(*held) != names:
        return f"wrong names: {sorted(set().union(*held) ^ names)}"
    return (
        "right: "
        + " and ".join(f"{len({n[0] for n in part})} layers" for part in held)
        + ", the model's own names"
    )


def llama(labels: bool = True) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=32
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, 32, (8, 6))
    targets = ids.clone()
    for i in range(8):
        targets[i, : i // 2] = -100
    return model, {"input_ids": ids, **({"labels": targets} if labels else {})}


def llama_by_pytorch() -> Answer:
    model, batch = llama()
    loss = model(**batch).loss
    loss.backward()
    return answer_of(model, [model], [loss.detach()])


def llama_by_torch(rank: int, _size: int) -> Answer:
    model, batch = llama()
    small = {k: v[:2] for k, v in batch.items()}
    spec = {"model.layers.2": pipelining.SplitPoint.BEGINNING}
    traced = pipelining.pipeline(model, (), mb_kwargs=small, split_spec=spec)
    stage = traced.build_stage(rank, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, 4, loss_fn=lambda output, _: output)
    if rank == 0:
        schedule.step(**batch)
    else:
        schedule.step(target=batch["labels"])
    return answer_of(model, [stage.submod], [])


def llama_by_pipeloom(_rank: int, size: int) -> Answer:
    model, batch = llama()
    strategy = pipeloom.Strategy(pp_degree=size, accumulate_steps=4, costs="roofline")
    pipe = pipeloom.compile(model, example=batch, strategy=strategy)
    loss = pipe.step(batch, update=False).loss.clone()
    return pipeloom_answer(pipe, [loss])


Runs = Callable[[int, int], Answer]


@dataclass(frozen=True)
class Case:
    """number: of the list in docs/correctness.md. torch: how torch.distributed.pipelining runs it, or why it can't.
    oracle: what is right; our_oracle: for pipeloom, where that depends on who draws."""

    number: int
    title: str
    ours: Runs
    torch: Runs | str
    oracle: Callable[[], Answer]
    judge: Callable[[Answer, Answer], str] = judge
    ranks: int = 2
    our_oracle: Callable[[], Answer] | None = None


def plain(
    number: int, title: str, recipe: Recipe, *, sequential: bool = False, ranks: int = 2, **options: Any
) -> Case:
    """A case that is a recipe. options: of `judge`."""
    return Case(
        number,
        title,
        lambda _rank, size: by_pipeloom(recipe, size),
        lambda rank, size: by_torch(recipe, rank, size),
        lambda: by_pytorch(recipe, sequential=sequential),
        lambda found, reference: judge(found, reference, **options),
        ranks,
    )


def nothing() -> Answer:
    return {"losses": [], "gradients": {}, "weights": {}, "buffers": {}}


CASES: tuple[Case, ...] = (
    plain(
        1,
        "tied embedding, ten AdamW steps",
        Recipe(tied, word_loss, words(8, *[5] * 10), 2, adamw),
        what="weights",
        bound=1e-3,
    ),
    Case(
        2,
        "dropout 0.5: the losses of one stage",
        lambda _rank, size: by_pipeloom(DROPOUT, size),
        lambda rank, size: by_torch(DROPOUT, rank, size),
        lambda: by_pytorch(DROPOUT, sequential=True),
        our_oracle=dropout_of_one_stage,
    ),
    plain(3, "BatchNorm1d: running statistics", Recipe(normed, micro_batches=2), sequential=True),
    plain(5, "all of stage 0 frozen", Recipe(frozen(0))),
    plain(5, "all of stage 1 frozen", Recipe(frozen(1))),
    plain(6, "one micro-batch, two stages", Recipe(micro_batches=1)),
    plain(7, "batch of 10, four micro-batches", Recipe(batches=dense(10))),
    plain(8, "batches of 8, 8, 4", Recipe(batches=dense(8, 8, 4), optimizer=sgd), what="weights"),
    plain(9, "sequences of 5, 5, 9", Recipe(text, word_loss, words(8, 5, 5, 9))),
    plain(10, "two steps add up", Recipe(batches=dense(8, 8), micro_batches=2, zero=False)),
    plain(11, "mean over unevenly spread tokens", Recipe(text, word_loss, words(8, 5, ignore=True))),
    Case(
        12,
        "a U-Net's skip over four stages",
        lambda _rank, size: by_pipeloom(Recipe(seeded(UNet), batches=images), size),
        unet_by_torch,
        lambda: by_pytorch(Recipe(seeded(UNet), batches=images)),
        ranks=4,
    ),
    plain(13, "an integer tensor crosses", Recipe(seeded(lambda: Model(Ordered(), Gathered())))),
    plain(14, "a dict crosses", Recipe(seeded(lambda: Model(Named("dict"), Reads())))),
    plain(14, "a dataclass crosses", Recipe(seeded(lambda: Model(Named("dataclass"), Reads())))),
    plain(14, "a tuple with an unused element", Recipe(seeded(lambda: Model(Several(), First())))),
    plain(
        15,
        "a transposed view crosses",
        Recipe(seeded(lambda: Model(Turned(False), Turned(True))), batches=sequences),
    ),
    plain(
        16,
        "an auxiliary loss of stage 0 (handed on by hand)",
        Recipe(seeded(lambda: Model(Routed(), PassesOn())), with_auxiliary),
    ),
    Case(
        17,
        "five equal layers over two stages, by cost",
        layers_by_pipeloom,
        "not offered: the user cuts; names are those of the stage's module",
        nothing,
        judge_layers,
    ),
    plain(18, "clipping to norm 0.1", Recipe(optimizer=sgd, clip=0.1), what="weights"),
    Case(
        19,
        "one rank's gradient overflows under a loss scaler",
        scaler_by_pipeloom,
        scaler_by_torch,
        nothing,
        judge_scaler,
    ),
    plain(
        20, "activation checkpointing, 1F1B", Recipe(seeded(lambda: Model(Checkpointed(), Checkpointed())))
    ),
    plain(
        20,
        "activation checkpointing, ZBV",
        Recipe(seeded(lambda: Model(*(Checkpointed() for _ in range(4)))), schedule="ZBV"),
    ),
    plain(21, "bfloat16 autocast over a cut", Recipe(autocast=True), sequential=True, bound=2e-2),
    Case(
        22,
        "saved at S 2, V 2, loaded at S 1",
        saved_by_pipeloom,
        "not offered: each stage's state is saved and put together by hand",
        lambda: by_pytorch(RESUMED),
        lambda found, reference: judge(found, reference, what="weights", bound=1e-3),
    ),
    Case(
        23,
        "evaluation before the first step, and of another size",
        evaluated_by_pipeloom,
        evaluated_by_torch,
        evaluated_by_pytorch,
    ),
    Case(26, "a Llama by class, labels given", llama_by_pipeloom, llama_by_torch, llama_by_pytorch),
)

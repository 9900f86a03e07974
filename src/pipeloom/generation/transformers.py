"""The adapter for causal language models of transformers, and their tokenizers.

Takes a model as `AutoModelForCausalLM` makes it, gives a GenerationSpec over a growing cache: the same ops as its own
`generate`, so the same tokens. Chosen over a static cache changed in place because it was as fast, takes no more
memory than there are tokens, and needs no mask for a prompt or a single token, so that attention's fast kernels run.

Weights can be read from a local folder by name (`read_folder`): a rank then never holds more than its own.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from .cutting import ReadWeights
from .extra import transformers
from .spec import GenerationError, GenerationSpec, logits_of
from .step_graph import first_names


def is_hub_model(model: nn.Module) -> bool:
    """Whether a model is one of transformers' (without importing it)."""
    return any(c.__module__.startswith("transformers.") for c in type(model).__mro__)


def hub_spec(model: Any, max_len: int | None = None) -> GenerationSpec:
    """The spec of a causal language model of transformers. max_len: positions; None: what its configuration says.

    Raises GenerationError for one whose cache isn't a key and a value a layer (recurrent ones): use `recomputing`.
    """
    hub = transformers("the adapter for transformers models")
    config = model.config.get_text_config(decoder=True)
    queries = getattr(config, "num_attention_heads", None)
    heads = getattr(config, "num_key_value_heads", None) or queries
    width = getattr(config, "head_dim", None) or (config.hidden_size // queries if queries else 0)
    layers = config.num_hidden_layers
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds - {"full_attention", "sliding_attention"} or not isinstance(heads, int) or not width:
        raise GenerationError(
            f"{type(model).__name__} isn't known to keep a key and a value a layer (kinds of its layers: "
            f"{', '.join(sorted(kinds))}): write a GenerationSpec of your own, or run it by recomputing()"
        )
    limit = max_len or getattr(config, "max_position_embeddings", None)

    accepted = inspect.signature(type(model).forward).parameters
    cache_name = "cache" if "cache" in accepted else "past_key_values"
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    def step(module: nn.Module, ids: Tensor, start: Tensor, cache: Any, consts: Any) -> tuple[Tensor, Any]:
        places = (torch.arange(ids.shape[1], device=ids.device) + start)[None]
        given: dict[str, Any] = {**last_only, "use_cache": True}
        if consts is not None:
            padding = consts["padding"][:, None]
            past = cache[0][0].shape[2]
            given["attention_mask"] = torch.arange(past + ids.shape[1], device=ids.device)[None] >= padding
            places = (places - padding).clamp(min=0)
        held = hub.Cache(layers=[_layer(hub, key, value) for key, value in cache])
        output = module(input_ids=ids, position_ids=places, **{cache_name: held}, **given)
        return logits_of(output)[:, -1], [(layer.keys, layer.values) for layer in held.layers]

    def init_cache(batch: int, device: torch.device, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        def leaf() -> Tensor:
            return torch.empty((batch, heads, 0, width), dtype=dtype, device=device)

        return [(leaf(), leaf()) for _ in range(layers)]

    def scope_inputs(lengths: Tensor) -> dict[str, Tensor] | None:
        return {"padding": lengths.max() - lengths} if len(lengths) > 1 else None

    dtype = next((p.dtype for p in model.parameters() if p.dtype.is_floating_point), torch.float32)
    masks = getattr(config, "sliding_window", None) is not None or "sliding_attention" in kinds
    return GenerationSpec(step, init_cache, scope_inputs, 2, limit, dtype=dtype, masks=masks)


def _layer(hub: Any, keys: Tensor, values: Tensor) -> Any:
    """A layer of transformers' growing cache that holds these already (given to its constructor they are copied)."""
    layer = hub.cache_utils.DynamicLayer()
    layer.keys, layer.values = keys, values
    layer.dtype, layer.device = keys.dtype, keys.device
    layer.is_initialized = True
    return layer


class HubWords:
    """A tokenizer of transformers."""

    def __init__(self, tokenizer: Any, ends: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        own = tokenizer.eos_token_id
        self.ends = frozenset(ends) or (frozenset() if own is None else frozenset([own]))

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def chat(self, text: str) -> str:
        """The text as a user's turn, as the model was trained to be asked. Raises GenerationError where its tokenizer
        has no template for that."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise GenerationError(
                "this model's tokenizer has no chat template: give the prompt as plain text"
            )
        turn = [{"role": "user", "content": text}]
        return str(self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))

    def writer(self) -> _HubWriter:
        return _HubWriter(self.tokenizer)

    def stops(self, strings: Sequence[str]) -> Callable[[Tensor, Any], Tensor]:
        criteria = transformers("stop").generation.StopStringCriteria
        found: Callable[[Tensor, Any], Tensor] = criteria(self.tokenizer, list(strings))
        return found


class _HubWriter:
    """transformers' TextStreamer, which prints; here what it would print is handed out."""

    def __init__(self, tokenizer: Any) -> None:
        class Streamer(transformers("streaming text").TextStreamer):  # type: ignore[misc]
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                del stream_end
                pieces.append(text)

        pieces: list[str] = []
        self._pieces = pieces
        self._streamer = Streamer(tokenizer, skip_special_tokens=True)

    def put(self, token: int) -> str:
        self._streamer.put(torch.tensor([token]))
        return self._taken()

    def end(self) -> str:
        self._streamer.end()
        return self._taken()

    def _taken(self) -> str:
        text = "".join(self._pieces)
        self._pieces.clear()
        return text


def open_folder(folder: Path, dtype: torch.dtype | None = None) -> tuple[nn.Module, HubWords, ReadWeights]:
    """A causal language model in a local folder, as `save_pretrained` writes it: its structure without its weights, its
    tokenizer, and what reads the weights by name. dtype: None for that of the configuration.

    Raises GenerationError for a folder that holds no such model.
    """
    hub = transformers(f"the model in {folder}")
    if not (folder / "config.json").is_file():
        raise GenerationError(f"{folder}: no model of transformers: it has no config.json")
    try:
        config = hub.AutoConfig.from_pretrained(folder, local_files_only=True)
        with weightless():
            model = hub.AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype or torch.float32)
        tokenizer = hub.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise GenerationError(f"{folder}: can't be opened as a causal language model: {error}") from error
    generation = getattr(model, "generation_config", None)
    if (folder / "generation_config.json").is_file():
        generation = hub.GenerationConfig.from_pretrained(folder, local_files_only=True)
    ends = getattr(generation, "eos_token_id", None)
    own = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    return model.eval(), HubWords(tokenizer, own), read_folder(folder, model)


@contextlib.contextmanager
def weightless() -> Iterator[None]:
    """While open, modules get their parameters on the meta device: no memory, and nothing is initialised. Buffers are
    real, since what they are made from is in the configuration alone."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def read_folder(folder: Path, model: nn.Module) -> ReadWeights:
    """Reads weights by name from the safetensors files of a folder; buffers from the model itself."""
    files = _files(folder)
    base = f"{getattr(model, 'base_model_prefix', '')}."
    first = first_names(model)
    aliases: dict[str, list[str]] = {}
    for name, of in first.items():
        aliases.setdefault(of, []).append(name)
    dtypes = {n: p.dtype for n, p in model.named_parameters(remove_duplicate=False)}
    buffers = {n: b for n, b in model.named_buffers(remove_duplicate=False) if not b.is_meta}

    def read(names: Sequence[str]) -> Mapping[str, Tensor]:
        found = {n: buffers[n] for n in names if n in buffers}
        wanted: dict[Path, list[tuple[str, str]]] = {}
        for name in names:
            if name in found:
                continue
            stored = next(
                (n for n in (name, *aliases.get(name, ()), name.removeprefix(base)) if n in files), None
            )
            if stored is None:
                raise GenerationError(f"{folder}: its safetensors files hold no weight {name!r}")
            wanted.setdefault(files[stored], []).append((name, stored))
        for path, pairs in wanted.items():
            with safe_open(path, framework="pt") as file:
                for name, stored in pairs:
                    tensor = file.get_tensor(stored)
                    found[name] = tensor.to(dtypes.get(name, tensor.dtype))
        return found

    return read


def _files(folder: Path) -> dict[str, Path]:
    """Weight name → the file that holds it."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weights = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / Path(file).name for name, file in weights.items()}
    whole = folder / "model.safetensors"
    if not whole.is_file():
        raise GenerationError(
            f"{folder}: has no model.safetensors: save the model there with save_pretrained (other formats need code "
            "to be run, or more memory than a rank has)"
        )
    with safe_open(whole, framework="pt") as file:
        return dict.fromkeys(file.keys(), whole)

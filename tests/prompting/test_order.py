"""What the command takes and refuses, before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeloom.prompting.order import Order, OrderError, read_prompts


def test_an_order_travels_as_text(tmp_path: Path) -> None:
    order = Order(model=str(tmp_path), prompts=({"prompt": "a", "seed": 3},), limits={"top_p": 0.9}, stages=2)
    assert Order.load(order.dump()) == order


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"prompts": ()}, "no prompt was given"),
        ({"prompts": ({"prompt": ""},)}, "prompt 0 is empty"),
        ({"prompts": ({"text": "a"},)}, 'prompt 0 has no "prompt"'),
        ({"stages": 0}, "--stages 0: write at least 1"),
        ({"in_flight": 0}, "--in-flight 0"),
        ({"refill": "never"}, "--refill never"),
        ({"model": "nowhere"}, "--model nowhere: is no folder"),
    ],
)
def test_what_can_t_be_done_is_refused(tmp_path: Path, values: dict[str, Any], says: str) -> None:
    with pytest.raises(OrderError, match=says):
        Order(**{"model": str(tmp_path), "prompts": ({"prompt": "a"},), **values})


def test_a_file_of_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text('Once upon\n\n{"prompt": "{", "max_new_tokens": 5}\n', encoding="utf-8")
    assert read_prompts(file) == [{"prompt": "Once upon"}, {"prompt": "{", "max_new_tokens": 5}]
    file.write_text("a\n{b\n", encoding="utf-8")
    with pytest.raises(OrderError, match=r"prompts\.txt, line 2: begins with { but is no JSON"):
        read_prompts(file)
    file.write_bytes(b"\xff")
    with pytest.raises(OrderError, match=r"not UTF-8 text \(byte 0\)"):
        read_prompts(file)
    with pytest.raises(OrderError, match="can't be read"):
        read_prompts(tmp_path / "none")


def test_no_torch_is_needed_to_refuse() -> None:
    code = "import sys, pipeloom.prompting.order; sys.exit('torch' in sys.modules and 'torch is imported')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

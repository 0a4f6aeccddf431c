"""The messages that docs/troubleshooting.md explains are those of the code."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
SOURCE = "\n".join(path.read_text() for path in (ROOT / "moe_aiter").rglob("*.py"))
# a message of ours on the page, and how its parts stand in the source
OURS = [
    "the C++ extension moe_aiter._host is missing (…); the CPU path is plain torch, which is slower",
    "installed, but there is no GPU",
    "is no multiple of 8",
    "it is faster for so few rows of an expert",
    "is no Hopper GPU",
    "the ranks of an expert-parallel group have [5, 6] tokens: pass the same number on each, ",
    "call set_aux_loss(model, 'return')",
    "is no folder that save_sharded has written",
    "has no state of an optimizer: load the model alone",
    "here: make the model in the format that was saved",
    "is saved, but the model's … has no place for it",
    "has state that the optimizer has no place for",
]


@pytest.mark.parametrize("message", OURS)
def test_a_message_is_on_the_page_and_in_the_code(message):
    assert message in PAGE
    source = re.sub(r'"\s*\n\s*f?"', "", SOURCE)  # pieces of a text that follow each other
    pieces = re.split(r"…|\[5, 6\]|8$", message)
    assert all(piece.strip() in source for piece in pieces if piece.strip())


def test_a_new_reader_finds_the_answers():
    headings = {line.lstrip("# ") for line in PAGE.splitlines() if line.startswith("## ")}
    assert headings >= {
        "My loss is NaN",
        "Memory for my model",
        "How to release the memory",
        "Slow",
        "Dead experts",
    }

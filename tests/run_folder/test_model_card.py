"""Model cards: what others wrote is shown as text, and a card that was edited stays as it is."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard as HubCard
from markdown_it import MarkdownIt

from diffsynth_lite.redaction import Redactor, in_force
from diffsynth_lite.run_folder.model_card import (
    CARD,
    LORA_FOLDER,
    ModelCard,
    Sample,
    is_as_written,
    write_model_card,
)

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"
HOSTILE = (
    "<script>alert(1)</script> | a | [x](http://e.org) ![](file:///etc/passwd) `code` **bold** _it_ \\|\n"
    "~~s~~\n---\n# heading\n```\nimport os\n```\n&lt;b&gt; $x$ {{ 7 * 7 }} \x00"
)


def card(folder: Path, prompt: str = "a red circle", **changes: Any) -> ModelCard:
    """A card with an image and a clip, each before and after."""
    for step in (0, 6):
        for place in (0, 1):
            (folder / f"step-{step}-{place}.png").write_bytes(b"image %d %d" % (step, place))
        (folder / f"step-{step}-1.mp4").write_bytes(b"clip %d" % step)
    samples = [
        Sample(
            prompt=text,
            negative_prompt=negative,
            before=folder / f"step-0-{place}.png",
            after=folder / f"step-6-{place}.png",
        )
        for place, (text, negative) in enumerate([(prompt, None), ("a blue square", "blur")])
    ]
    plain = ModelCard(
        header={
            "base_model": "Qwen/Qwen-Image",
            "license": "apache-2.0",
            "tags": ["lora"],
            "instance_prompt": None,
        },
        title="ohwx: LoRA for Qwen-Image",
        summary="A LoRA.",
        triggers=["ohwx"],
        samples=samples,
        sample_caption="Drawn after step 6.",
        code=f'pipeline.load_lora_weights("{LORA_FOLDER}")',
        comfy_files={"pytorch_lora_weights.safetensors": "the model"},
        settings={"rank": "4"},
        caveats=["Nothing else was measured."],
    )
    return replace(plain, **changes)


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    folder = tmp_path / "lora"
    folder.mkdir()
    return folder


def shown(text: str) -> str:
    """What a reader of Markdown with tables and HTML makes of a card, without its header."""
    return MarkdownIt("gfm-like", {"linkify": False}).render(HubCard(text).text)


def test_a_card_has_a_header_for_the_hub_its_images_next_to_it_and_the_same_text_each_time(
    lora: Path, tmp_path: Path
) -> None:
    write_model_card(lora, card(tmp_path))
    text = (lora / CARD).read_text()
    assert HubCard(text).data.to_dict() == {
        "base_model": "Qwen/Qwen-Image",
        "license": "apache-2.0",
        "tags": ["lora"],
        "widget": [
            {"text": "a red circle", "output": {"url": "pictures/prompt-00.png"}},
            {
                "text": "a blue square",
                "parameters": {"negative_prompt": "blur"},
                "output": {"url": "pictures/prompt-01.mp4"},
            },
        ],
    }
    assert {path.name: path.read_bytes() for path in (lora / "pictures").iterdir()} == {
        "prompt-00-before.png": b"image 0 0",
        "prompt-00.png": b"image 6 0",
        "prompt-01-before.png": b"image 0 1",
        "prompt-01-before.mp4": b"clip 0",
        "prompt-01.png": b"image 6 1",
        "prompt-01.mp4": b"clip 6",
    }
    page = shown(text)
    assert '<td><img src="pictures/prompt-00.png" alt="image"' in page
    assert '<a href="pictures/prompt-01.mp4"><img src="pictures/prompt-01.png"' in page
    assert "<h2>Trigger words</h2>\n<ul>\n<li><strong>ohwx</strong></li>\n</ul>" in page
    assert "<li>pytorch_lora_weights.safetensors: the model</li>" in page
    assert str(tmp_path) not in text
    write_model_card(lora, card(tmp_path))
    assert (lora / CARD).read_text() == text


def test_what_is_not_there_is_left_out(lora: Path, tmp_path: Path) -> None:
    bare = card(tmp_path, header={}, triggers=[], samples=[], code=None, comfy_files=None)
    write_model_card(lora, bare)
    text = (lora / CARD).read_text()
    assert re.findall("^## (.*)", text, re.MULTILINE) == ["How it was trained", "What to know"]
    assert "Gallery" not in text
    first = [replace(card(tmp_path).samples[0], before=None)]
    write_model_card(lora, card(tmp_path, samples=first))
    assert "| a red circle | - | ![image](pictures/prompt-00.png) |" in (lora / CARD).read_text()


def test_texts_of_others_are_shown_as_text_and_secrets_are_masked(lora: Path, tmp_path: Path) -> None:
    everywhere: Mapping[str, Any] = {
        "title": HOSTILE,
        "summary": HOSTILE,
        "triggers": [HOSTILE],
        "settings": {HOSTILE: HOSTILE},
        "caveats": [f"{HOSTILE} {TOKEN} of my pass_word"],
        "header": {"instance_prompt": f"{TOKEN} {HOSTILE}"},
    }
    with in_force(Redactor({"MY_PASSWORD": "pass_word"})):
        write_model_card(lora, card(tmp_path, prompt=f"{HOSTILE} {TOKEN} pass_word", **everywhere))
    text = (lora / CARD).read_text()
    page = shown(text)
    assert TOKEN not in text + page
    assert "pass_word" not in text + page
    assert set(re.findall(r"<(\w+)", page)) == {
        *("h1", "h2", "p", "ul", "li", "strong", "table", "thead", "tbody", "tr", "th", "td", "img", "a"),
        *("pre", "code", "Gallery"),
    }
    assert re.findall(r'(?:href|src)="([^"]*)"', page) == [
        "pictures/prompt-00-before.png",
        "pictures/prompt-00.png",
        "pictures/prompt-01-before.mp4",
        "pictures/prompt-01-before.png",
        "pictures/prompt-01.mp4",
        "pictures/prompt-01.png",
    ]
    assert page.count("<h1>") == 1
    assert page.count("<td>") == 2 * 3 + 2
    words = " ".join(HOSTILE.replace("\x00", " ").split())
    escaped = words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert f"<h1>{escaped}</h1>" in page
    assert HubCard(text).data["widget"][0]["text"] == f"{HOSTILE} REDACTED REDACTED"


def test_a_card_that_was_edited_stays_with_its_images_and_one_that_was_not_is_renewed(
    lora: Path, tmp_path: Path
) -> None:
    write_model_card(lora, card(tmp_path))
    path = lora / CARD
    # As git and the hub's editor may leave it.
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    write_model_card(lora, card(tmp_path, summary="After more steps."))
    assert "After more steps." in path.read_text()
    written = path.read_text()
    without_mark = written[: written.rindex("<!--")]
    for edited in (
        written.replace("A LoRA", "My LoRA").replace("After", "Long after"),
        without_mark,
        "",
        "\xff",
    ):
        path.write_bytes(edited.encode("latin-1"))
        (lora / "pictures" / "prompt-00.png").write_bytes(b"mine")
        assert not is_as_written(edited)
        write_model_card(lora, card(tmp_path))
        assert path.read_bytes() == edited.encode("latin-1")
        assert (lora / "pictures" / "prompt-00.png").read_bytes() == b"mine"
    path.unlink()
    write_model_card(lora, card(tmp_path))
    assert is_as_written(path.read_text())

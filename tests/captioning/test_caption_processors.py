"""Processors are put together without torchvision, and ask as the model's own would."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, SmolVLMProcessor
from transformers.models.smolvlm import processing_smolvlm

from diffsynth_lite.captioning.captioner import Question
from diffsynth_lite.captioning.processors import ImageProcessor
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import parse_json, write_json
from diffsynth_lite.testing.captioners import (
    save_tiny_gemma3,
    save_tiny_joycaption,
    save_tiny_qwen3_vl,
    save_tiny_smolvlm,
)


def _processor(folder: Path) -> ImageProcessor:
    return ImageProcessor(folder, AutoConfig.from_pretrained(folder))


def _question(*sizes: tuple[int, int], instruction: str = "a red dog") -> Question:
    images = [Image.new("RGB", size, (200, 100, 50)) for size in sizes]
    return Question(images=images, instruction=instruction)


def _change(folder: Path, name: str, **settings: Any) -> None:
    write_json(folder / name, {**parse_json((folder / name).read_bytes()), **settings})


def test_each_image_has_as_many_tokens_as_the_model_makes_of_it(tmp_path: Path) -> None:
    processor = _processor(save_tiny_qwen3_vl(tmp_path))
    inputs = processor([_question((128, 64)), _question((64, 64), (64, 96), instruction="a")])
    mark = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    # Squares of 32 pixels.
    assert (inputs["input_ids"] == mark).sum(1).tolist() == [4 * 2, 2 * 2 + 2 * 3]
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 8], [1, 4, 4], [1, 6, 4]]
    # On the left.
    assert inputs["attention_mask"][:, -1].tolist() == [1, 1]
    assert inputs["attention_mask"][:, 0].sum() == 1


def test_smolvlm_is_asked_as_by_its_own_processor_which_needs_a_package_for_videos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_smolvlm(tmp_path)
    processor = _processor(folder)
    question = _question((96, 64), (40, 40))
    monkeypatch.setattr(processing_smolvlm, "num2words", str)
    monkeypatch.setattr(SmolVLMProcessor, "check_argument_for_proper_class", lambda *_: None)
    own = SmolVLMProcessor(
        AutoImageProcessor.from_pretrained(folder, backend="pil"),
        AutoTokenizer.from_pretrained(folder),
        None,
        image_seq_len=4,
    )
    text = processor._prompt(question.instruction, num_images=2)
    expected = own(text=[text], images=[list(question.images)], return_tensors="pt")
    inputs = processor([question])
    assert inputs.keys() == expected.keys()
    assert all((inputs[name] == expected[name]).all() for name in inputs)


def test_a_text_begins_once(tmp_path: Path) -> None:
    processor = _processor(save_tiny_gemma3(tmp_path))
    inputs = processor([_question((28, 28))])
    assert (inputs["input_ids"] == processor.tokenizer.bos_token_id).sum() == 1


def test_a_template_of_texts_only_gets_its_instruction_and_one_image(tmp_path: Path) -> None:
    processor = _processor(save_tiny_joycaption(tmp_path))
    inputs = processor([_question((50, 50))])
    text = processor.tokenizer.decode(inputs["input_ids"][0])
    assert text.count("<image>") == 16
    assert "a red dog<|im_end|>" in text
    with pytest.raises(UserError, match="chat template takes no 2 images"):
        processor([_question((50, 50), (50, 50))])


@pytest.mark.parametrize("has_switch", [True, False])
def test_a_model_that_can_think_first_is_asked_not_to(tmp_path: Path, has_switch: bool) -> None:
    folder = save_tiny_qwen3_vl(tmp_path)
    template = folder / "chat_template.jinja"
    thinking = "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
    template.write_text(template.read_text() + (thinking if has_switch else "<think>"))
    text = _processor(folder)._prompt("a", num_images=1)
    assert text.endswith("<think>") is not has_switch


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_qwen3_vl(tmp_path)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="has no chat template"):
        _processor(folder)


def test_a_template_that_takes_no_images_is_refused_at_the_start(tmp_path: Path) -> None:
    folder = save_tiny_qwen3_vl(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('texts only') }}")
    with pytest.raises(UserError, match="takes no 1 images"):
        _processor(folder)


def test_a_processor_that_needs_torchvision_names_it(tmp_path: Path) -> None:
    folder = save_tiny_joycaption(tmp_path)
    _change(folder, "processor_config.json", processor_class="PixtralProcessor")
    with pytest.raises(UserError, match=r"PixtralProcessor of .* pip install torchvision"):
        _processor(folder)


@pytest.mark.parametrize("name", ["preprocessor_config.json", "tokenizer.json"])
def test_a_folder_with_damaged_settings_is_refused(tmp_path: Path, name: str) -> None:
    folder = save_tiny_joycaption(tmp_path)
    (folder / name).write_text("{")
    with pytest.raises(UserError, match=r"makes no LlavaProcessor for texts and images: .* get the folder"):
        _processor(folder)

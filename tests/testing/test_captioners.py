from pathlib import Path

from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from diffsynth_lite.testing.captioners import save_tiny_qwen3_vl


def test_a_tiny_qwen3_vl_has_the_files_of_its_releases(tmp_path: Path) -> None:
    folder = save_tiny_qwen3_vl(tmp_path / "model")

    model = AutoModelForImageTextToText.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil")

    assert model.config.model_type == "qwen3_vl"
    assert image_processor.patch_size == model.config.vision_config.patch_size
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a cat"}]}]
    tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert tokens.count(model.config.image_token_id) == 1
    assert (folder / "video_preprocessor_config.json").is_file()

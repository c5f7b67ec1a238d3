"""A secret in a config is used, but neither kept nor shown, and the key that holds it is named."""

import yaml

from diffsynth_lite.config import load_config
from diffsynth_lite.redaction import Redactor, in_force

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"


def test_a_setting_that_holds_a_secret_is_named_and_masked(write, minimal) -> None:
    path = write(f"{minimal}logging:\n  trackers: [tensorboard]\n  run_name: a {TOKEN}\n# {TOKEN}\n")
    loaded = load_config(path)
    (warning,) = loaded.warnings
    assert warning.startswith(f"{path}:10 logging.run_name: holds a secret")
    assert "${oc.env:NAME}" in warning
    assert loaded.config.logging.run_name == f"a {TOKEN}"
    assert yaml.safe_load(loaded.resolved_yaml)["logging"]["run_name"] == "a REDACTED"
    assert TOKEN not in loaded.source_text
    assert loaded.source_text.count("REDACTED") == 2


def test_a_secret_on_the_command_line_is_named_and_masked(write, minimal) -> None:
    loaded = load_config(write(minimal), [f"validation.prompts=[a cat, {TOKEN}]"])
    (warning,) = loaded.warnings
    assert warning.startswith("validation.prompts=[a cat, REDACTED] (command line): holds a secret")
    assert yaml.safe_load(loaded.resolved_yaml)["validation"]["prompts"] == ["a cat", "REDACTED"]


def test_a_secret_in_an_entry_of_a_list_is_masked(write, minimal) -> None:
    sources = f"[{{path: a, trigger: {TOKEN}}}, {{path: b}}]"
    loaded = load_config(write(minimal.replace("  path: pictures", f"  sources: {sources}")))
    assert len(loaded.warnings) == 1
    assert "data.sources: holds a secret" in loaded.warnings[0]
    assert TOKEN not in loaded.resolved_yaml + loaded.source_text


def test_a_reference_to_a_secret_is_kept_as_it_is_written(write, minimal, monkeypatch) -> None:
    monkeypatch.setenv("MY_SECRET", 'swordfish\'s "name"')
    path = write(minimal.replace("qwen_image", "${oc.env:MY_SECRET}"))
    with in_force(Redactor({"MY_SECRET": 'swordfish\'s "name"'})):
        loaded = load_config(path)
    assert loaded.warnings == ()
    assert loaded.config.model.family == 'swordfish\'s "name"'
    assert "family: ${oc.env:MY_SECRET}" in loaded.resolved_yaml
    assert loaded.source_text == path.read_text()

"""Publishing against a hub on this machine: which bytes arrive, in one commit, and what is never sent."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub_server import REPOSITORY, Hub, serving
from huggingface_hub import constants

from diffsynth_lite.cli.main import main
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.model_card import LORA_FOLDER, is_as_written, marked

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"
HEADER = "---\nbase_model: Qwen/Qwen-Image\n---\n"
CARD = marked(f'{HEADER}# LoRA\n![](./pictures/prompt-00.png)\nload_lora_weights("{LORA_FOLDER}")\n')
WEIGHTS = os.urandom(70_000)

# The client of the hub, 2.4, uploads so.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")

Change = Callable[[RunFolder, pytest.MonkeyPatch], object]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """What a run leaves, and a token to publish it with."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    run = RunFolder(tmp_path / "mine")
    for folder in (run.lora_folder / "pictures", run.ema_lora_folder, run.checkpoints_folder):
        folder.mkdir(parents=True)
    run.write_status("finished", exit_code=0, step=6, message="finished")
    for name in ("config.yaml", "metrics.jsonl", "checkpoints/adapter.safetensors", "lora/notes.txt"):
        (run.path / name).write_text(f"secret {name}")
    (run.lora_folder / "pytorch_lora_weights.safetensors").write_bytes(WEIGHTS)
    (run.lora_folder / "README.md").write_text(CARD)
    (run.lora_folder / "pictures" / "prompt-00.png").write_bytes(b"picture")
    (run.lora_folder / "pictures" / "of-an-earlier-prompt.png").write_bytes(b"not in the card")
    (run.ema_lora_folder / "pytorch_lora_weights.safetensors").write_bytes(b"average")
    (run.ema_lora_folder / "README.md").write_text("# By hand\n![](https://e.org/pictures/other.png)")
    return run


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    hub = Hub({})
    hub.exists, hub.token = False, TOKEN
    with serving(hub, tmp_path / "cache"):
        yield hub


def publish(run: RunFolder, *arguments: str, to: str = REPOSITORY) -> int:
    return main(["publish", str(run.path), f"--to={to}", *arguments])


def test_the_lora_its_card_and_the_images_of_the_card_arrive_in_one_commit_and_nothing_else(
    run: RunFolder, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert publish(run, "--dry-run", "--private") == 0
    assert hub.requests == []
    card = CARD.replace(LORA_FOLDER, REPOSITORY)
    assert capsys.readouterr().out.splitlines() == [
        f"To {REPOSITORY}, private:",
        f"  README.md  {len(card)} bytes",
        "  pytorch_lora_weights.safetensors  68.4 KiB",
        "  pictures/prompt-00.png  7 bytes",
        "Licence: none; name it with --license, or in the header of the card",
        "Nothing was sent.",
    ]

    assert publish(run, "--private") == 0
    arrived = hub.files.pop("README.md").decode()
    assert arrived.partition("<!--")[0] == card.partition("<!--")[0]
    assert is_as_written(arrived)
    assert hub.files == {"pytorch_lora_weights.safetensors": WEIGHTS, "pictures/prompt-00.png": b"picture"}
    assert [len(commit) for commit in hub.commits] == [3]
    assert hub.is_private
    printed = capsys.readouterr()
    assert TOKEN not in printed.out + printed.err


def test_only_what_changed_is_committed_and_a_card_edited_there_gives_way_only_to_one_edited_here(
    run: RunFolder, hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    assert publish(run) == 0
    assert publish(run) == 0
    (run.lora_folder / "pytorch_lora_weights.safetensors").write_bytes(b"trained on")
    assert publish(run) == 0
    assert hub.commits[1:] == [["pytorch_lora_weights.safetensors"]]

    hub.files["README.md"] = b"# Edited there"
    (run.lora_folder / "pictures" / "prompt-00.png").write_bytes(b"a newer image")
    assert publish(run) == 0
    assert hub.commits[2:] == [["pictures/prompt-00.png"]]
    assert "was edited there, and stays" in caplog.text
    assert publish(run, "--lora", "ema") == 0
    assert hub.commits[3:] == [["README.md", "pytorch_lora_weights.safetensors"]]
    assert hub.files["README.md"].startswith(b"# By hand\n")
    shutil.copytree(run.lora_folder, copy := run.checkpoints_folder / "lora-00000200")
    (copy / "pytorch_lora_weights.safetensors").write_bytes(b"at step 200")
    assert main(["publish", f"{run.path}@200", f"--to={REPOSITORY}"]) == 0
    assert hub.files["pytorch_lora_weights.safetensors"] == b"at step 200"
    assert main(["publish", f"{run.path}@200", "--lora=best", f"--to={REPOSITORY}"]) == 2
    assert "names a LoRA already" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("header", "licence", "sent_header", "printed"),
    [
        ("base_model: a/b\n", "mit", "base_model: a/b\nlicense: mit\n", "mit"),
        ("license: other\nlicense_name: |\n  own\na: b\n", "mpl-2.0", "a: b\nlicense: mpl-2.0\n", "mpl-2.0"),
        ("", "cc-by-4.0", "license: cc-by-4.0\n", "cc-by-4.0"),
        ("license: other\nlicense_name: own\n", None, "license: other\nlicense_name: own\n", "own"),
    ],
)
def test_the_licence_that_is_asked_for_is_in_the_header_of_the_card_that_is_sent(
    run: RunFolder,
    hub: Hub,
    capsys: pytest.CaptureFixture[str],
    header: str,
    licence: str | None,
    sent_header: str,
    printed: str,
) -> None:
    is_ours, text = licence == "mit", "# LoRA\nlicense: x"
    card = f"---\n{header}---\n{text}" if header else text
    (run.lora_folder / "README.md").write_text(marked(card) if is_ours else card)
    assert publish(run, *([f"--license={licence}"] if licence else [])) == 0
    assert f"Licence: {printed}\n" in capsys.readouterr().out
    sent = hub.files["README.md"].decode()
    assert sent.startswith(f"---\n{sent_header}---\n")
    assert sent.partition("---\n")[2].partition("---\n")[2].partition("<!--")[0].strip() == text
    assert is_as_written(sent) is is_ours


def write_card(text: str) -> Change:
    return lambda run, _: (run.lora_folder / "README.md").write_text(text)


def remove(name: str) -> Change:
    return lambda run, _: (run.path / name).unlink()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (remove("status.json"), "holds no run"),
        (remove("lora/pytorch_lora_weights.safetensors"), "holds no LoRA"),
        (remove("lora/README.md"), "is not there"),
        (remove("lora/pictures/prompt-00.png"), "names pictures/prompt-00.png, which is not there"),
        (write_card("---\nbase_model: /models/qwen\n---\n"), "base_model: '/models/qwen' is not the name"),
        (write_card("---\nbase_model: [a/b, 7]\n---\n"), "base_model: '7' is not the name"),
        (write_card("---\na: [\n---\n"), "its header cannot be read"),
        (lambda run, _: (run.lora_folder / "README.md").write_bytes(b"\xff"), "cannot be read as UTF-8"),
        (lambda _, patch: patch.delenv("HF_TOKEN"), "no token for the hub: log in with `hf auth login`"),
        (lambda _, patch: patch.setenv("HF_TOKEN", f"{TOKEN}x"), "a token that may write there"),
        (lambda _, patch: patch.setattr(constants, "HF_HUB_OFFLINE", True), "(and HF_HUB_OFFLINE)"),
        (lambda _, patch: patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9"), "ConnectError"),
    ],
)
def test_what_cannot_be_published_is_an_error_in_a_line_and_leaves_the_hub_as_it_was(
    run: RunFolder,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: Change,
    words: str,
) -> None:
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(run.path / "none"))
    change(run, monkeypatch)
    assert publish(run) == 2
    assert words in caplog.messages[-1]
    assert (hub.files, hub.commits) == ({}, [])
    assert TOKEN not in caplog.text


def test_what_the_hub_refuses_commits_nothing_and_a_public_repository_is_not_taken_for_a_private_one(
    run: RunFolder, hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    hub.refuses_uploads = True
    assert publish(run) == 2
    assert "Error while uploading" in caplog.messages[-1]
    assert "/upload/" not in caplog.text  # the address
    hub.refuses_uploads = False
    hub.card_errors = ['"base_model" is not valid']
    assert publish(run) == 2
    assert 'Invalid metadata in README.md. - "base_model" is not valid' in caplog.messages[-1]
    hub.card_errors = []
    assert publish(run, "--private") == 2
    assert "is there already, and all can see it" in caplog.messages[-1]
    for name in ("name", "a/b/c", "../x", "owner/na me", ""):
        assert publish(run, to=name) == 2
        assert f"--to: {name!r} is not the name of a repository" in caplog.messages[-1]
    assert publish(run, "--license", "MIT license") == 2
    assert "--license: 'MIT license' is not a licence of the hub" in caplog.messages[-1]
    assert (hub.files, hub.commits) == ({}, [])

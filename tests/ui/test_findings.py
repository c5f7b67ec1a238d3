"""What the doctor finds, as the screen of a data set shows it: kept, and compared with what is there."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from browser import PHONE_PX, Browser
from PIL import Image
from processes import wait_for
from screens import Screen, Started, server_process

from diffsynth_lite.pipelines import qwen_image
from diffsynth_lite.run_folder.process import Process
from diffsynth_lite.ui.data_sets.examining import findings_of

CONFIG = """
model: {{family: qwen_image, path: {model}, text_encoder_dtype: float32}}
data: {{path: data/mug, resolutions: [64], bucket_step: 16, cache_dir: cache}}
train: {{steps: 100, global_batch_size: 4, micro_batch_size: 2, mixed_precision: 'no'}}
output: {{dir: runs/mug}}
"""
PRINTED: dict[str, Any] = {
    "items": {
        "a.png": {
            "crops": [{"bucket": "64x64", "box": [0, 8, 64, 56]}],
            "tokens": [9],
            "limit": 8,
            "remarks": ["a caption of one word: 'mug'"],
        },
        "b.png": {"crops": [], "tokens": [2], "limit": 8, "remarks": ["cannot be used: it is not an image"]},
    },
    "dropped": {"b.png": "it is not an image"},
    "equal": [],
    "alike": [["a.png", "b.png"]],
    "sizes": {"cropped": {"a.png": "34% of 64x64 is cropped"}, "small": {}},
    "flaws": {"bars": {"a.png": "black bars are 25% of it"}},
    "captions": {
        "remarks": {"one_word": {"a.png": "a caption of one word: 'mug'"}, "refusal": {}},
        "constant": [{"text": "a mug", "num_captions": 9, "num_all": 10}],
    },
    "advice": ["1 item <b>with black bars</b>"],
    "problems": [],
    "remedy": "Repair or remove them",
    "facts": {"trained on": "1 item"},
}


@pytest.fixture
def mug(screen: Screen) -> Path:
    folder = screen.workspace.data_folder / "mug"
    folder.mkdir()
    for place, name in enumerate(("a", "b")):
        Image.effect_noise((64, 64 + 32 * place), 90).convert("RGB").save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"a mug, number {name}\n")
    (screen.workspace.configs_folder / "mine.yaml").write_text(CONFIG.format(model="tiny"))
    return folder


def examined(screen: Screen, config: str = "mine") -> dict[str, Any]:
    return dict(screen.get(f"/data/mug/examined?config={config}").json())


def examine(screen: Screen, do: str = "start", config: str = "mine") -> Any:
    return screen.post("/data/mug/examine", {"config": config, "do": do})


def test_findings_are_shown_when_the_doctor_has_ended_and_again_by_a_later_server(
    screen: Screen, mug: Path, started: Started
) -> None:
    assert examined(screen)["state"] == "none"
    assert examine(screen).status_code == 200
    assert started.words == [["doctor", "--config", "configs/mine.yaml", "--json"]]
    assert examined(screen)["state"] == "running"
    started.end(json.dumps(PRINTED))
    for _ in range(2):
        found = examined(screen)
        assert (found["state"], found["is_config_changed"]) == ("done", False)
        assert found["items"] == PRINTED["items"]
        assert {kind: (each["label"], each["files"]) for kind, each in found["kinds"].items()} == {
            "dropped": ("Cannot be used", ["b.png"]),
            "alike": ("Look alike", ["a.png", "b.png"]),
            "cropped": ("Cropped", ["a.png"]),
            "bars": ("Black bars", ["a.png"]),
            "one_word": ("One word", ["a.png"]),
        }
        assert found["phrases"] == PRINTED["captions"]["constant"]
        assert found["remedies"] == {
            "bars": "diffsynth-lite prepare data/mug --out data/mug-prepared --strip-bars",
            "one_word": "diffsynth-lite caption data/mug --model Qwen/Qwen3-VL-4B-Instruct --only a.png "
            "--replace all",
        }
    assert [file.suffix for file in (screen.workspace.path / ".ui" / "examined").iterdir()] == [".json"]


def test_an_item_that_changed_since_differs_from_its_mark_and_so_does_the_config(
    screen: Screen, mug: Path, started: Started
) -> None:
    examine(screen)
    started.end(json.dumps(PRINTED))
    changes = [{"file": "b.png", "was": "a mug, number b", "caption": "another"}]
    screen.post("/data/mug/captions", {"changes": changes})
    config = screen.workspace.configs_folder / "mine.yaml"
    config.write_text(config.read_text().replace("[64]", "[96]"))
    found, items = examined(screen), screen.get("/data/mug/items?config=mine").json()["items"]
    now = {item["file"]: [item["version"], item["caption"]] for item in items}
    assert [file for file, mark in found["marks"].items() if mark != now[file]] == ["b.png"]
    assert found["is_config_changed"] is True


def test_one_examination_goes_on_at_a_time_and_is_stopped(
    screen: Screen, mug: Path, started: Started
) -> None:
    examine(screen)
    started.end(json.dumps(PRINTED))
    assert examined(screen)["state"] == "done"
    (screen.workspace.configs_folder / "other.yaml").write_text(CONFIG.format(model="tiny"))
    examine(screen)
    refusal = examine(screen, config="other").json()["error"]
    assert refusal == "mug is being examined; stop that first, or wait until it has ended"
    assert examine(screen, "stop").status_code == 200
    started.children[-1].wait()  # It was asked to end.
    assert examined(screen)["state"] == "done"  # with what was found before
    assert examine(screen, config="other").status_code == 200


@pytest.mark.parametrize(
    ("printed", "log"), [("", "no model\nswordfish\n"), ("[]", "x"), ("{}", "x\n" * 99_999), ('{"items"', "")]
)
def test_a_doctor_that_finds_nothing_says_why(
    screen: Screen, mug: Path, started: Started, printed: str, log: str
) -> None:
    examine(screen)
    started.end(printed, log)
    found = examined(screen)
    assert (found["state"], found["log"]) == ("failed", log.splitlines()[-5:])


def test_the_only_config_that_trains_on_it_is_chosen_unless_none_is_asked_for(
    screen: Screen, mug: Path
) -> None:
    def chosen(query: str = "") -> list[str]:
        page = screen.get(f"/data/mug/{query}").text.partition('id="config"')[2].partition("Show the crop")[0]
        assert ("disabled title" in page) == ("<option selected>" not in page)
        return re.findall("<option selected>(.*?)</option>", page)

    config = screen.workspace.configs_folder / "mine.yaml"
    assert (chosen(), chosen("?config=")) == (["mine"], [])
    (screen.workspace.configs_folder / "other.yaml").write_text(config.read_text())
    assert (chosen(), chosen("?config=other")) == ([], ["other"])
    (screen.workspace.configs_folder / "other.yaml").unlink()
    for text in ("data: {path: data/mug, x: 1}\n", CONFIG.format(model="data/mug").replace("mug,", "cup,")):
        config.write_text(text)
        assert chosen() == []
        assert screen.get("/data/mug/items").json()["problems"] == []


def test_without_a_config_that_trains_on_it_nothing_is_examined(
    screen: Screen, mug: Path, started: Started
) -> None:
    (screen.workspace.configs_folder / "other.yaml").write_text("data: {path: data/cup}\nx: 1\n")
    for config, reason in (("", "choose a config"), ("other", "other: "), ("../x", "choose a config")):
        answer = examine(screen, config=config)
        assert answer.status_code == 422
        assert reason in answer.json()["error"]
    assert started.words == []


def test_of_several_data_sets_only_the_findings_of_this_one_are_shown() -> None:
    of_two = json.loads(json.dumps(PRINTED).replace('"a.png"', '"0/a.png"').replace('"b.png"', '"1/b.png"'))
    found = findings_of(of_two, prefix="1/")
    assert found["items"] == {"b.png": PRINTED["items"]["b.png"]}
    assert {kind: each["files"] for kind, each in found["kinds"].items()} == {
        "dropped": ["b.png"],
        "alike": ["b.png"],
    }


@pytest.mark.parametrize("width", [1280, PHONE_PX])
def test_a_browser_shows_remarks_tokens_and_crop_at_the_item_until_it_changes(
    screen: Screen, mug: Path, started: Started, browser: Browser, width: int
) -> None:
    examine(screen)
    started.end(json.dumps(PRINTED).replace("a caption of one word", "<img src=x onerror=alert(1)>"))
    cell = "document.querySelector('[data-file=\"a.png\"]')"
    with (
        server_process(screen.workspace.path) as server,
        browser.page(server.address.replace("/?", "/data/mug/?config=mine&"), width=width) as page,
    ):
        page.await_control("radio", "Black bars 1")
        page.wait_for(f"{cell}.querySelectorAll('.remark').length === 1")
        assert "'mug'" in page.evaluate(f"{cell}.querySelector('.remark').innerText")
        assert page.evaluate(f"{cell}.querySelector('.tokens.over').innerText") == "9 of 8 tokens"
        page.press("checkbox", "Show the crop")
        page.wait_for(f"{cell}.querySelector('.crop path').getAttribute('d').includes('M0 8V56H64V8z')")
        page.press("radio", '"a mug" 9 of 10')
        assert page.text("#marked mark") == "a mug"
        page.press("radio", "Cannot be used 1")
        assert page.evaluate("[...document.querySelectorAll('.item .remark.stop')].length") == 1
        page.press("radio", "All 2")
        page.fill("textbox", "Caption of a.png", "another")
        page.await_control("radio", "Changed since 1")
        assert "1 item changed since" in page.text("#examined-head")
        assert page.evaluate(f"{cell}.querySelector('.crop')") is None
        assert page.nameless() == []
        assert page.complaints == []
        assert page.overflow_px() == 0


@pytest.mark.slow
def test_the_doctor_itself_finds_what_it_prints_in_a_terminal(screen: Screen, mug: Path) -> None:
    qwen_image.tiny().save_pretrained(screen.workspace.path / "tiny")
    (mug / "broken.png").write_bytes(b"no image")
    (mug / "broken.txt").write_text("broken")
    assert examine(screen).status_code == 200
    (started,) = screen.workspace.logs_folder.glob("doctor-*.json")
    process = Process.from_text(json.loads(started.read_text())["process"])
    assert process is not None
    wait_for(lambda: not process.is_alive())
    found = examined(screen)
    assert found["kinds"]["dropped"]["files"] == ["broken.png"]
    assert set(found["items"]) == {"a.png", "b.png", "broken.png"}
    assert found["items"]["b.png"]["tokens"][0] > 0
    (crop,) = found["items"]["b.png"]["crops"]
    assert len(crop["box"]) == 4

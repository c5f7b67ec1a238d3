"""The plan next to the form: asked of a process of its own, whose parts are shown as they come."""

import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from browser import PHONE_PX, Browser
from screens import Screen, server_process

from diffsynth_lite.config import load_config
from diffsynth_lite.serving import Served
from diffsynth_lite.ui.configs.live_plan import LivePlan, Plan

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "mini_qwen_image"
LOST = """(was => {
  window.back = () => { window.fetch = was; };
  window.fetch = (url, ...more) => String(url).startsWith("plan?") ? Promise.reject() : was(url, ...more);
})(fetch)"""
"""In a browser: plans are not answered until ``back()``."""
TEXT = "extends: qwen_lora.yaml\nlora:\n  rank: 4  # small\n"
FAKE = """
import json, os, pathlib, sys, time
limits = {"limit_gib": 21.6, "limit_host_gib": None}
needs = {"fits": False, "needed_gib": 21.63, "needed_host_gib": 0.5, "uncounted": None} | limits
phase = {"name": "<b>x", "device_gib": 47.9, "in_tiles_gib": 21.63, "host_gib": 0.5}
parts = {
    "memory": {"step_gib": 44.1, "step_host_gib": 0} | limits,
    "time": {"configured_step_s": 14.82, "configured_run_s": 29644},
    "phases": {**needs, "phases": [phase]},
    "choices": {**needs, "overrides": ["model.quantize=int8", "data.resolutions=[512, 768]"], "recipe": None,
                "changes_numbers": True, "step_s": 3, "run_s": 60, "summary": ["", "Nothing <i>fits</i>."]},
}
for line in sys.stdin:
    asked = json.loads(line)
    pathlib.Path("asked.json").write_text(json.dumps(asked | {"pid": os.getpid()}))
    for name, part in parts.items():
        print(json.dumps({"id": asked["id"], "state": "part", "part": name, "plan": part}), flush=True)
        while f"stop after {name}" in asked["text"]:
            if "end after" in asked["text"]:
                raise SystemExit(3)
            time.sleep(0.01)
            if pathlib.Path("go").exists():
                break
    last = {"state": "failed", "error": "no\\n<b>plan"} if "fail" in asked["text"] else {"state": "done"}
    print(json.dumps({"id": asked["id"]} | last), flush=True)
"""


@pytest.fixture
def file(screen: Screen) -> Path:
    served = Served([sys.executable, "-c", FAKE], screen.workspace.path)
    screen.client.app._app.state.live_plan = LivePlan(served)
    path = screen.workspace.configs_folder / "mine.yaml"
    path.write_text(TEXT)
    return path


def ask(screen: Screen, **given: str) -> int:
    return screen.post("/configs/mine/plan", {"gpu": "RTX 4090"} | given).json()["number"]


def shown(screen: Screen, number: int, holds: str = 'id="plan" class="stack">') -> str:
    """The plan, once it holds a text: by default, once it is whole."""
    end = time.monotonic() + 60
    while holds not in (text := screen.get(f"/configs/mine/plan?number={number}").text):
        assert time.monotonic() < end, text
        time.sleep(0.01)
    return text


def use(screen: Screen, number: Any, **given: Any) -> dict[str, str]:
    known = re.search(r'data-hash="(\w+)"', screen.get("/configs/mine/").text)
    assert known is not None
    return screen.post("/configs/mine/change", {"hash": known[1], "plan": number} | given).json()


def test_the_parts_of_a_plan_are_shown_as_they_come(screen: Screen, file: Path) -> None:
    file.write_text(f"{TEXT}# stop after time\n")
    number = ask(screen, host_gib="32")
    text = shown(screen, number, "14.8 s a step, 8 h 14 min in all")
    assert 'aria-label="Training: 44.1 GiB of 21.6 GiB"' in text
    assert "Counting" in text
    assert 'class="stack" data-open>' in text
    tag = screen.get(f"/configs/mine/plan?number={number}").headers["etag"]
    again = screen.get(f"/configs/mine/plan?number={number}", **{"if-none-match": tag})
    assert again.status_code == 304
    (screen.workspace.path / "go").touch()
    text = shown(screen, number)
    assert "<span>Does not fit: 21.63 of 21.60 GiB</span>" in text
    assert 'role="meter" aria-label="&lt;b&gt;x: 21.63 GiB of 21.60 GiB"' in text
    assert "Training: " not in text
    assert "<b>x" not in text
    assert ">Use these</button>" in text
    assert "3 s a step, 1 min 0 s in all. Results of the training change." in text
    asked = (screen.workspace.path / "asked.json").read_text()
    assert '"config": "configs/mine.yaml"' in asked
    assert '"gpu": "RTX 4090", "device_gib": 21.6, "host_gib": 32.0' in asked


def test_use_these_writes_the_settings_that_fit_and_nothing_else(screen: Screen, file: Path) -> None:
    number = ask(screen)
    shown(screen, number)
    assert "newest plan" in use(screen, number + 1)["error"]
    assert use(screen, number) == {}
    config = load_config(file).config
    assert (config.model.quantize, config.data.resolutions) == ("int8", [512, 768])
    assert file.read_text().startswith(TEXT)
    # The plan is that of the text before it.
    assert "newest plan" in use(screen, number)["error"]
    (screen.workspace.configs_folder / "other.yaml").write_text(TEXT)
    other = screen.get(f"/configs/other/plan?number={number}").text
    assert "another tab has asked for one since." in other
    assert ">Count again</button>" in other


def test_the_newest_question_wins(screen: Screen, file: Path) -> None:
    old = ask(screen)
    file.write_text(f"{TEXT}# fail\n")
    new = ask(screen)
    assert "No plan: no &lt;b&gt;plan</span>" in shown(screen, new)
    assert "another tab" in shown(screen, old)


def test_a_process_that_ends_is_named_and_started_again(screen: Screen, file: Path) -> None:
    file.write_text(f"{TEXT}# stop after memory, end after it\n")
    text = shown(screen, ask(screen))
    assert "ended with exit code 3</span>" in text
    assert "Training: 44.1 GiB" in text
    file.write_text(TEXT)
    assert "Use these" in shown(screen, ask(screen))


@pytest.mark.parametrize(
    ("text", "host_gib", "reason"),
    [
        ("lora: {rnk: 4}\n", "", "lora.rnk: unknown key"),
        ("lora: [\n", "", "No plan: "),
        ("train: {optimizer: subprocess.Popen}\n", "", "use a terminal: diffsynth-lite plan --config"),
        ("", "-3", "Host memory: -3: give GiB above 0"),
        ("", "<b>", "Host memory: &lt;b&gt;: give GiB above 0"),
        ("", "nan", "Host memory: nan: give GiB above 0"),
    ],
)
def test_what_has_no_plan_is_refused_without_a_process(
    screen: Screen, file: Path, text: str, host_gib: str, reason: str
) -> None:
    file.write_text(f"extends: qwen_lora.yaml\n{text}")
    number = ask(screen, host_gib=host_gib)
    found = shown(screen, number)
    assert reason in found
    assert not (screen.workspace.path / "asked.json").exists()
    assert "newest plan" in use(screen, number).get("error", "")


def test_a_plan_is_asked_for_only_with_the_secret_and_for_a_config_that_is_there(
    screen: Screen, file: Path
) -> None:
    assert screen.post("/configs/mine/plan", headers={"x-diffsynth-secret": ""}).status_code == 403
    assert screen.post("/configs/..%2fmine/plan").status_code == 404
    assert screen.get("/configs/%2e%2e/plan?number=1").status_code == 404
    assert "another tab" in screen.get("/configs/mine/plan?number=%3Cb%3E").text
    assert not (screen.workspace.path / "asked.json").exists()


def test_host_memory_that_does_not_suffice_is_in_the_verdict() -> None:
    parts = {"fits": False, "needed_gib": 3.0, "limit_gib": 21.6, "needed_host_gib": 40.0}
    parts |= {"limit_host_gib": 32.0, "uncounted": "why"}
    assert Plan(parts=parts).verdict == "Does not fit: 40.0 of 32.0 GiB of host memory (training only)"
    assert Plan(parts=parts | {"fits": None}).verdict == ""


def test_a_person_sees_that_it_does_not_fit_uses_what_does_and_takes_it_back(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    with server_process(tmp_path / "workspace") as server:
        path = tmp_path / "workspace" / "configs" / "mine.yaml"
        batch = "  global_batch_size: 256\n  micro_batch_size: 256\n  use_gradient_checkpointing: false\n"
        path.write_text(f"extends: quickstart.yaml\nmodel:\n  path: {MODEL}\ntrain:\n{batch}")
        text = path.read_text()
        with browser.page(server.address, width=PHONE_PX) as page:
            page.await_control("link", "New run")
            page.load(f"{server.root}/configs/mine/", height=900, dark=True)
            page.wait_for("document.getElementById('start') && document.readyState === 'complete'")
            page.evaluate(LOST)
            page.fill("combobox", "Card", "RTX 3060 8GB")
            page.wait_for("document.getElementById('plan-message').innerText.includes('does not answer')")
            page.evaluate("back()")
            page.wait_for("!document.getElementById('plan-message').innerText.includes('does not answer')")
            page.fill("spinbutton", "Host memory, GiB", "16")
            page.evaluate("document.activeElement.blur()")  # only then has the number changed
            page.wait_for("document.querySelector('[data-use]:not(:disabled)')")
            assert "Does not fit: " in page.text("#plan-message")
            assert page.evaluate("document.querySelectorAll('[role=meter]').length") == 5
            assert (page.nameless(), page.overflow_px()) == ([], 0)
            page.press("button", "Use these")
            page.wait_for("document.getElementById('plan-message').innerText.startsWith('Fits: ')")
            assert load_config(path).config.train.use_gradient_checkpointing
            page.press("button", "Undo")
            page.wait_for("document.getElementById('plan-message').innerText.startsWith('Does not fit: ')")
            assert path.read_text() == text
            assert page.complaints == []

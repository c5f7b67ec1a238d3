"""New run and the config screen: the form is a view of a file's text, and changes nothing else in it."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from browser import PHONE_PX, Browser
from processes import wait_for
from screens import INLINE, Screen, server_process

from diffsynth_lite.config import load_config
from diffsynth_lite.config.document import read_value, read_yaml
from diffsynth_lite.config.editing import settings_of
from diffsynth_lite.config.files import read_config_files, recipe_table_file
from diffsynth_lite.queue.entry import Entry
from diffsynth_lite.queue.folder import Queue
from diffsynth_lite.redaction import Redactor, in_force
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.training.planning.gpus import GPUS
from diffsynth_lite.ui.configs.draft import MAIN, Value, as_yaml, fields, shown, view_of
from diffsynth_lite.ui.configs.recipes import needs_of, recipe_named, recipes

CHOICES = {"name": "mug_1", "data": "mug", "recipe": "qwen_lora.yaml", "goal": "likeness", "gpu": "RTX 4090"}
TEXT = """\
extends: qwen_24gb.yaml  # for this card

data:
  path: data/mug
train:
  steps: 1500  # a guess
"""


@pytest.fixture
def data(screen: Screen) -> Path:
    folder = screen.workspace.data_folder / "mug"
    folder.mkdir()
    (folder / "a.png").touch()
    (folder / "a.txt").write_text("a blue mug: on a table\n")
    return folder


@pytest.fixture
def draft(screen: Screen) -> Path:
    path = screen.workspace.configs_folder / "mine.yaml"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize(
    ("name", "gpu", "words", "file"),
    [
        ("qwen_lora", "RTX 4090", "with int8 + streaming", "qwen_24gb"),
        ("qwen_lora", "RTX 5090", "with int8 + streaming", "qwen_24gb"),
        ("qwen_lora", "H200", "fits as it is", "qwen_lora"),
        ("sdxl_lora", "RTX 3060 12GB", "fits as it is", "sdxl_lora"),
        ("wan_t2v_14b_offload", "RTX 3060 12GB", "with int8 + streaming + shorter clips", "wan_t2v_14b_12gb"),
        ("flux2_lora", "RTX 3060 8GB", "not on this card", ""),
    ],
)
def test_the_table_knows_what_fits_a_card(name: str, gpu: str, words: str, file: str) -> None:
    recipe, card = recipe_named(f"{name}.yaml"), next(each for each in GPUS if each.name == gpu)
    way = recipe.way_for(card)
    assert recipe.verdict(card).words == words
    assert recipe.verdict(card).needs.endswith(" s a step") == (way is not None)
    assert (way.recipe if way else "") == (f"{file}.yaml" if file else "")


def test_the_table_has_every_recipe_but_those_of_the_mini_models_and_of_a_slider() -> None:
    folder = recipe_table_file().parent
    names = {file.name for file in folder.glob("*.yaml") if "quickstart" not in file.name}
    rows = [recipe.recipe for recipe in recipes()]
    assert {*rows, "slider.yaml"} == {*names, "ltx_video_13b_48gb.yaml"}, "run scripts/recipe_table.py"
    cards = {file.name for file in folder.glob("cards/*.yaml")}
    assert cards <= {way.recipe for recipe in recipes() for way in recipe.ways}


def test_new_run_writes_a_config_on_top_of_the_recipe_for_the_card(screen: Screen, data: Path) -> None:
    assert 'aria-label="qwen_lora.yaml Qwen-Image"' in screen.get("/new").text
    rows = screen.get("/new?gpu=RTX 4090").text.split("<tr ")[1:]
    assert 'href="#i-quarter"' in next(row for row in rows if 'value="qwen_lora.yaml"' in row)
    assert screen.post("/configs", CHOICES).json() == {"go": "/configs/mug_1/"}
    path = screen.workspace.configs["mug_1"]
    assert [file.path.name for file in read_config_files(path)] == [
        *("qwen_lora.yaml", "qwen_24gb.yaml", "mug_1.yaml")
    ]
    config = load_config(path).config
    assert (config.data.path, config.output.dir) == ("data/mug", "runs/mug_1")
    assert (config.train.steps, config.lora.rank) == (1000, 16)  # of the goal
    assert config.validation.prompts[0] == "a blue mug: on a table"
    # Without a version for the card, its settings are in the config.
    assert screen.post("/configs", CHOICES | {"name": "b", "recipe": "flux_fill_lora.yaml", "goal": ""})
    assert load_config(screen.workspace.configs["b"]).config.model.quantize == "int8"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"name": ""}, "Name: none given: use a to z"),
        ({"name": "../x"}, "Name: ../x: use a to z"),
        ({"name": "Con.x"}, "Name: Con.x: is the name of a device on Windows"),
        ({"name": "mine"}, "Name: there is a config mine already"),
        ({"data": "../mug"}, "Data set: choose one"),
        ({"recipe": "../../x.yaml"}, "recipe: ../../x.yaml: is not in the table"),
        ({"goal": "fame"}, "goal: fame: choose one of likeness"),
        ({"goal": "motion"}, "--preset motion: is for cogvideox"),
    ],
)
def test_a_choice_that_is_none_is_refused(screen: Screen, data: Path, draft: Path, given, reason) -> None:
    refusal = screen.post("/configs", CHOICES | given)
    assert refusal.status_code == 422
    assert reason in refusal.json()["error"]
    assert screen.workspace.configs == {"mine": draft}


def test_a_copy_has_a_run_folder_of_its_own(screen: Screen, draft: Path) -> None:
    run = screen.workspace.runs_folder / "one"
    run.mkdir()
    (run / "config.yaml").write_text("output:\n  dir: runs/one  # mine\n")
    RunFolder(run).write_status("finished", exit_code=0, step=1, message="done")
    assert "A copy of the config of one" in screen.get("/new?from=one").text
    assert screen.post("/configs", {"name": "two", "from": "one"}).status_code == 200
    assert screen.workspace.configs["two"].read_text() == "output:\n  dir: runs/two  # mine\n"
    assert screen.post("/configs", {"name": "three", "config": "mine"}).status_code == 200
    assert screen.workspace.configs["three"].read_text() == f"{TEXT}\noutput:\n  dir: runs/three\n"
    for wrong in ({"from": "../one"}, {"config": "nothing"}):
        assert screen.post("/configs", {"name": "x"} | wrong).status_code == 404


def test_a_copy_takes_no_name_of_a_run_and_follows_no_link(
    screen: Screen, draft: Path, tmp_path: Path
) -> None:
    (screen.workspace.runs_folder / "old").mkdir()
    refusal = screen.post("/configs", {"name": "old", "config": "mine"})
    assert "there is a run old already" in refusal.json()["error"]
    (tmp_path / "secret.yaml").write_text("model: {path: x}\n")
    draft.with_name("linked.yaml").symlink_to(tmp_path / "secret.yaml")
    assert screen.post("/configs", {"name": "copy", "config": "linked"}).status_code == 404
    draft.with_name("dangling.yaml").symlink_to(tmp_path / "nowhere")
    assert "already" in screen.post("/configs", {"name": "dangling", "config": "mine"}).json()["error"]


def test_a_field_is_a_view_of_the_text_and_changes_its_setting_only(screen: Screen, draft: Path) -> None:
    def change(**given: Any) -> Any:
        known = re.search(r'data-hash="(\w+)"', screen.get("/configs/mine/").text)
        assert known is not None
        return screen.post("/configs/mine/change", {"hash": known[1]} | given).json()

    view = view_of(draft, TEXT)
    assert (view.extends, view.num_own, view.problems) == ("qwen_24gb.yaml", 2, ())
    assert change(key="train.steps", value="many") == {}
    assert draft.read_text() == (mistyped := TEXT.replace("1500", "many"))
    page = screen.get("/configs/mine/").text
    assert "<span>got &#39;many&#39;; must be a whole number" in page
    assert "(line 6)</span>" in page
    assert 'data-line="6">Line 6</button>' in page
    # Another tab knows an older text: it overwrites nothing.
    stale = screen.post("/configs/mine/change", {"hash": "x", "key": "train.steps", "value": "3"})
    assert stale.status_code == 422
    assert "was changed elsewhere" in stale.json()["error"]
    assert draft.read_text() == mistyped
    assert change(key="train.steps", value=None) == {}
    assert draft.read_text() == TEXT[: TEXT.index("train:")]
    steps = view_of(draft, draft.read_text()).values["train.steps"]
    assert steps == Value(value="2000", inherited="2000", is_own=False)
    assert "is not a setting" in change(key="train.sed", value="1")["error"]
    # As typed, but with the line breaks that the file has.
    draft.write_bytes(TEXT.replace("\n", "\r\n").encode())
    assert change(text=(damaged := f"{TEXT}lora: [\n")) == {}
    assert draft.read_bytes() == damaged.replace("\n", "\r\n").encode()
    assert view_of(draft, damaged).values == {}
    assert "must be put right first" in change(key="lora.rank", value="4")["error"]


def test_the_page_names_each_field_and_shows_a_text_as_it_is(screen: Screen, draft: Path) -> None:
    idle = "validation:\n  prompts: []\n  width: 64\nlogging:\n  project: s3cret-token\n"
    draft.write_text(f"# </script><b>\n{TEXT}{idle}")
    with in_force(Redactor({"MY_TOKEN": "s3cret-token"})):
        page = screen.get("/configs/mine/").text
    assert "s3cret-token" in page  # a mask would be saved over it
    assert "</script><b>" not in page
    for key, field in fields().items():
        assert f'<label for="{key}">{field.label} <code>{key}</code></label>' in page
        assert f'id="{key}-wrong"' in page
    assert "has no effect without validation.prompts" in page
    assert "has no effect while data" not in page
    for sizes, given in (
        ("width: 64\n  height: 64", "data.width and data.height are"),
        ("sizes: [64x64]", "data.sizes is"),
    ):
        view = view_of(draft, TEXT.replace("data:\n", f"data:\n  {sizes}\n"))
        assert view.values["data.resolutions"].remark == f"has no effect while {given} set"
    assert list(fields())[:12] == [key for group in MAIN.values() for key in group]
    draft.write_text("data: [\n")
    assert screen.get("/configs/mine/").status_code == 200
    # What is wrong in a file that it extends is at its field, without a line of this one.
    (draft.parent / "base.yaml").write_text("extends: qwen_lora.yaml\nlora:\n  rank: 0\n")
    rank = view_of(draft, "extends: base.yaml\nlora:\n  alpha: 1\n").values["lora.rank"]
    assert rank.problem is not None
    assert (rank.problem.text[:7], rank.problem.line, rank.is_own) == ("got '0'", 0, False)
    for content in (b"\xff", bytes(2**20 + 1)):
        draft.write_bytes(content)
        assert screen.get("/configs/mine/").status_code == 422


@pytest.mark.parametrize(
    ("key", "typed", "written"),
    [
        ("train.steps", " 7 ", "7"),
        ("train.steps", "7 # b", '"7 # b"'),
        ("train.steps", "", "null"),
        ("data.trigger", "skz mug", "skz mug"),
        ("data.trigger", "a, b: c", '"a, b: c"'),
        ("data.trigger", "null", '"null"'),
        ("data.trigger", "", "null"),
        ("output.dir", "", '""'),
        ("data.resolutions", "512, 768", "[512, 768]"),
        ("data.resolutions", "512 [", '[512, "["]'),
        ("data.resolutions", "", "[]"),
        ("validation.prompts", "a mug\n\n b, c ", '[a mug, "b, c"]'),
        ("lora.target_modules", "attention", "attention"),
        ("lora.target_modules", "to_q\nto_k", "[to_q, to_k]"),
        ("lora.target_modules", "", "null"),
        ("memory.auto", "true", "true"),
        ("data.sources", "[{path: a},\n {path: b}]", "[{path: a}, {path: b}]"),
        ("data.sources", "", "[]"),
    ],
)
def test_what_is_typed_is_written_as_its_setting_has_it(key: str, typed: str, written: str) -> None:
    assert as_yaml(fields()[key], typed) == written


def test_what_a_field_shows_is_what_it_writes() -> None:
    for path in sorted(recipe_table_file().parent.glob("*.yaml"))[::5]:
        for key, node in settings_of(read_config_files(path)).items():
            field = fields()[key]
            written = read_yaml(f"x: {as_yaml(field, shown(field, node))}").value[0][1]
            assert _plain(written, field.schema) == _plain(node, field.schema)


def _plain(node: yaml.Node, schema: Any) -> Any:
    value = read_value(node, schema)
    return yaml.SafeLoader("").construct_document(value) if isinstance(value, yaml.Node) else value


def test_the_memory_of_a_recipe_is_shown_until_the_config_changes_it(
    draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = needs_of(view_of(draft, TEXT))
    assert needs.startswith("20.7 GiB of the card, and ")
    assert needs_of(view_of(draft, f"{TEXT}lora:\n  rank: 8\n")) == needs
    in_int8 = "extends: flux_fill_lora.yaml\nmodel:\n  quantize: int8\n"
    assert needs_of(view_of(draft, in_int8)).startswith("15.1 GiB of the card")
    assert needs_of(view_of(draft, f"{TEXT}memory:\n  auto: true\n")) == ""
    assert needs_of(view_of(draft, "data:\n  path: a\n")) == ""
    here = {"name": "RTX 4090", "total": 24}
    monkeypatch.setattr("diffsynth_lite.ui.configs.recipes.device", lambda: here)
    of_card = r"20.7 of 21.6 GiB of your RTX 4090, and [\d.]+ GiB of host memory"
    assert re.fullmatch(rf"{of_card}, [\d.]+ s a step", needs_of(view_of(draft, TEXT)))
    assert re.fullmatch(of_card, needs_of(view_of(draft, f"{TEXT}  global_batch_size: 8\n")))


def test_new_run_suggests_a_name_that_it_takes_and_keeps_the_chosen_recipe_in_sight(
    browser: Browser, tmp_path: Path
) -> None:
    with server_process(tmp_path / "workspace") as server:
        (tmp_path / "workspace" / "data" / "ü my mugs").mkdir()
        with browser.page(server.address) as page:
            page.await_control("link", "New run")
            page.load(f"{server.root}/new", height=900, dark=False)
            page.press("radio", "qwen_lora.yaml Qwen-Image")
            assert page.value("textbox", "Name") == "my_mugs_qwen"
            page.fill("searchbox", "Filter recipes", "no such model")
            shown = "[...document.querySelectorAll('tbody tr:not([hidden]) input')].map(({ value }) => value)"
            assert page.evaluate(shown) == ["qwen_lora.yaml"]
            page.press("button", "Make the config")
            page.wait_for("location.pathname === '/configs/my_mugs_qwen/'")


def test_what_is_typed_while_the_server_is_gone_is_saved_with_the_next_change(
    browser: Browser, tmp_path: Path
) -> None:
    workspace = tmp_path / "workspace"
    with server_process(workspace) as server:
        path = workspace / "configs" / "mine.yaml"
        path.write_text(TEXT)
        with browser.page(server.address) as page:
            page.await_control("link", "New run")
            page.load(f"{server.root}/configs/mine/", height=900, dark=False)
            page.await_control("textbox", "Steps train.steps")
            server.kill()
            page.fill("textbox", "Steps train.steps", "55")
            page.wait_for("document.getElementById('message').innerText.includes('does not answer')")
            with server_process(workspace, port=int(server.root.rpartition(":")[2])):
                page.fill("textbox", "Rank lora.rank", "4")
                wait_for(lambda: "steps: 55" in path.read_text() and "rank: 4" in path.read_text())
                assert page.value("textbox", "Steps train.steps") == "55"


def test_two_tabs_on_one_config_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    with server_process(tmp_path / "workspace") as server:
        path = tmp_path / "workspace" / "configs" / "mine.yaml"
        path.write_text(TEXT)
        with browser.page(server.address, width=PHONE_PX) as page:
            page.await_control("link", "New run")
            page.load(f"{server.root}/configs/mine/", height=900, dark=True)
            page.wait_for("document.getElementById('start') && document.readyState === 'complete'")
            page.fill("textbox", "Steps train.steps", "many")
            wrong = 'document.querySelector(`[id="train.steps-wrong"]`)'
            page.wait_for(f"!{wrong}.hidden")
            assert page.evaluate(f"{wrong}.innerText").startswith("got 'many'; must be a whole number")
            page.press("button", "Line 6")
            assert page.evaluate("String(getSelection())") == "  steps: many  # a guess"
            page.press("tab", "Settings")
            path.write_text(TEXT.replace("1500", "7"))  # as another tab, or an editor
            page.fill("textbox", "Rank lora.rank", "4")
            page.wait_for("document.getElementById('message').innerText.includes('changed elsewhere')")
            page.wait_for("document.getElementById('lora.rank').value === '32'")
            assert path.read_text() == TEXT.replace("1500", "7")
            assert page.value("textbox", "Steps train.steps") == "7"
            page.press("button", "Steps: as in the recipe")
            page.await_control("tab", "What differs 1")
            assert page.value("textbox", "Steps train.steps") == "2000"
            page.press("tab", "Text (yaml)")
            page.fill(
                "textbox", "Config configs/mine.yaml", "extends: qwen_24gb.yaml\nlora: {rank: 8, rnk: 1}\n"
            )
            page.wait_for("document.getElementById('problems').innerText.includes('lora.rnk')")
            page.press("tab", "Settings")
            assert page.value("textbox", "Rank lora.rank") == "8"
            assert (page.nameless(), page.overflow_px()) == ([], 0)
            refused = [line for line in page.complaints if "422" not in line]
            assert refused == []


def test_start_puts_the_config_into_the_queue_and_is_refused_with_the_reason(
    screen: Screen, draft: Path, no_worker: list[Path]
) -> None:
    draft.write_text(f"{TEXT}output: {{dir: runs/qwen_lora}}\n")
    assert screen.post("/configs/mine/start").json() == {"go": "/runs/qwen_lora/"}
    (run,) = Queue(screen.workspace).in_state("waiting")
    assert run.entry == Entry(config="configs/mine.yaml", folder="runs/qwen_lora")
    assert no_worker == [screen.workspace.path]
    refusal = screen.post("/configs/mine/start").json()["error"]
    assert refusal == "output.dir: runs/qwen_lora: is in the queue already (waiting)"
    draft.write_text(f"{TEXT}output: {{dir: elsewhere/a}}\n")
    assert "give one in runs/, such as runs/a" in screen.post("/configs/mine/start").json()["error"]
    draft.write_text(f"{TEXT}  optimizer: subprocess.Popen\n")
    refusal = screen.post("/configs/mine/start").json()["error"]
    assert "train.optimizer: subprocess.Popen is code" in refusal
    assert refusal.endswith("start it in a terminal")
    draft.write_text(f"{TEXT}  sed: 1\n")
    assert "train.sed: unknown key" in screen.post("/configs/mine/start").json()["error"]


def test_several_values_are_named_then_queued_and_shown_side_by_side(
    screen: Screen, draft: Path, no_worker: list[Path]
) -> None:
    draft.write_text(f"{TEXT}output: {{dir: runs/mug}}\n")
    settings = ["lora.rank=4, 8", "train.learning_rate=1e-4,2e-4"]
    found = screen.post("/configs/mine/variants", {"settings": settings, "do": "name"}).json()
    names = [f"mug-rank{rank}-lr{rate}" for rank in (4, 8) for rate in ("1e-4", "2e-4")]
    assert found == {"names": names}
    assert not Queue(screen.workspace).path.exists()
    for settings_given, wrong in (
        (["lora.rank=4"], None),  # one run is Start's
        (["output.dir=a,b"], "each run gets a folder by what differs"),
        (["lora.rank=[1"], None),
        (["lora.rnk=1,2"], "unknown key"),
        ([f"lora.rank={','.join(map(str, range(1, 200)))}"], "100 are the most at once"),
    ):
        answer = screen.post("/configs/mine/variants", {"settings": settings_given, "do": "name"}).json()
        assert answer["names"] == []
        assert (wrong or "") in answer.get("wrong", ""), answer
    refusal = screen.post("/configs/mine/variants", {"settings": ["lora.rank=4,none"], "do": "add"})
    assert (refusal.status_code, Queue(screen.workspace).in_state("waiting")) == (422, [])
    added = screen.post("/configs/mine/variants", {"settings": settings, "do": "add"}).json()
    assert added["names"] == names
    assert [run.name for run in Queue(screen.workspace).in_state("waiting")] == names
    assert no_worker == [screen.workspace.path]
    page = screen.get(added["compare"])
    assert page.status_code == 200
    assert "4 runs side by side" in page.text
    assert not INLINE.search(page.text)


def test_the_rows_of_several_data_sets_write_their_entries_and_leave_the_rest(
    screen: Screen, browser: Browser
) -> None:
    for name in ("cats", "dogs", "mugs"):
        (screen.workspace.data_folder / name).mkdir()
    file = screen.workspace.configs_folder / "mine.yaml"
    file.write_text(
        "data:  # of mine\n  path: data/cats\n  trigger: ohwx cat # the word\n  mask_dir: masks\n"
    )

    def sources() -> Any:
        return yaml.safe_load(file.read_text())["data"].get("sources")

    with (
        server_process(screen.workspace.path) as server,
        browser.page(server.address.replace("/?", "/configs/mine/?"), width=PHONE_PX) as page,
    ):
        page.press("button", "Several data sets")
        first, second = {"path": "data/cats", "trigger": "ohwx cat"}, {"path": "data/dogs"}
        wait_for(lambda: sources() == [first, second])
        wait_for(lambda: "path: data/cats\n" not in file.read_text())
        page.fill("spinbutton", "Repeats of data set 2", "3")
        page.press("checkbox", "Preserve of data set 2")
        wait_for(lambda: sources() == [first, second | {"repeats": 3, "preserve": True}])
        page.press("button", "Add a data set")
        page.fill("textbox", "Trigger of data set 3", 'a "mug": {x}')
        wait_for(lambda: len(sources()) == 3)
        page.press("button", "Take out data set 1")
        third = {"path": "data/mugs", "trigger": 'a "mug": {x}'}
        wait_for(lambda: sources() == [second | {"repeats": 3, "preserve": True}, third])
        assert page.nameless() == []
        assert page.complaints == []
        assert page.overflow_px() == 0
    assert file.read_text().startswith("data:  # of mine\n")
    assert "mask_dir: masks" in file.read_text()


@pytest.mark.parametrize(("recipe", "column"), [("qwen_lora", "image"), ("wan_t2v_lora", "video")])
def test_a_data_set_of_the_hub_is_a_source_of_the_config(screen: Screen, recipe: str, column: str) -> None:
    choices = CHOICES | {"data": "", "recipe": f"{recipe}.yaml", "goal": "", "gpu": "H200"}
    assert 'aria-label="Hub id of the data set"' in screen.get("/new").text
    assert screen.post("/configs", choices | {"dataset": " me/my-cats "}).json()["go"] == "/configs/mug_1/"
    data = load_config(screen.workspace.configs["mug_1"]).config.data
    assert (data.dataset, data.path, data.media_column) == ("me/my-cats", None, column)
    for name in ("../x", "a/b/c", "/etc", "a b", "-x"):
        refused = screen.post("/configs", choices | {"name": "mug_2", "dataset": name})
        assert "is not an id of the hub" in refused.json()["error"], name
    assert "choose one" in screen.post("/configs", choices | {"name": "mug_2"}).json()["error"]
    assert list(screen.workspace.configs) == ["mug_1"]

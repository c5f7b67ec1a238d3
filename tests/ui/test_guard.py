"""Who is let in to the screen, what they may do there, and that no path is opened that a browser names."""

import re
import stat
from pathlib import Path

import pytest
from run_folders import full_folder
from screens import ADDRESS, INLINE, Screen, signed_in

from diffsynth_lite.errors import UserError
from diffsynth_lite.redaction import Redactor, in_force
from diffsynth_lite.workspace import open_workspace


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, 200),
        ({"cookie": ""}, 403),
        ({"cookie": "diffsynth_lite_8713=zzz"}, 403),
        ({"cookie": "diffsynth_lite_8713=the-token"}, 403),
        ({"cookie": "\x01;=;"}, 403),
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"host": "[::1"}, 403),
        ({"host": ""}, 403),
        ({"host": "localhost:9999"}, 200),  # the other end of a tunnel
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),  # <img> of another site
        (
            {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"},
            403,
        ),  # of another port of this machine
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),  # a link
    ],
)
def test_a_page_is_shown_only_to_a_browser_that_is_signed_in_and_calls_this_machine(
    screen: Screen, headers: dict[str, str], code: int
) -> None:
    assert screen.get("/", **headers).status_code == code


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, 422),  # it was let in, and the folder is none
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": ""}, 403),
        ({"origin": "http://127.0.0.1:1"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "none"}, 403),
        ({"x-diffsynth-secret": ""}, 403),
        ({"x-diffsynth-secret": "the-token"}, 403),
        ({"cookie": ""}, 403),
        ({"host": "localhost:9999", "origin": "http://localhost:9999"}, 422),
        ({"content-type": "text/plain"}, 415),
    ],
)
def test_a_change_is_made_only_by_a_page_of_this_server_that_knows_the_second_secret(
    screen: Screen, headers: dict[str, str], code: int
) -> None:
    given = b'{"kind": "data", "folder": "nowhere"}'
    sent = {"content-type": "application/json"} | headers
    assert screen.post("/add", content=given, headers=sent).status_code == code


def test_other_methods_and_other_bodies_are_refused(screen: Screen) -> None:
    sent = screen.cookie | screen.secret | {"origin": ADDRESS, "content-type": "application/json"}
    assert screen.client.put("/", headers=sent).status_code == 405
    assert screen.client.post("/", headers=sent, content=b"{}").status_code == 405
    for content in (b"{", b"[]", b"[" * 100_000, b"\xff"):
        assert screen.post("/add", content=content, headers=sent).status_code == 400
    half_a_character = b'{"kind": "data", "folder": "\\ud800"}'
    assert screen.post("/add", content=half_a_character, headers=sent).status_code == 422
    assert screen.post("/add", content=b" " * (33 << 20), headers=sent).status_code == 413


def test_the_printed_address_signs_in_without_a_redirect_and_only_with_the_right_token(
    screen: Screen,
) -> None:
    page = screen.client.get("/data/a%20b/?x=1&token=the-token")
    assert page.status_code == 200
    assert re.search(r"HttpOnly; Path=/; SameSite=strict$", page.headers["set-cookie"])
    assert 'data-target="/data/a%20b/?x=1"' in page.text
    assert page.headers["cache-control"] == "no-store"
    # Neither the cookie nor the secret of changes is the token or leads to it.
    assert "the-token" not in page.text + page.headers["set-cookie"]
    screen.client.cookies.clear()
    cookie = screen.cookie["cookie"].partition("=")[2]
    for token in ("x", "", cookie, screen.secret["x-diffsynth-secret"]):
        assert screen.client.get(f"/?token={token}").status_code == 403
    elsewhere = screen.client.get(f"{ADDRESS}//evil.example/?token=the-token")
    assert 'data-target="/evil.example/"' in elsewhere.text


def test_no_path_is_opened_that_a_request_names(screen: Screen) -> None:
    (screen.workspace.data_folder / "set").mkdir()
    (screen.workspace.configs_folder / "mine.yaml").write_text("train: {}\n")
    hostile = (
        *("/data/..%2f/", "/data/%2e%2e/", "/configs/..%2fx/", "/configs/%2e%2e/", "/.ui/token", "/%2e%2e/"),
        *("/runs/..%2f..%2f.ui%2ftoken/", "/runs/%2e%2e/%2e%2e/.ui/token", "/runs/../../etc/passwd"),
        *("/static/../guard.py", "/static/base.html", "/static/..%2fguard.py", "/static/%2fetc%2fpasswd"),
        *("/data/..%2f/examined", "/data/%2e%2e/examined?config=..%2fmine"),
        *("/compare?run=..%2f.ui&run=set", "/compare?run=%2fetc&run=."),
        *("/data/set/full/..%2f..%2fconfigs%2fmine.yaml", "/data/set/full/%2fetc%2fpasswd"),
    )
    assert {path: screen.get(path).status_code for path in hostile} == dict.fromkeys(hostile, 404)


def test_every_answer_has_the_policy_and_no_page_has_a_script_or_style_within(screen: Screen) -> None:
    full_folder(screen.workspace.runs_folder / "first")
    full_folder(screen.workspace.runs_folder / "second")
    side_by_side = "/compare?run=first&run=second"
    for path in ("/", "/static/ui.js", "/runs/first/", side_by_side, "/nowhere", "/static/nothing.js"):
        answer = screen.get(path)
        policy = answer.headers["content-security-policy"]
        assert "unsafe" not in policy
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        if "html" in answer.headers["content-type"]:
            assert not INLINE.search(answer.text), path


def test_names_of_folders_are_texts_and_secrets_are_masked_where_a_page_is_read(screen: Screen) -> None:
    name = "<img src=x onerror=alert(1)> swordfish-4711"
    (screen.workspace.data_folder / name).mkdir()
    with in_force(Redactor({"MY_TOKEN": "swordfish-4711"})):
        text = screen.get("/").text
    assert "<img src=x" not in text
    assert "swordfish-4711" not in text
    assert "REDACTED" in text


def test_an_unchanged_page_is_not_sent_again(screen: Screen) -> None:
    tag = screen.get("/").headers["etag"]
    again = screen.get("/", **{"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")


def test_a_proxy_is_let_in_where_it_was_named(screen: Screen) -> None:
    proxied = signed_in(screen.workspace, behind="https://pod.example")
    given = {"kind": "data", "folder": "nowhere"}
    for headers in (
        {"host": "pod.example", "origin": "https://pod.example"},
        {"host": "127.0.0.1:8713", "origin": "https://pod.example"},  # a proxy that writes its own
    ):
        assert proxied.post("/add", given, headers=headers).status_code == 422
    for headers in (
        {"host": "other.example", "origin": "https://other.example"},
        {"host": "pod.example", "origin": "https://other.example"},
    ):
        assert proxied.post("/add", given, headers=headers).status_code == 403
    assert "Secure" in proxied.client.get("/?token=the-token").headers["set-cookie"]


def test_the_token_is_kept_and_only_the_person_can_read_it(tmp_path: Path) -> None:
    workspace = open_workspace(tmp_path / "made" / "here")
    token = workspace.token()
    assert len(token) >= 32
    assert open_workspace(workspace.path).token() == token
    (workspace.path / ".ui" / "token").write_text("")  # as a full disk leaves it
    assert len(workspace.token()) >= 32
    assert stat.S_IMODE((workspace.path / ".ui" / "token").stat().st_mode) == 0o600
    assert stat.S_IMODE((workspace.path / ".ui").stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["pyproject.toml", "holiday.png"])
def test_a_folder_with_something_else_in_it_is_no_workspace(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"is not a workspace.*diffsynth-lite ui .*/workspace makes one"):
        open_workspace(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_folders_elsewhere_are_added_by_their_path(screen: Screen, tmp_path: Path) -> None:
    screen.workspace.set("other", "of somebody else")
    for folder in (tmp_path / "a" / "cats", tmp_path / "b" / "cats"):
        folder.mkdir(parents=True)
        assert screen.post("/add", {"kind": "data", "folder": str(folder)}).status_code == 200
    assert screen.workspace.data_sets == {"cats": tmp_path / "a/cats", "cats~2": tmp_path / "b/cats"}
    assert screen.workspace.settings == {
        "other": "of somebody else",
        "data": [str(tmp_path / "a" / "cats"), str(tmp_path / "b" / "cats")],
    }
    for given, reason in (
        ({"kind": "data", "folder": "cats"}, "is not a folder on this machine"),
        ({"kind": "data", "folder": "~nobody-here/y"}, "is not a folder on this machine"),
        ({"kind": "data", "folder": "/" + "x" * 5000}, "is not a folder on this machine"),
        ({"kind": "runs", "folder": str(tmp_path / "a")}, "holds no run"),
        *[({"kind": kind, "folder": "/"}, "holds this workspace") for kind in ("data", "runs")],
        ({"kind": "configs", "folder": str(tmp_path)}, "give data or runs"),
    ):
        refusal = screen.post("/add", given)
        assert refusal.status_code == 422
        assert reason in refusal.json()["error"]


def test_settings_that_are_damaged_are_named_on_the_page(screen: Screen) -> None:
    screen.workspace.settings_file.write_text('{"data": 5}')
    assert screen.get("/").status_code == 200
    screen.workspace.settings_file.write_text("{")
    answer = screen.get("/")
    assert answer.status_code == 422
    assert "settings.json" in answer.json()["error"]

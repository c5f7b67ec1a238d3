"""Tests for a server of OpenAI's chat protocol as a captioner, against a real one on this machine."""

import base64
import gzip
import io
import json
import logging
import threading
import time
from collections.abc import Iterator

import PIL.Image
import pytest
from chat_server import ChatServerDouble, chat, hang_up, reply, running

from diffsynth_lite.captioning import endpoint as module
from diffsynth_lite.captioning.captioner import Answer, Question
from diffsynth_lite.captioning.endpoint import ChatServer, api_address, is_this_machine
from diffsynth_lite.errors import UserError

KEY = "sk-very-secret-key-0123456789"
RED = PIL.Image.new("RGB", (32, 24), "red")
QUESTION = Question(images=[RED], instruction="Describe.")


@pytest.fixture
def server() -> Iterator[ChatServerDouble]:
    with running() as double:
        yield double


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def captioner(server: ChatServerDouble, pauses: list[float]) -> Iterator[ChatServer]:
    with ChatServer(server.endpoint, model="some-model", key=KEY, sleep=pauses.append) as made:
        yield made


def ask(captioner: ChatServer, *questions: Question, max_tokens: int = 100) -> list[Answer]:
    answers = captioner.answer(questions or [QUESTION], max_tokens=max_tokens)
    if answers[-1].is_last:
        raise UserError(answers[-1].problem)
    return answers


def test_an_answer_is_text_with_its_tokens(captioner, server):
    assert ask(captioner) == [Answer(text="A cat.", num_tokens=3)]
    [request] = server.received
    assert request.path == "/v1/chat/completions"
    assert request.headers["Authorization"] == f"Bearer {KEY}"
    settings = {"model": "some-model", "temperature": 0, "seed": 0, "max_tokens": 100}
    assert request.body == {**settings, "messages": request.body["messages"]}
    assert captioner.name == f"some-model at 127.0.0.1:{server.port}"
    ask(captioner)
    assert server.received[1].body == request.body


def test_a_question_that_is_still_asked_when_the_command_ends_is_given_up(server):
    server.always = hang_up
    with ChatServer(server.endpoint, model="some-model", sleep=lambda _s: captioner.__exit__()) as captioner:
        assert "the command ended" in ask(captioner)[0].problem


def test_images_come_before_the_text_in_their_order(captioner, server):
    ask(
        captioner, Question(images=[RED, PIL.Image.new("RGB", (32, 24), "blue")], instruction="What changed?")
    )
    *images, text = server.received[0].body["messages"][0]["content"]
    assert text == {"type": "text", "text": "What changed?"}
    urls = [image["image_url"]["url"].removeprefix("data:image/jpeg;base64,") for image in images]
    red, blue = (PIL.Image.open(io.BytesIO(base64.b64decode(url))).getpixel((5, 5)) for url in urls)
    assert red[0] > 200 > 50 > red[2]
    assert blue[2] > 200 > 50 > blue[0]


def test_questions_are_asked_at_once_and_answered_in_their_order(captioner, server):
    both_are_here = threading.Barrier(4, timeout=30)

    def behave(handler):
        both_are_here.wait()
        reply(chat(f"answer to {handler.headers['Content-Length']}"))(handler)

    server.always = behave
    questions = [Question(images=[RED], instruction="x" * length) for length in (1, 22, 333, 4444)]
    texts = [answer.text for answer in ask(captioner, *questions)]
    lengths = [int(text.rpartition(" ")[2]) for text in texts]
    assert lengths == sorted(set(lengths))


@pytest.mark.parametrize(
    ("behaviours", "expected"),
    [
        *(([reply("later", status)] * 3, [1, 4, 16]) for status in (408, 429, 500, 502, 503, 504, 529)),
        ([hang_up] * 2, [1, 4]),
        *(
            ([reply("later", 429, Retry_After=after)], [pause])
            for after, pause in {"7": 7, "0": 1, "9999": 60, "-3": 1, "Fri, 31 Dec 1999": 1, "nan": 1}.items()
        ),
    ],
)
def test_what_may_pass_is_tried_again_after_growing_pauses_or_those_that_are_asked_for_up_to_a_minute(
    captioner, server, pauses, behaviours, expected
):
    server.next = [*behaviours]
    assert ask(captioner)[0].text == "A cat."
    assert pauses == expected


def test_an_answer_that_takes_too_long_is_a_problem_of_its_item(server, pauses, monkeypatch):
    monkeypatch.setattr(module, "_ANSWER_S", 0.02)
    done = threading.Event()
    server.next = [lambda _handler: done.wait(30)] * 4
    with ChatServer(server.endpoint, model="some-model", sleep=pauses.append) as captioner:
        [answer] = ask(captioner)
        done.set()
        assert "no answer within" in answer.problem
        assert pauses == [1, 4, 16]


def test_an_answer_that_comes_in_drops_is_given_up_by_the_clock(server, pauses):
    times = iter(range(0, 100_000, 200))
    with ChatServer(
        server.endpoint, model="some-model", sleep=pauses.append, clock=lambda: next(times)
    ) as captioner:

        def drop(handler):
            handler.send_response(200)
            handler.end_headers()
            for _ in range(3):
                handler.wfile.write(b" ")
                handler.wfile.flush()
                time.sleep(0.02)
            handler.close_connection = True

        server.always = drop
        assert "no answer within 300 s" in ask(captioner)[0].problem


def test_what_several_items_meet_at_once_is_logged_once(captioner, server, caplog):
    all_are_here = threading.Barrier(4, timeout=30)

    def fail(handler):
        all_are_here.wait()
        reply("later", 500)(handler)

    server.next = [fail] * 4
    assert [answer.text for answer in ask(captioner, *[QUESTION] * 4)] == ["A cat."] * 4
    assert [line.partition(": ")[2] for line in caplog.messages] == ["500 later; trying again in 1 s"]


def test_a_server_that_fails_on_item_after_item_ends_the_command(captioner, server):
    server.next = [reply("crashed", 500)] * 4
    assert ask(captioner)[0].problem == "500 crashed, 4 times"
    assert ask(captioner)[0].text == "A cat."
    server.always = hang_up
    assert ask(captioner)[0].problem
    assert ask(captioner)[0].problem
    with pytest.raises(UserError, match="4 times"):
        ask(captioner)


def test_a_server_that_is_gone_ends_the_command(pauses):
    with running() as server:
        address = server.endpoint
    with (
        ChatServer(address, model="some-model", sleep=pauses.append) as captioner,
        pytest.raises(UserError, match=r"cannot be reached \(Connection refused\), 4 times"),
    ):
        ask(captioner)
    assert pauses == [1, 4, 16]


def test_what_is_answered_before_the_server_is_gone_is_kept(captioner, server):
    server.always = reply("gone", 404)
    server.next = [reply(chat())]
    answers = captioner.answer([QUESTION] * 3, max_tokens=9)
    assert sorted((one.text, one.is_last) for one in answers) == [("", True), ("", True), ("A cat.", False)]


def test_too_many_requests_for_too_long_end_the_command(captioner, server):
    server.always = reply(json.dumps({"error": {"message": "You exceeded your quota."}}), 429)
    with pytest.raises(UserError, match="429 You exceeded your quota"):
        ask(captioner)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "--key-variable"),
        (403, "OPENAI_API_KEY"),
        (404, "--model"),
        (405, "--endpoint"),
        (302, "--endpoint"),
        (402, "--endpoint"),
    ],
)
def test_what_every_item_would_meet_ends_the_command_in_a_line(captioner, server, pauses, status, words):
    server.always = reply(f"<html>\n{KEY} is\x1b wrong", status, Location="http://elsewhere.example/")
    with pytest.raises(UserError) as caught:
        ask(captioner)
    assert words in str(caught.value)
    assert str(status) in str(caught.value)
    assert KEY not in str(caught.value)
    assert str(caught.value).isprintable()
    assert pauses == []
    assert len(server.received) == 1


@pytest.mark.parametrize("name", ["temperature", "seed", "max_tokens"])
def test_a_field_that_the_server_does_not_support_is_left_out_from_then_on(captioner, server, name):
    server.next = [reply(json.dumps({"error": {"message": f"Unsupported parameter: '{name}'"}}), 400)]
    assert ask(captioner)[0].text == "A cat."
    assert ask(captioner)[0].text == "A cat."
    assert [name in request.body for request in server.received] == [True, False, False]
    server.always = reply("temperature, seed and max_tokens are not supported", 400)
    assert "not supported" in ask(captioner)[0].problem
    assert len(server.received) == 6
    assert ("max_completion_tokens" in server.received[2].body) == (name == "max_tokens")


@pytest.mark.parametrize(
    ("body", "words", "status"),
    [
        *(('{"error": "too large"}', f"refused it: {one} too large", one) for one in (400, 413, 415, 422)),
        (chat("", finish="content_filter"), "content filter", 200),
        (chat(None, refusal="I cannot\nhelp."), "refused: I cannot help.", 200),
        (chat(None, refusal="I cannot " * 40), f"refused: {'I cannot ' * 22}I", 200),
        (chat(" \n"), "empty", 200),
        (chat(None, reasoning_content="A cat?"), "empty", 200),
        (b"<!DOCTYPE html><html>Welcome</html>", "<!DOCTYPE html>", 200),
        (b"\xff\xfe\x00", "not one of a chat", 200),
        (b"null", "not one of a chat", 200),
        (b'{"choices": []}', "not one of a chat", 200),
        (b'{"choices": [{"message": "A cat."}]}', "not one of a chat", 200),
        (b'{"choices": [{"message": {"content": 3}}]}', "not one of a chat", 200),
        (b'{"choices": [{"message": {"content": "a"}}], "usage": 3}', "not one of a chat", 200),
        (b'{"error": {"message": "no memory"}}', "no memory", 200),
        (b"[" * 100_000, "not one of a chat", 200),
        (gzip.compress(chat()), "not one of a chat", 200),
        (chat("a" * 10_000_000), "longer than 1 MiB", 200),
    ],
)
def test_what_only_this_item_meets_is_its_problem_in_a_line(captioner, server, pauses, body, words, status):
    server.next = [reply(body, status)]
    [answer] = ask(captioner)
    assert words in answer.problem
    assert answer == Answer(problem=answer.problem)
    assert answer.problem.isprintable()
    assert len(answer.problem) < 300
    assert pauses == []
    assert ask(captioner)[0].text == "A cat."


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (chat("A cat is", finish="length"), Answer(text="A cat is", num_tokens=3, is_unfinished=True)),
        (b'{"choices": [{"message": {"content": "A cat."}}]}', Answer(text="A cat.")),
        (chat("A cat.", num_tokens="many"), Answer(text="A cat.")),
        (chat("<b>\x00", reasoning="Hm."), Answer(text="<b>\x00", num_tokens=3)),
    ],
)
def test_answers_come_in_several_forms(captioner, server, body, expected):
    server.next = [reply(body)]
    assert ask(captioner) == [expected]


def test_a_model_that_thinks_gets_more_tokens_from_then_on_and_once(captioner, server):
    thinking = reply(chat(None, finish="length", reasoning_content="A cat? A dog?"))
    server.next = [thinking]
    assert ask(captioner)[0].text == "A cat."
    server.always = thinking
    assert "thought until the limit" in ask(captioner)[0].problem
    assert [request.body["max_tokens"] for request in server.received] == [100, 4196, 4196]


@pytest.mark.parametrize("names", [["qwen3-vl"], ["qwen3-vl", "text-embedding-nomic-embed-text-v1.5"]])
def test_the_only_model_of_the_server_is_taken(server, names):
    server.next = [reply(json.dumps({"data": [{"id": name} for name in names]}))]
    with ChatServer(server.endpoint) as captioner:
        ask(captioner)
    assert "Authorization" not in server.received[1].headers
    assert server.received[0].path == "/v1/models"
    assert server.received[1].body["model"] == "qwen3-vl"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (reply(json.dumps({"data": [{"id": "b"}, {"id": "a\n"}]})), r"--model.* has: a ; b$"),
        *(
            (reply(body), r"does not list its models.*--model")
            for body in (b"<html>", b'{"data": [3]}', b'{"data": []}', b" " * 2_000_000)
        ),
        (reply("who are you?", 401), "MY_KEY"),
    ],
)
def test_a_server_of_which_no_one_model_is_known_is_refused_before_anything_is_sent(server, answer, words):
    server.next = [answer]
    with pytest.raises(UserError, match=words):
        ChatServer(server.endpoint, key=KEY, key_variable="MY_KEY")
    assert len(server.received) == 1


def test_the_key_is_in_no_log_error_or_answer(captioner, server, caplog):
    caplog.set_level(logging.DEBUG)
    server.next = [reply(KEY, 500), reply(f'{{"error": "{KEY}"}}', 400), reply(chat(f"A key: {KEY}"))]
    answers = [*ask(captioner), *ask(captioner)]
    assert answers[1].text == "A key: REDACTED"
    server.always = reply(KEY, 429)
    with pytest.raises(UserError) as caught:
        ask(captioner)
    texts = [str(caught.value), repr(captioner), captioner.name, *map(str, answers), caplog.text]
    assert not any(KEY in text for text in texts)
    assert "trying again" in caplog.text


@pytest.mark.parametrize("key", ["sk-a\nb", "schlüssel", "\x00"])
def test_a_key_that_is_none_is_an_error_that_does_not_show_it(key):
    with pytest.raises(UserError, match="OPENAI_API_KEY") as caught:
        ChatServer("http://127.0.0.1:9/v1", model="some-model", key=key)
    assert key not in str(caught.value)


def test_a_proxy_is_only_for_other_machines(server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with ChatServer(server.endpoint, model="some-model", sleep=lambda _s: None) as captioner:
        assert ask(captioner)[0].text == "A cat."
    with (
        ChatServer("http://example.invalid/v1", model="some-model", sleep=lambda _s: None) as captioner,
        pytest.raises(UserError, match="cannot be reached"),
    ):
        ask(captioner)


def test_a_key_that_leaves_this_machine_unencrypted_is_warned_about(caplog):
    with ChatServer("http://example.invalid/v1", model="some-model", key=KEY):
        assert "without encryption" in caplog.text
    caplog.clear()
    with ChatServer("https://example.invalid/v1", model="some-model", key=KEY):
        assert not caplog.text


@pytest.mark.parametrize(
    ("given", "address", "is_here"),
    [
        ("http://localhost:1234", "http://localhost:1234/v1", True),
        (" http://localhost:1234/ ", "http://localhost:1234/v1", True),
        ("http://LOCALHOST:1234/v1/chat/completions", "http://localhost:1234/v1", True),
        ("http://0.0.0.0:1/v1", "http://0.0.0.0:1/v1", True),
        ("http://[::1]:1/v1", "http://[::1]:1/v1", True),
        ("http://[::ffff:127.0.0.1]:1/v1", "http://[::ffff:127.0.0.1]:1/v1", True),
        ("https://host.example/v1beta/openai", "https://host.example/v1beta/openai", False),
        ("http://192.168.0.5:1234", "http://192.168.0.5:1234/v1", False),
        ("http://127.0.0.1.example", "http://127.0.0.1.example/v1", False),
    ],
)
def test_the_address_is_completed_and_known_to_be_here_or_not(given, address, is_here):
    assert api_address(given) == address
    assert is_this_machine(given) is is_here


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("localhost:1234", "must be http:// or https:// and a host, as in http://localhost:1234/v1"),
        ("localhost", "must be http://"),
        ("ftp://localhost", "must be http://"),
        ("http://", "a host"),
        ("http://a b", "a host"),
        ("http://localhost:99999", "a host"),
        ("http://localhost:port", "not an address"),
        ("http://user:secret@localhost", "leave out"),
        ("http://localhost/v1?key=secret", "leave out"),
        ("http://localhost/\x00", "not an address"),
    ],
)
def test_what_is_no_address_is_an_error(given, words):
    with pytest.raises(UserError, match="--endpoint") as caught:
        api_address(given)
    assert words in str(caught.value)
    assert "secret" not in str(caught.value)

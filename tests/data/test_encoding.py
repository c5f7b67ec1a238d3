import dataclasses
import logging
import os
import signal

import numpy as np
import pytest
import torch
from processes import FORKED

from diffsynth_lite.data.buckets import BucketRule
from diffsynth_lite.data.cache import TensorCache
from diffsynth_lite.data.encoding import Encoder, LiveTensors, encode_missing, find_undecodable
from diffsynth_lite.data.items import PromptItem
from diffsynth_lite.data.media_index import FileMemory, FileState, MediaIndex
from diffsynth_lite.data.plan import PlanRules, plan_items
from diffsynth_lite.data.records import WHOLE, Part
from diffsynth_lite.errors import UserError

RULES = PlanRules(buckets=BucketRule(divisor=4, step=4, sizes=((8, 8), (8, 4))))


@pytest.fixture
def cache(tmp_path):
    return TensorCache(tmp_path / "cache")


@pytest.fixture
def memory(cache):
    with FileMemory(cache.folder / "index.sqlite") as memory:
        yield memory


class CountingEncoder:
    """Encodes an image as its mean colour, and remembers what it was given."""

    def __init__(self, encode_one=None):
        self.num_loads = 0
        self.given = []
        self.encode_one = encode_one or (
            lambda media: {"latents": torch.from_numpy(np.array(media.frames[0])).float().mean((0, 1))}
        )

    def load(self):
        self.num_loads += 1
        return self.encode

    def encode(self, batch):
        self.given += batch
        return [self.encode_one(item) for item in batch]

    @property
    def encoder(self):
        return Encoder(what="items", identity="vae", load=self.load)


def keyed(records, cache, memory, rules=RULES, encoder_id="vae"):
    planned = plan_items(records, index=MediaIndex(memory), rules=rules).items
    return {item.key(cache, encoder_id): item for item in planned}


def run(planned, cache, memory, encoder, share=WHOLE, stop_at_bad=False):
    return encode_missing(
        planned, encoder.encoder, cache=cache, memory=memory, share=share, stop_at_bad=stop_at_bad
    )[1]


def break_image(record):
    record.target.write_bytes(record.target.read_bytes()[:-20])


def test_each_item_is_encoded_by_itself_and_once_and_its_tensors_are_stored_under_its_key(
    cache, memory, make_records
):
    encoder = CountingEncoder()
    planned = keyed(make_records(3), cache, memory)
    assert run(planned, cache, memory, encoder) == {}
    assert (encoder.num_loads, len(encoder.given)) == (1, 3)
    assert sorted(cache.read(key)["latents"].tolist() for key in planned) == [
        [0.0, 0.0, 0.0],
        [1.0, 0.0, 0.0],
        [2.0, 0.0, 0.0],
    ]
    again = CountingEncoder()
    run(planned, cache, memory, again)
    assert again.num_loads == 0


def test_items_of_one_size_follow_each_other(cache, memory, make_records, write_image):
    records = make_records(6)
    for record in records[::2]:
        write_image(record.name, (0, 0, int(record.name[0])), size=(8, 4))
    encoder = CountingEncoder()
    run(keyed(records, cache, memory), cache, memory, encoder)
    sizes = [media.frames[0].size for media in encoder.given]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 2


def test_equal_files_are_encoded_once(cache, memory, make_records):
    records = make_records(3)
    records[2].target.write_bytes(records[0].target.read_bytes())
    encoder = CountingEncoder()
    run(keyed(records, cache, memory), cache, memory, encoder)
    assert len(encoder.given) == 2


@pytest.mark.parametrize("damage", [lambda content: content[:-3], lambda content: content[:-1] + b"\xff"])
def test_only_a_damaged_entry_is_encoded_again(cache, memory, make_records, damage):
    planned = keyed(make_records(3), cache, memory)
    run(planned, cache, memory, CountingEncoder())
    key = list(planned)[1]
    path = cache.path(key)
    expected = path.read_bytes()
    path.write_bytes(damage(expected))
    encoder = CountingEncoder()
    run(planned, cache, memory, encoder)
    assert len(encoder.given) == 1
    assert path.read_bytes() == expected


def test_a_change_of_one_input_encodes_what_it_belongs_to_and_nothing_else(
    cache, memory, make_records, write_image
):
    records = make_records(3)
    run(keyed(records, cache, memory), cache, memory, CountingEncoder())

    def num_encoded(**changes):
        encoder = CountingEncoder()
        run(keyed(records, cache, memory, **changes), cache, memory, encoder)
        return len(encoder.given)

    assert num_encoded() == 0
    write_image("1.png", "blue")
    assert num_encoded() == 1
    records[2] = dataclasses.replace(records[2], captions=("another caption",))
    assert num_encoded() == 0
    assert num_encoded(rules=dataclasses.replace(RULES, background="black")) == 3
    smaller = BucketRule(divisor=4, step=4, sizes=((4, 4),))
    assert num_encoded(rules=dataclasses.replace(RULES, buckets=smaller)) == 3
    assert num_encoded(encoder_id="other weights") == 3
    assert num_encoded() == 0


def test_bad_items_are_all_found_and_the_others_encoded(cache, memory, make_records):
    records = make_records(5)
    for index in (0, 3):
        break_image(records[index])
    encoder = CountingEncoder()
    bad = run(planned := keyed(records, cache, memory), cache, memory, encoder)
    assert [planned[key].record.name for key in bad] == ["0.png", "3.png"]
    assert [str(planned[key].record.target) in reason for key, reason in bad.items()] == [True, True]
    assert len(encoder.given) == 3


def test_after_a_bad_item_nothing_is_encoded_where_nothing_will_be_trained(cache, memory, make_records):
    records = make_records(6)
    for index in (2, 5):
        break_image(records[index])
    encoder = CountingEncoder()
    bad = run(keyed(records, cache, memory), cache, memory, encoder, stop_at_bad=True)
    assert len(bad) == 2
    assert len(encoder.given) == 2


def test_processes_share_all_keys_out_and_none_twice(cache, memory, make_records):
    planned = keyed(make_records(12), cache, memory)
    shares = [Part(index, 3) for index in range(3)]
    assert all(sum(share.owns(key) for share in shares) == 1 for key in planned)
    encoders = [CountingEncoder() for _ in shares]
    for share, encoder in zip(shares, encoders, strict=True):
        run(planned, cache, memory, encoder, share)
    assert sum(len(encoder.given) for encoder in encoders) == 12
    assert sum(encoder.num_loads > 0 for encoder in encoders) > 1
    assert all(cache.read(key) for key in planned)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_never_written(cache, memory, make_records, value):
    encoder = CountingEncoder(lambda media: {"latents": torch.tensor([value])})
    planned = keyed(make_records(1), cache, memory)
    with pytest.raises(UserError, match=r"0\.png: .*not finite .*bf16"):
        run(planned, cache, memory, encoder)
    assert cache.read(next(iter(planned))) is None


def test_prompts_are_encoded_like_items(cache, memory):
    encoder = CountingEncoder(lambda prompt: {"embeds": torch.tensor([float(len(prompt.text))])})
    prompts = {
        prompt.key(cache, "te"): prompt for prompt in map(lambda text: PromptItem(text=text), ("", "ab"))
    }
    run(prompts, cache, memory, encoder)
    assert [cache.read(key)["embeds"].item() for key in prompts] == [0.0, 2.0]


def test_an_encoder_that_loses_an_item_is_our_bug(cache, memory, make_records):
    encoder = CountingEncoder()
    encoder.encode = lambda batch: []
    with pytest.raises(ValueError, match="unpack") as error:
        run(keyed(make_records(1), cache, memory), cache, memory, encoder)
    assert not isinstance(error.value, UserError)


def test_live_tensors_are_those_of_the_cache(cache, memory, make_records):
    planned = keyed(make_records(3), cache, memory)
    run(planned, cache, memory, CountingEncoder())
    encoder = CountingEncoder()
    live = LiveTensors([({}, CountingEncoder().encoder), (planned, encoder.encoder)])
    for key in planned:
        ours, cached = live.read(key), cache.read(key)
        assert ours.keys() == cached.keys()
        assert torch.equal(ours["latents"], cached["latents"])
    assert encoder.num_loads == 1
    assert live.read("unknown") is None


def test_without_a_cache_each_item_is_decoded_once_to_find_bad_ones(cache, memory, make_records, monkeypatch):
    records = make_records(4)
    break_image(records[2])
    planned = keyed(records, cache, memory)
    bad = find_undecodable(planned, memory=memory, share=WHOLE)
    assert [planned[key].record.name for key in bad] == ["2.png"]
    loaded = []
    monkeypatch.setattr(type(next(iter(planned.values()))), "load", lambda item: loaded.append(item.name))
    assert find_undecodable(planned, memory=memory, share=WHOLE) == {}
    assert loaded == ["2.png"]


def test_captions_are_not_decoded_but_the_images_next_to_them_are(cache, memory, make_records, caplog):
    good, broken = make_records(2)
    break_image(broken)
    prompts = {
        prompt.key(cache, "te"): prompt
        for prompt in (
            PromptItem(text="a caption"),
            PromptItem(text="make it blue", images=(good.target,), content=("good",)),
            PromptItem(text="make it red", images=(broken.target,), content=("broken",)),
        )
    }
    with caplog.at_level(logging.INFO):
        bad = find_undecodable(prompts, memory=memory, share=WHOLE)
    assert [prompts[key].text for key in bad] == ["make it red"]
    assert "decoding 2 new items" in caplog.text
    remembered = [memory.recall(f"decodes {key}", FileState(0, 0)) is not None for key in prompts]
    assert remembered == [False, True, False]


def test_a_long_pass_reports_its_progress(cache, memory, make_records, caplog, monkeypatch):
    monkeypatch.setattr("diffsynth_lite.progress_log._TENTH_INTERVAL_S", 0.0)
    with caplog.at_level(logging.INFO):
        run(keyed(make_records(20), cache, memory), cache, memory, CountingEncoder())
    messages = [record.getMessage() for record in caplog.records]
    steps = range(2, 21, 2)
    assert [message.partition(",")[0] for message in messages] == [
        *(f"looked at {count} of 20 items" for count in steps),
        "encoding 20 items that the cache does not hold",
        *(f"encoded {count} of 20 items" for count in steps),
    ]


def _encode_until_killed(records, folder, num_before_kill):
    cache = TensorCache(folder)
    with FileMemory(folder / "index.sqlite") as memory:
        encoder = CountingEncoder()
        encode_one = encoder.encode_one

        def encode(media):
            if len(encoder.given) > num_before_kill:
                os.kill(os.getpid(), signal.SIGKILL)
            return encode_one(media)

        encoder.encode_one = encode
        run(keyed(records, cache, memory), cache, memory, encoder)


def test_after_a_kill_only_the_rest_is_encoded(cache, make_records):
    records = make_records(6)
    process = FORKED.Process(target=_encode_until_killed, args=(records, cache.folder, 4))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    encoder = CountingEncoder()
    with FileMemory(cache.folder / "index.sqlite") as memory:
        planned = keyed(records, cache, memory)
        run(planned, cache, memory, encoder)
    assert len(encoder.given) == 2
    assert all(cache.read(key) for key in planned)

import logging

import numpy as np
import pytest
import torch

from diffsynth_lite.data.cache import TensorCache
from diffsynth_lite.data.encoding import encode_captions, encode_images
from diffsynth_lite.data.records import Record
from diffsynth_lite.errors import UserError


@pytest.fixture
def cache(tmp_path):
    return TensorCache(tmp_path / "cache")


class CountingEncoder:
    """An encoder that is loaded by calling it; it remembers how often, and what it was given."""

    def __init__(self, encode_one):
        self.encode_one = encode_one
        self.num_loads = 0
        self.batches = []

    def __call__(self):
        self.num_loads += 1
        return self.encode

    def encode(self, batch):
        self.batches.append(batch)
        return [self.encode_one(item) for item in batch]


def caption_encoder():
    return CountingEncoder(
        lambda caption: {"embeds": torch.tensor([float(ord(letter)) for letter in caption])}
    )


def image_encoder():
    return CountingEncoder(lambda image: {"latents": torch.from_numpy(np.array(image)).float().mean((0, 1))})


def run_captions(captions, cache, encode, **changes):
    options = {"encoder_id": "te", "batch_size": 2} | changes
    return encode_captions(captions, cache=cache, encode=encode, **options)


def run_images(records, cache, encode, **changes):
    options = {
        "caption_keys": {record.caption: f"key of {record.caption}" for record in records},
        "width": 8,
        "height": 8,
        "encoder_id": "vae",
        "batch_size": 2,
        "on_bad_item": "error",
        "quarantine": lambda record, reason: None,
    }
    return encode_images(records, cache=cache, encode=encode, **(options | changes))


def break_image(record):
    record.image.write_bytes(record.image.read_bytes()[:-20])


def test_each_caption_is_encoded_once_and_its_tensors_stand_under_its_key(cache):
    encode = caption_encoder()
    keys = run_captions(["b", "a", "b", "c", "a"], cache, encode)
    assert list(keys) == ["b", "a", "c"]
    assert encode.batches == [["b", "a"], ["c"]]
    assert {caption: cache.read(key)["embeds"].item() for caption, key in keys.items()} == {
        "a": 97.0,
        "b": 98.0,
        "c": 99.0,
    }


def test_nothing_is_loaded_when_no_caption_is_missing(cache):
    first = run_captions(["a", "b"], cache, caption_encoder())
    again = caption_encoder()
    assert run_captions(["b", "a"], cache, again) == first
    assert again.num_loads == 0
    assert run_captions(["a", "new"], cache, again)["a"] == first["a"]
    assert (again.num_loads, again.batches) == (1, [["new"]])


def test_a_damaged_caption_entry_is_encoded_again(cache):
    key = run_captions(["a"], cache, caption_encoder())["a"]
    [path] = cache.folder.rglob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-1])
    encode = caption_encoder()
    assert run_captions(["a"], cache, encode) == {"a": key}
    assert encode.batches == [["a"]]
    assert cache.read(key)["embeds"].item() == 97.0


def test_another_caption_encoder_has_other_entries(cache):
    first = run_captions(["a"], cache, caption_encoder())
    assert run_captions(["a"], cache, caption_encoder(), encoder_id="other")["a"] != first["a"]


def test_embeddings_that_are_not_finite_name_the_caption(cache):
    encode = CountingEncoder(lambda caption: {"embeds": torch.tensor([float("nan")])})
    with pytest.raises(UserError, match=r"caption 'a red dot': .*not finite .*bf16"):
        run_captions(["a red dot"], cache, encode)


def test_items_lead_to_the_latents_of_their_image_and_the_key_of_their_caption(cache, make_records):
    items = run_images(make_records(3), cache, image_encoder())
    assert [item.name for item in items] == ["0.png", "1.png", "2.png"]
    assert [item.caption_key for item in items] == [f"key of caption {index}" for index in range(3)]
    assert [cache.read(item.latents_key)["latents"].tolist() for item in items] == [
        [0.0, 0.0, 0.0],
        [1.0, 0.0, 0.0],
        [2.0, 0.0, 0.0],
    ]


def test_the_encoder_is_loaded_once_and_gets_batches_of_images_of_the_training_size(cache, make_records):
    encode = image_encoder()
    run_images(make_records(5), cache, encode, width=16, height=4)
    assert encode.num_loads == 1
    assert [[image.size for image in batch] for batch in encode.batches] == [
        [(16, 4)] * 2,
        [(16, 4)] * 2,
        [(16, 4)],
    ]


def test_nothing_is_loaded_when_no_image_is_missing(cache, make_records):
    records = make_records(2)
    first = run_images(records, cache, image_encoder())
    again = image_encoder()
    assert run_images(records, cache, again) == first
    assert again.num_loads == 0


def test_an_entry_belongs_to_the_bytes_of_the_image_and_not_to_its_name(cache, make_records, write_image):
    [record] = make_records(1)
    [first] = run_images([record], cache, image_encoder())
    copy = Record(name="copy.png", image=write_image("copy.png", (0, 0, 0)), caption="x")
    encode = image_encoder()
    [second] = run_images([copy], cache, encode)
    assert second.latents_key == first.latents_key
    assert encode.num_loads == 0
    write_image(record.name, "blue")
    [changed] = run_images([record], cache, encode)
    assert changed.latents_key != first.latents_key
    assert cache.read(changed.latents_key)["latents"].tolist() == [0.0, 0.0, 255.0]


@pytest.mark.parametrize("change", [{"width": 16}, {"height": 16}, {"encoder_id": "other"}])
def test_another_size_or_encoder_has_other_entries(cache, make_records, change):
    records = make_records(1)
    [first] = run_images(records, cache, image_encoder())
    encode = image_encoder()
    [second] = run_images(records, cache, encode, **change)
    assert second.latents_key != first.latents_key
    assert encode.num_loads == 1


def test_all_bad_images_stand_in_one_error_and_nothing_is_encoded_after_the_first(cache, make_records):
    records = make_records(7)
    for index in (2, 6):
        break_image(records[index])
    encode = image_encoder()
    with pytest.raises(UserError, match=r"2 of 7 images .*2\.png: .*; .*6\.png: .*on_bad_item=skip"):
        run_images(records, cache, encode)
    assert len(encode.batches) == 1


def test_no_encoder_is_loaded_when_the_first_image_is_bad(cache, make_records):
    records = make_records(3)
    break_image(records[0])
    encode = image_encoder()
    with pytest.raises(UserError, match="1 of 3"):
        run_images(records, cache, encode)
    assert encode.num_loads == 0


def test_bad_images_are_skipped_when_asked_and_handed_to_the_quarantine(cache, make_records):
    records = make_records(5)
    for index in (0, 3):
        break_image(records[index])
    quarantined = {}
    items = run_images(
        records,
        cache,
        image_encoder(),
        on_bad_item="skip",
        quarantine=lambda record, reason: quarantined.update({record.name: reason}),
    )
    assert [item.name for item in items] == ["1.png", "2.png", "4.png"]
    assert [cache.read(item.latents_key)["latents"][0].item() for item in items] == [1.0, 2.0, 4.0]
    assert list(quarantined) == ["0.png", "3.png"]


def test_equal_files_are_encoded_once_and_are_good_or_bad_together(cache, make_records):
    records = make_records(4)
    records[2].image.write_bytes(records[0].image.read_bytes())
    encode = image_encoder()
    items = run_images(records, cache, encode)
    assert items[0].latents_key == items[2].latents_key
    assert sum(len(batch) for batch in encode.batches) == 3
    break_image(records[0])
    records[2].image.write_bytes(records[0].image.read_bytes())
    items = run_images(records, cache, encode, on_bad_item="skip")
    assert [item.name for item in items] == ["1.png", "3.png"]


def test_a_file_that_cannot_be_opened_is_a_bad_image(cache, make_records):
    records = make_records(3)
    records[1].image.unlink()
    with pytest.raises(UserError, match=r"1 of 3 .*1\.png: cannot be read: No such file"):
        run_images(records, cache, image_encoder())
    items = run_images(records, cache, image_encoder(), on_bad_item="skip")
    assert [item.name for item in items] == ["0.png", "2.png"]


def test_images_that_are_enlarged_are_warned_of_once_also_when_cached(cache, make_records, caplog):
    records = make_records(3)
    with caplog.at_level(logging.WARNING):
        run_images(records, cache, image_encoder())
        assert not caplog.records
        for _ in range(2):
            caplog.clear()
            run_images(records, cache, image_encoder(), height=16)
            assert [record.getMessage() for record in caplog.records] == [
                "3 of 3 images are smaller than 8 x 16 and are enlarged: 0.png; 1.png; 2.png"
            ]


def test_latents_that_are_not_finite_name_the_image(cache, make_records):
    encode = CountingEncoder(lambda image: {"latents": torch.tensor([float("inf")])})
    with pytest.raises(UserError, match=r"0\.png: .*not finite .*bf16"):
        run_images(make_records(1), cache, encode)


def test_an_encoder_that_loses_an_item_is_our_bug(cache, make_records):
    encode = CountingEncoder(None)
    encode.encode = lambda batch: []
    with pytest.raises(ValueError, match="zip") as error:
        run_images(make_records(1), cache, encode)
    assert not isinstance(error.value, UserError)


def test_a_long_pass_reports_its_progress(cache, caplog):
    with caplog.at_level(logging.INFO):
        run_captions([f"caption {index}" for index in range(100)], cache, caption_encoder())
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == "encoding 100 captions that the cache does not hold"
    assert messages[1:] == [f"encoded {count} of 100 captions" for count in range(10, 101, 10)]

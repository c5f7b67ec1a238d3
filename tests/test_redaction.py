"""What the redactor takes for a secret, and what it leaves unchanged."""

import html
import json
from urllib.parse import quote

import pytest
import yaml

from diffsynth_lite.redaction import MASK, Redactor, in_force, redacted

HEX = "0123456789abcdef0123456789abcdef01234567"
SWORD = 'sword\'fish & "ch\\ips" 5/ä'
FORMS = Redactor({})


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("token hf_abcdefghijklmnopqrstuvwxyzABCDEFGH.", f"token {MASK}."),
        ("https://huggingface.co/x?token=hf_abcdefghijklmnop", f"https://huggingface.co/x?token={MASK}"),
        ("api_org_abcdefghijklmnopqrst", MASK),
        (f"WANDB_API_KEY={HEX}", f"WANDB_API_KEY={MASK}"),
        (f"wandb_api_key: '{HEX}'", f"wandb_api_key: '{MASK}'"),
        (f'{{"api_key": "local-{HEX}"}}', f'{{"api_key": "{MASK}"}}'),
        (f"the key {HEX} is wrong", f"the key {MASK} is wrong"),
        ("wandb_v1_ABCdef0123456789_xyz-uvw", MASK),
        ("Authorization: Bearer eyJhbGciOi.eyJzdWIi-OiIx_MjM=", f"Authorization: Bearer {MASK}"),
        ("bearer 0123456789abcdef", f"bearer {MASK}"),
        ("https://ann:pa55@example.org/x", f"https://{MASK}@example.org/x"),
        ("git+ssh://ann:p@ss@example.org", f"git+ssh://{MASK}@example.org"),
        ("see s3://ghp_onlyauser@bucket, there", f"see s3://{MASK}@bucket, there"),
    ],
)
def test_a_secret_is_known_by_its_form(text: str, masked: str) -> None:
    assert FORMS.text(text) == masked


@pytest.mark.parametrize(
    "text",
    [
        f"model.revision: {HEX}",
        f"commit {HEX}",
        "hf_hub_download",
        "the bearer of good news",
        "https://example.org/a@b",
        "https://example.org:8080/x",
        "mail ann@example.org",
        "data.keep_tags: 3, a token budget of 4096",
        "tokenizer/tokenizer.json",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert FORMS.text(text) == text


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "MySecret", "db_password", "TOKENS"])
def test_the_value_of_a_variable_with_a_secret_name_is_a_secret(name: str) -> None:
    redactor = Redactor({name: "swordfish", "HOME": "pictures"})
    assert redactor.text("swordfish, aswordfishes, images") == f"{MASK}, a{MASK}es, images"


def test_a_short_value_is_a_word() -> None:
    redactor = Redactor({"TOKENIZERS_PARALLELISM": "false", "KEY": "", "SECRET": "1234567"})
    assert redactor.text("false 1234567 ") == "false 1234567 "


def test_a_secret_is_found_however_it_is_written() -> None:
    redactor = Redactor({"TOKEN": f" {SWORD}\n"})
    for written in (
        SWORD,
        json.dumps(SWORD),
        json.dumps({"a": [SWORD]}, ensure_ascii=False),
        repr(SWORD),
        html.escape(SWORD),
        quote(SWORD, safe=""),
        yaml.safe_dump({"a": SWORD}, default_style="'", allow_unicode=True),
    ):
        assert "fish" in written
        assert "fish" not in redactor.text(written), written


def test_of_two_secrets_the_longer_one_is_masked_whole() -> None:
    assert Redactor({"A_KEY": "swordfish", "B_KEY": "swordfishes"}).text("swordfishes") == MASK


def test_each_line_of_a_private_key_is_masked() -> None:
    redactor = Redactor({"SSH_KEY": "-----BEGIN-----\nMIIEpAIBAAKC\nAQEA1234ABCD\n-----END-----\n"})
    text = redactor.text("key: |\n  -----BEGIN-----\n  MIIEpAIBAAKC\n  AQEA1234ABCD\n")
    assert text == f"key: |\n  {MASK}\n  {MASK}\n  {MASK}\n"


def test_texts_are_masked_inside_mappings_and_lists_and_numbers_stay() -> None:
    redactor = Redactor({"KEY": "12345678"})
    value = {"12345678": ["a 12345678", ("12345678",), {"b": None}], "n": 12345678, "x": 0.12345678}
    assert redactor.masked(value) == {
        MASK: [f"a {MASK}", (MASK,), {"b": None}],
        "n": 12345678,
        "x": 0.12345678,
    }


def test_values_are_masked_while_their_redactor_is_in_force_and_forms_always() -> None:
    text = "swordfish hf_abcdefghijklmnopqrst"
    assert redacted(text) == f"swordfish {MASK}"
    with in_force(Redactor({"TOKEN": "swordfish"})):
        assert redacted([text]) == [f"{MASK} {MASK}"]
    assert redacted(text) == f"swordfish {MASK}"


@pytest.mark.parametrize("piece", ["a", "a1+", "hf_", "Bearer ", "key ", "https://", "a@", "0123abcd"])
def test_a_long_text_is_masked_all_the_same(piece: str) -> None:
    """A form that backtracks over the rest of the text from each place would take hours for this."""
    text = f"{piece * (200_000 // len(piece))} hf_abcdefghijklmnopqrst"
    assert FORMS.text(text).endswith(MASK)

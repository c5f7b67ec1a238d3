"""The doctor's page: complete, by itself, and safe whatever captions and file names hold."""

import base64
import io
import re
from pathlib import Path

import pytest
from browser import DESKTOP_PX, PHONE_PX, Browser
from html_page import HtmlPage
from PIL import Image

from diffsynth_lite.core.noise.densities import LevelShares
from diffsynth_lite.doctor.findings import (
    BucketFindings,
    CaptionFindings,
    Findings,
    NoiseFindings,
    SheetEntry,
    SourceFindings,
    Spread,
)
from diffsynth_lite.doctor.page import write_page

ATTACK = "<script>alert(1)</script> & \" ' {{ 7 * 7 }}"


def findings(**changes: object) -> Findings:
    strip = Image.new("RGB", (500, 100), "teal")
    values = {
        "machine": {"torch": "2"},
        "model": {"release": "none that is known"},
        "sources": [
            SourceFindings(
                place="photos", num_records={"image": 2}, num_captions=2, num_dropped=1, passes=1.5
            ),
        ],
        "facts": {"items": "2"},
        "buckets": [
            BucketFindings(
                name="832x480x81",
                num_items=2,
                samples_per_pass=3,
                micro_batch_size=2,
                num_tokens=32760,
            )
        ],
        "captions": CaptionFindings(tokens=Spread.of([3, 5]), limit=512),
        "sheet": [
            SheetEntry(name=ATTACK, bucket="832x480x81", captions=[ATTACK], images={"frames": strip}),
            SheetEntry(
                name="pair",
                bucket="64x64",
                captions=["make it red"],
                images={"input": strip, "target": Image.new("L", (64, 64), 9)},
                remarks=["enlarged"],
            ),
        ],
        "num_items": 2,
    }
    return Findings(**(values | changes))


def page(tmp_path: Path, **changes: object) -> tuple[str, HtmlPage]:
    path = tmp_path / "new" / "page.html"
    write_page(path, findings(**changes), title="flowers", lead="two images")
    text = path.read_text(encoding="utf-8")
    return text, HtmlPage(text)


def test_the_page_needs_no_network_and_runs_no_script(tmp_path: Path) -> None:
    text, parsed = page(tmp_path, dropped={ATTACK: ATTACK}, equal=[[ATTACK, "b"]], advice=[ATTACK])
    assert "script" not in parsed.tags
    assert not re.search('(?:src|href)=(?!"data:image)', text)
    assert "http" not in text
    assert parsed.text.count(ATTACK) >= 4


def test_the_images_are_in_the_page_as_the_model_sees_them(tmp_path: Path) -> None:
    _, parsed = page(tmp_path)
    assert [image["alt"] for image in parsed.images][1:] == ["input of pair", "target of pair"]
    data = base64.b64decode(parsed.images[0]["src"].partition(",")[2])
    with Image.open(io.BytesIO(data)) as image:
        assert image.size == (500, 100)
        red, green, _ = image.getpixel((50, 50))
        assert red < 10 < 110 < green


def test_what_is_seen_through_a_layer_is_a_checkerboard(tmp_path: Path) -> None:
    layer = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    layer.paste((0, 128, 128, 255), (0, 0, 32, 64))
    entry = SheetEntry(name="a", bucket="64x64 in 1 layer", captions=[], images={"layer": layer})
    _, parsed = page(tmp_path, sheet=[entry])
    data = base64.b64decode(parsed.images[0]["src"].partition(",")[2])
    with Image.open(io.BytesIO(data)) as image:
        seen, light, dark = (image.getpixel((left, 4)) for left in (12, 44, 36))
    assert seen[0] < 12 < 110 < seen[1]
    assert sorted([light, dark]) == [pytest.approx((204,) * 3, abs=6), pytest.approx((255,) * 3, abs=6)]


def test_a_secret_in_a_name_is_masked(tmp_path: Path) -> None:
    text, parsed = page(tmp_path, advice=["https://ann:swordfish@example.org/ is in a caption"])
    assert "https://REDACTED@example.org/ is in a caption" in parsed.text
    assert "swordfish" not in text


def test_noise_levels_are_shown_with_bars_as_high_as_their_shares(tmp_path: Path) -> None:
    tenths = [0.0, 0.05, 0.2, *[0.0] * 7]
    row = NoiseFindings(name="all steps", part=1.0, shift=2.2, shares=LevelShares(tenths=tenths, mean=0.625))
    text, parsed = page(tmp_path, noise=[row], noise_level="the part of noise")
    assert "Noise levels" in parsed.text
    assert "the part of noise" in parsed.text
    bars = re.findall(r'--share: (\d+)%">(\d+)<', text)
    assert bars == [("0", "0"), ("25", "5"), ("100", "20"), *[("0", "0")] * 7]
    assert "Noise levels" not in page(tmp_path)[0]


def test_tables_and_remarks_are_shown(tmp_path: Path) -> None:
    _, parsed = page(tmp_path, num_items=900)
    text = " ".join(parsed.text.split())
    for part in (
        "Model release none that is known",
        "832x480x81 2 3 2 1.5 32760",
        "photos 2 images 1 1 2 1.5",
        "2 of 900 items",
    ):
        assert part in text
    assert "enlarged" in text


def test_a_spread_shows_its_range_and_its_median() -> None:
    assert str(Spread.of([3, 1, 2])) == "1 to 3, median 2"
    assert str(Spread.of([4, 4])) == "4"
    assert Spread.of([]) is None


@pytest.mark.parametrize(("width", "dark"), [(DESKTOP_PX, False), (PHONE_PX, True)])
def test_a_browser_shows_all_of_it_and_asks_for_nothing_else(
    tmp_path: Path, browser: Browser, width: int, dark: bool
) -> None:
    shares = LevelShares(tenths=[0.1] * 10, mean=0.5)
    noise = [NoiseFindings(name="all steps", part=1.0, shift=2.2, shares=shares)]
    long_name = 40 * "no_space"
    page(tmp_path, advice=[ATTACK, long_name], dropped={long_name: "torn"}, noise=noise, noise_level="")
    with browser.page(tmp_path / "new" / "page.html", width=width, dark=dark) as shown:
        assert shown.complaints == []
        assert shown.requests == [(tmp_path / "new" / "page.html").as_uri()]
        assert shown.overflow_px() <= 0
        assert shown.text().count(ATTACK) == 3
        assert shown.evaluate("[...document.images].map(image => image.naturalWidth)") == [500, 500, 64]
        lightness = shown.evaluate("getComputedStyle(document.body).backgroundColor")
        assert lightness == ("rgb(24, 24, 24)" if dark else "rgb(255, 255, 255)")

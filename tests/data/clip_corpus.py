"""Odd and bad clips: how each is made, and what must become of it."""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
from clip_makers import (
    BT601,
    FULL,
    HLG,
    PQ,
    avi_slots,
    index_of_avi,
    packets_of,
    remux,
    write_audio,
    write_avi,
    write_clip,
)


@dataclass(frozen=True)
class Accepted:
    """``shown``: the `pattern` of each frame, in order; for ``seconds``, where frames are repeated."""

    shown: list[int]
    seconds: float | None = None
    fps: float = 25.0
    size: tuple[int, int] = (64, 48)
    is_variable_rate: bool = False


@dataclass(frozen=True)
class Refused:
    """By `check_video`, with a message that contains ``reason``."""

    reason: str


Maker = Callable[[Path], object]
ALL_25 = list(range(25))
NOT_A_CLIP = "damaged, cut off, or not an MP4"
QUIET = {"x265-params": "log-level=none:open-gop=1:keyint=8:min-keyint=8"}


def written(content: bytes) -> Maker:
    return lambda path: path.write_bytes(content)


def clip(**options) -> Maker:
    return lambda path: write_clip(path, **options)


def cut(num_bytes: int, **options) -> Maker:
    def make(path: Path) -> None:
        content = write_clip(path, **options).read_bytes()
        path.write_bytes(content[:-num_bytes])

    return make


def repacked(
    change: Callable[[list[dict]], list[dict]],
    *,
    silence_s: float = 0.0,
    num_frames: int = 40,
    **container: str,
) -> Maker:
    """A clip whose packets are changed and written again."""

    def make(path: Path) -> None:
        source = write_clip(path.with_name(f"source of {path.name}.mp4"), num_frames=num_frames)
        remux(source, path, change(packets_of(source)), container, silence_s=silence_s)

    return make


def sounding(num_frames: int, **container: str) -> Maker:
    """A clip whose audio ends after it."""
    return repacked(list, silence_s=num_frames / 25 + 0.1, num_frames=num_frames, **container)


TABLES_FIRST = clip(container={"movflags": "faststart"})


def shifted(frames: int) -> Callable[[list[dict]], list[dict]]:
    ticks = 512 * frames  # of 1 / 12800 s
    return lambda packets: [p | {"pts": p["pts"] - ticks, "dts": p["dts"] - ticks} for p in packets]


def edited(*, silence_s: float = 0.0) -> Maker:
    """An MP4 of 40 frames whose edit list cuts the first 11."""
    return repacked(shifted(11), silence_s=silence_s, avoid_negative_ts="disabled")


def edited_at_both_ends(path: Path) -> None:
    """Of its 29 frames, the edit list of `edited` cuts the last 5 as well; its audio continues."""
    edited(silence_s=2.0)(path)
    content = bytearray(path.read_bytes())
    first_entry = content.index(b"elst") + 12
    duration_ms = struct.unpack_from(">I", content, first_entry)[0]
    struct.pack_into(">I", content, first_entry, duration_ms - 5 * 40)
    path.write_bytes(content)


def renamed(name: str, **options) -> Maker:
    return lambda path: write_clip(path.with_name(name), **options).rename(path)


def hidden_vp8_frame(path: Path) -> None:
    """The way of VP8's alternate reference frames: a packet that is decoded, but not shown."""
    source = write_clip(path.with_name(f"source of {path.name}"), codec="libvpx")
    packets = packets_of(source)
    shown = packets[8]
    hidden = shown | {"data": bytes([shown["data"][0] & ~0x10]) + shown["data"][1:], "pts": shown["pts"] - 1}
    remux(source, path, [*packets[:8], hidden | {"dts": shown["dts"] - 1}, *packets[8:]])


def zeroed_start(path: Path) -> None:
    source = write_clip(path.with_name(f"source of {path.name}"))
    packets = packets_of(source)
    packets[0]["data"] = bytes(len(packets[0]["data"]))
    remux(source, path, packets)


def frame_sizes(change: Callable[[list[int]], None], make_clip: Maker = TABLES_FIRST) -> Maker:
    """An MP4 in whose table of sizes (stsz) something is changed."""

    def make(path: Path) -> None:
        make_clip(path)
        content = bytearray(path.read_bytes())
        start = content.index(b"stsz") + 16
        sizes = list(struct.unpack_from(">25I", content, start))
        change(sizes)
        struct.pack_into(">25I", content, start, *sizes)
        path.write_bytes(content)

    return make


def broken_size(sizes: list[int]) -> None:
    """A size at which FFmpeg ends the index, with no word about it."""
    sizes[-5] = 2**30 + 5


def no_timescale(path: Path) -> None:
    """An MP4 whose units of time (mdhd) are 0, so that its edit list cuts all frames but one."""
    content = bytearray(write_clip(path, container={"movflags": "faststart"}).read_bytes())
    struct.pack_into(">II", content, content.index(b"mdhd") + 16, 0, 0)
    path.write_bytes(content)


def cut_between_frames(path: Path) -> None:
    write_clip(path, options={"bf": "0"}, container={"movflags": "faststart"})
    last = packets_of(path)[-1]["data"]
    content = path.read_bytes()
    assert content.endswith(last)
    path.write_bytes(content[: -len(last)])


def mp3(seconds: float, **options) -> Maker:
    """An AVI with silent MP3, which has empty chunks."""

    def make(path: Path) -> None:
        samples = round(seconds * options.get("rate", 44100))
        write_avi(path, waveform=np.zeros((1, samples), np.float32), **options)
        assert avi_slots(path) != list(range(25))

    return make


def remuxed_mp3(path: Path) -> None:
    """Like `mp3`, of packets that are not encoded again, the last of which lasts for 5 slots."""
    packets = packets_of(write_avi(path.with_name(f"source of {path.name}")))
    packets[-1]["duration"] = 5
    remux(path.with_name(f"source of {path.name}"), path, packets, silence_s=1.0, codec="libmp3lame")
    sizes = [entry[3] for entry in index_of_avi(path)[1] if entry[0] == b"00dc"]
    assert [size for size in sizes[-5:] if not size] == [0] * 4


def dropped_by_hand(path: Path) -> None:
    """An AVI in which frames 7, 8 and 24 were made empty, with filling in their places."""
    write_clip(path, **MJPEG)
    content = bytearray(path.read_bytes())
    start, entries = index_of_avi(path)
    movi = content.index(b"movi")
    for number in (7, 8, 24):
        _, _, place, size = entries[number]
        struct.pack_into("<I4sI", content, movi + place + 4, 0, b"JUNK", size + size % 2 - 8)
        struct.pack_into("<I", content, start + 16 * number + 12, 0)
    path.write_bytes(content)


def cut_at(place: Callable[[Path], int], make_clip: Maker, *, fill: bool = False) -> Maker:
    """A clip that ends at a place; ``fill`` puts zeros up to its index, as in an unfinished download."""

    def make(path: Path) -> None:
        make_clip(path)
        end, content = place(path), path.read_bytes()
        index = content.rindex(b"idx1") if fill else end
        path.write_bytes(content[:end] + bytes(index - end) + content[index:] * fill)

    return make


def frame_20(path: Path) -> int:
    """Where the frame of slot 20 of an AVI begins."""
    content = path.read_bytes()
    entries = [entry for entry in index_of_avi(path)[1] if entry[0] == b"00dc"]
    return content.index(b"movi") + entries[20][2]


DROPPED = [index + 3 * (index > 9) for index in range(25)]
"""Slots of frames of which three are missing."""
MJPEG = {"codec": "mjpeg", "pixels": "yuvj420p", "color_range": FULL, "matrix": BT601}
HTML = b"<!DOCTYPE html><html><body>404 not found</body></html>"
PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\nhttp://127.0.0.1:9/clip.ts\n#EXT-X-ENDLIST\n"
CONCAT = b"ffconcat version 1.0\nfile '/etc/passwd'\n"

CLIPS: dict[str, tuple[Maker, Accepted | Refused]] = {
    "plain.mp4": (clip(), Accepted(ALL_25)),
    "no_b_frames.mov": (clip(options={"bf": "0"}), Accepted(ALL_25)),
    "h264.mkv": (clip(), Accepted(ALL_25)),
    "with: colons?.mp4": (clip(), Accepted(ALL_25)),
    "renamed_mkv.mp4": (renamed("a.mkv"), Accepted(ALL_25)),
    "open_gop.mp4": (
        clip(options={"x264-params": "open-gop=1:bframes=3:b-adapt=0"}),
        Accepted(ALL_25),
    ),
    "hevc.mp4": (clip(codec="libx265", options=QUIET), Accepted(ALL_25)),
    "vp8.webm": (clip(codec="libvpx"), Accepted(ALL_25)),
    "vp8_hidden.webm": (hidden_vp8_frame, Accepted(ALL_25)),
    "vp9.webm": (clip(codec="libvpx-vp9"), Accepted(ALL_25)),
    "mpeg4.avi": (clip(codec="mpeg4", options={"b": "4000000"}), Accepted(ALL_25)),
    "mjpeg.avi": (clip(**MJPEG), Accepted(ALL_25)),
    "mp3.avi": (mp3(1.0), Accepted(ALL_25, seconds=1.04)),
    "mp3_ends_early.avi": (mp3(0.6, rate=48000), Accepted(ALL_25, seconds=1.04)),
    "mp3_xvid.avi": (mp3(1.0, tag="xvid", rate=48000), Accepted(ALL_25, seconds=1.04)),
    "mp3_h264.avi": (mp3(1.0, codec="libx264"), Accepted(ALL_25, seconds=1.04)),
    "mp3_22_khz.avi": (mp3(1.2, rate=22050), Accepted(ALL_25, seconds=1.08, is_variable_rate=True)),
    "mp3_remuxed.avi": (remuxed_mp3, Accepted(ALL_25, seconds=1.08, is_variable_rate=True)),
    "dropped.avi": (
        lambda path: write_avi(path, slots=DROPPED),
        Accepted(ALL_25, seconds=1.12, is_variable_rate=True),
    ),
    "dropped_mp3_h264.avi": (
        mp3(1.1, codec="libx264", slots=DROPPED),
        Accepted(ALL_25, seconds=1.16, is_variable_rate=True),
    ),
    "dropped_by_hand.avi": (
        dropped_by_hand,
        Accepted([*range(7), *range(9, 24)], seconds=0.96, is_variable_rate=True),
    ),
    "no_index.avi": (
        cut_at(lambda path: index_of_avi(path)[0] - 8, mp3(1.0)),
        Accepted(ALL_25, seconds=1.04),
    ),
    "half_index.avi": (
        cut_at(lambda path: index_of_avi(path)[0] + 160, mp3(1.0)),
        Accepted(ALL_25, seconds=1.04),
    ),
    "prores.mov": (clip(codec="prores_ks", pixels="yuv422p10le"), Accepted(ALL_25)),
    "ten_bits.mp4": (clip(pixels="yuv420p10le"), Accepted(ALL_25)),
    "odd_size.webm": (clip(codec="libvpx-vp9", size=(63, 47)), Accepted(ALL_25, size=(63, 47))),
    "turned.mp4": (clip(turn=(90, False, False)), Accepted(ALL_25, size=(48, 64))),
    "upside_down.mp4": (clip(turn=(180, False, False)), Accepted(ALL_25)),
    "mirrored.mp4": (clip(turn=(0, True, False)), Accepted(ALL_25)),
    "one_frame.mp4": (clip(num_frames=1), Accepted([0])),
    "ntsc.mkv": (clip(rate=Fraction(30000, 1001)), Accepted(ALL_25, fps=30000 / 1001)),
    "variable.mp4": (
        clip(times=[i * 10 + i % 3 * 3 for i in range(25)], time_base=Fraction(1, 250)),
        Accepted(ALL_25, fps=25.0, is_variable_rate=True),
    ),
    "variable.mkv": (
        clip(times=[i * 10 + i % 3 * 3 for i in range(25)], time_base=Fraction(1, 250)),
        Accepted(ALL_25, fps=25.0, is_variable_rate=True),
    ),
    "starts_late.mp4": (clip(times=range(100, 125)), Accepted(ALL_25)),
    "starts_late.mkv": (clip(times=range(100, 125)), Accepted(ALL_25)),
    "fragments.mp4": (clip(container={"movflags": "frag_keyframe+empty_moov"}), Accepted(ALL_25)),
    "edit_list.mp4": (edited(), Accepted(list(range(11, 40)))),
    "with_audio.mp4": (sounding(25), Accepted(ALL_25)),
    "edit_list_with_audio.mp4": (edited(silence_s=2.0), Accepted(list(range(11, 40)))),
    "edited_at_both_ends.mp4": (edited_at_both_ends, Accepted(list(range(11, 35)))),
    "no_first_keyframe.mkv": (repacked(lambda packets: packets[1:]), Refused("not a keyframe")),
    "empty.mp4": (written(b""), Refused(NOT_A_CLIP)),
    "page.mp4": (written(HTML), Refused(NOT_A_CLIP)),
    "zeros.mp4": (written(bytes(5000)), Refused(NOT_A_CLIP)),
    "playlist.mp4": (written(PLAYLIST), Refused(NOT_A_CLIP)),
    "list_of_files.mp4": (written(CONCAT), Refused(NOT_A_CLIP)),
    "no_moov.mp4": (cut(3000), Refused(NOT_A_CLIP)),
    "half.mp4": (cut(700, container={"movflags": "faststart"}), Refused("damaged")),
    "cut_between_frames.mp4": (cut_between_frames, Refused("cut off: 24 of 25 frames")),
    "half.mkv": (cut(2000, codec="mpeg4", options={"b": "4000000"}), Refused("cut off")),
    "half.avi": (cut(6000, codec="mpeg4", options={"b": "4000000"}), Refused("cut off")),
    "half_mp3.avi": (cut_at(frame_20, mp3(1.0)), Refused("cut off: 20 of 26 frames")),
    "half_dropped.avi": (
        cut_at(frame_20, mp3(1.0, codec="libx264", slots=DROPPED)),
        Refused("cut off: 20 of 29 frames"),
    ),
    "zeroed_end_mp3.avi": (cut_at(frame_20, mp3(1.0), fill=True), Refused("cut off: 20 of 26 frames")),
    "half_header.mkv": (lambda path: path.write_bytes(write_clip(path).read_bytes()[:300]), Refused("")),
    "zeroed_start.mp4": (zeroed_start, Refused("not a keyframe")),
    "frames_of_no_bytes.mp4": (
        frame_sizes(lambda sizes: sizes.__setitem__(slice(-4, None), [0] * 4)),
        Refused("cut off: 21 of 25 frames"),
    ),
    "frame_above_the_file.mp4": (
        frame_sizes(lambda sizes: sizes.__setitem__(-5, 2**30 - 2**20)),
        Refused("damaged"),
    ),
    "index_ends_at_a_size.mp4": (frame_sizes(broken_size), Refused("cut off: 20 of 25 frames")),
    "index_ends_at_a_size_with_audio.mp4": (
        frame_sizes(broken_size, sounding(25, movflags="faststart")),
        Refused("cut off: 20 of 25 frames"),
    ),
    "no_timescale.mp4": (no_timescale, Refused("damaged")),
    "audio_only.mp4": (write_audio, Refused("holds no video")),
    "mpeg_ps.mp4": (renamed("a.mpg", codec="mpeg2video"), Refused(NOT_A_CLIP)),
    "gif.mp4": (renamed("a.gif", codec="gif", pixels="rgb8", tagged=False), Refused(NOT_A_CLIP)),
    "b_frames.avi": (clip(), Refused("B-frames")),
    "interlaced.mp4": (clip(options={"x264-params": "tff=1"}), Refused("interlaced")),
    "anamorphic.mp4": (clip(aspect=Fraction(4, 3)), Refused("not square (4/3)")),
    "pq.mp4": (clip(pixels="yuv420p10le", transfer=PQ, matrix=9), Refused("HDR (PQ)")),
    "hlg.mp4": (clip(pixels="yuv420p10le", transfer=HLG, matrix=9), Refused("HDR (HLG)")),
    "alpha.mov": (clip(codec="qtrle", pixels="argb", tagged=False), Refused("transparency")),
    "alpha.webm": (clip(codec="libvpx-vp9", metadata={"alpha_mode": "1"}), Refused("transparency")),
    "tilted.mp4": (clip(turn=(30, False, False)), Refused("at an angle")),
    "no_such_codec.mkv": (
        lambda path: path.write_bytes(
            write_clip(path).read_bytes().replace(b"V_MPEG4/ISO/AVC", b"V_UNKNOWN/CODEC")
        ),
        Refused("cannot be decoded"),
    ),
}
CLIPS["no_frames.mp4"] = (
    lambda path: path.write_bytes(
        write_clip(path, container={"movflags": "frag_keyframe+empty_moov"})
        .read_bytes()
        .partition(b"moof")[0][:-4]
    ),
    Refused("cannot be decoded"),
)

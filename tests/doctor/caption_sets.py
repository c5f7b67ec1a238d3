"""Captions of good data sets in several styles, none of which the doctor should remark on."""

import json

PROSE = [
    "ohwx woman laughing in a busy market, holding a paper bag of oranges.",
    "A close-up of ohwx woman in soft window light, her eyes half closed.",
    "ohwx woman walks along a wet street at night, neon signs behind her.",
    "Seen from behind, ohwx woman climbs a stone staircase in a yellow raincoat.",
    "ohwx woman sits at a kitchen table with a laptop and a mug of coffee.",
    "ohwx woman on a beach at dusk, wind in her hair, wearing a white linen shirt.",
    "A full body shot of ohwx woman running through a park in grey sportswear.",
    "ohwx woman reads a book under a tree, dappled sunlight on the grass.",
    "ohwx woman in a black evening dress on a red carpet, photographers around her.",
    "Side view of ohwx woman driving an old car through the desert.",
    "ohwx woman plays a guitar on a small stage under purple light.",
    "ohwx woman, smiling, with a golden retriever in the snow.",
]
TAGS = [
    "1girl, solo, mirabel, smile, outdoors, sky, sitting, green dress, looking at viewer",
    "1girl, solo, mirabel, standing, indoors, window, school_uniform, closed mouth",
    "1girl, mirabel, running, street, night, jacket, open mouth, from side",
    "1girl, solo, mirabel, upper body, white background, smile, hat",
    "1girl, solo, mirabel, sleeping, bed, pillow, pajamas, closed eyes",
    "1girl, mirabel, holding umbrella, rain, city, coat, from behind",
    "1girl, solo, mirabel, eating, table, food, sweater, blush, looking at viewer",
    "1girl, solo, mirabel, reading, book, library, glasses, sitting",
    "1girl, solo, mirabel, beach, ocean, swimsuit, smile, barefoot",
    "{best quality}, 1girl, solo, mirabel, dancing, stage, lights, dress, arms up",
]
JAPANESE = [
    "mirabelさんが公園のベンチで本を読んでいる。",
    "夜の街を歩くmirabelさん、ネオンが光る。",
    "mirabelさんが台所でコーヒーを飲んでいる写真。",
    "海辺で風に吹かれて笑うmirabelさん。",
    "雪の中で犬と遊ぶmirabelさん、赤いコートを着ている。",
    "mirabelさんが舞台でギターを弾いている。",
    "図書館の窓際に座るmirabelさんの横顔。",
    "黒いドレスを着たmirabelさんが階段を降りる。",
    "mirabelさんが電車の中で眠っている、Canon EOS R5で撮影。",
]
CHINESE = [
    "一个女人在海边奔跑\uff0c穿着白色连衣裙。",
    "一张女人在咖啡馆看书的照片\uff0c背景是窗户。",
    "夜晚的街道上\uff0c一个女人撑着伞。",
    "一个女人站在厨房里\uff0c正在切菜。",
    "雪地里\uff0c一个女人和狗玩耍。",
    "一个女人在舞台上弹吉他\uff0c紫色的灯光。",
    "一个女人坐在公园的长椅上。",
    "一个女人骑着自行车穿过樱花树。",
]
GERMAN = [
    "Eine Frau läuft am Strand entlang.",
    "Eine Frau sitzt in einem Café und liest.",
    "Eine Frau steht auf einer Brücke im Regen.",
    "Eine Frau mit einem Hund im Schnee.",
    "Eine Frau spielt Gitarre auf einer Bühne.",
    "Eine Frau fährt mit dem Fahrrad.",
    "Eine Frau kocht in der Küche.",
    "Eine Frau schläft in der Bahn.",
]
STYLE = [
    "a lighthouse on a cliff above a stormy sea",
    "two children flying a kite",
    "a fox asleep in autumn leaves",
    "an old man mending a fishing net",
    "a train crossing a viaduct",
    "a bowl of lemons on a blue cloth",
    "a harbour with sailing boats in fog",
    "a girl feeding pigeons on a square",
    "mountains above a still lake",
]
TOYS = [f"ohwx toy car {place}" for place in (
    "on a wooden floor", "in a sandbox", "next to a coffee cup", "under a bed", "in front of a mirror",
    "held in a hand", "on a snowy path", "among fallen leaves", "beside a red ball",
)]  # fmt: skip


def _structured(description: str, background: str, *elements: str) -> str:
    parts = {"background": background, "elements": [{"type": "obj", "desc": text} for text in elements]}
    return json.dumps({"high_level_description": description, "compositional_deconstruction": parts})


JSON = [
    _structured("ohwx woman on a market", "stalls with fruit", "a paper bag", "ohwx woman laughing"),
    _structured("ohwx woman at night", "a wet street", "neon signs", "a taxi"),
    _structured("ohwx woman reading", "a meadow", "a tree", "a book"),
    _structured("ohwx woman drives", "a desert road", "an old car"),
    _structured("ohwx woman sings", "a dark stage", "a microphone", "purple spotlights"),
    _structured("ohwx woman runs", "a city park", "grey sportswear"),
    _structured("ohwx woman with a dog", "deep snow", "a golden retriever"),
    _structured("ohwx woman at dinner", "a restaurant", "a plate of pasta", "candles"),
]
CLEAN = {
    "prose": (PROSE, "ohwx woman"),
    "prose with a shorter trigger": (PROSE, "ohwx"),
    "prose with a trigger of its own": (PROSE, ""),
    "tags": (TAGS, "mirabel"),
    "tags with a trigger of their own": (TAGS, ""),
    "Japanese": (JAPANESE, "mirabel"),
    "Japanese with a trigger of its own": (JAPANESE, ""),
    "Chinese": (CHINESE, "mirabel"),
    "German": ([f"mirabel, {text}" for text in GERMAN], "mirabel"),
    "a style": (STYLE, "inkblot style"),
    "an object": (TOYS, "ohwx"),
    "JSON": (JSON, "ohwx woman"),
    "JSON without a trigger": (JSON, ""),
    "tags in braces": ([f"{{masterpiece}}, {{{{best quality}}}}, {tags}" for tags in TAGS], "mirabel"),
}

"""Writes what is generated from the code: two pages in ``docs``, and the schema of configs for editors."""

from pathlib import Path

from models_page import render_models_page

from diffsynth_lite.config.reference import render_reference, render_schema

REPOSITORY = Path(__file__).parents[1]


def main() -> None:
    """Write each of them."""
    texts = {
        "docs/configuration.md": render_reference(),
        "docs/models.md": render_models_page(REPOSITORY / "configs"),
        "configs/schema.json": render_schema(),
    }
    for name, text in texts.items():
        (REPOSITORY / name).write_text(text, encoding="utf-8")
        print(f"wrote {name}")


if __name__ == "__main__":
    main()

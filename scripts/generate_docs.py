"""Writes the pages of the documentation that are generated from the code: ``docs/configuration.md``."""

from pathlib import Path

from diffsynth_lite.config.reference import render_reference

if __name__ == "__main__":
    page = Path(__file__).parents[1] / "docs" / "configuration.md"
    page.write_text(render_reference(), encoding="utf-8")
    print(f"wrote {page}")

"""The screen of a run: the page of its report with buttons, its log and what it left to download."""

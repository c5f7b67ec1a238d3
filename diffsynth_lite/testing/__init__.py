"""Tokenizers and tiny models of the real classes, built offline in milliseconds: what the tests run on."""

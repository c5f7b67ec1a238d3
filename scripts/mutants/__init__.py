"""What the tests notice."""

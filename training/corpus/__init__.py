"""Text: fetched from named packages, cleaned to prose, and cut into tokens."""

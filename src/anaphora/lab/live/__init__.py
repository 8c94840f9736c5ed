"""A live server's own word: its metrics and configuration, and the one cause that they name."""

"""llm-d's configuration files and block keys."""

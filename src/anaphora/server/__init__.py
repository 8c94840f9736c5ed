"""HTTP: OpenAI's API over the engine."""

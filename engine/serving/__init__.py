"""A server of a decoder: an OpenAI-compatible HTTP side, and ranks that batch its requests continuously."""

"""The HTTP side of a server, a process without torch: OpenAI's API in front of the ranks."""

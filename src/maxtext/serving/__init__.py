"""Serving: requests over HTTP, by OpenAI's protocol, to an engine in a process of its own."""

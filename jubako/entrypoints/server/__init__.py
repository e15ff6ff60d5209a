"""The HTTP server: OpenAI's interface in front of an `AsyncLLM`."""

"""The engine over HTTP, as OpenAI's clients speak it; needs the extra ``serve``."""

"""Bodies of requests. Unknown fields pass, as clients send many; known ones that would change the answer do not."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvcq.runtime.hf.api.errors import ApiError
from kvcq.runtime.hf.engine.sampling import Sampling

MAX_CHOICES = 16
MAX_SCORES = 20
MAX_STOPS = 16

Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=0, le=2**31)]
Stop = Annotated[str, Field(max_length=256)]

# Fields of other servers, and the values at which they change nothing; absent and null always pass.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": (),
    "guided_json": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "lora_path": (),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "regex": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}


class StreamOptions(BaseModel):
    """What a stream tells besides the answer."""

    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = None


class Body(BaseModel):
    """Fields that both endpoints have; `top_k`, `stop_token_ids` and `ignore_eos` are extensions."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    refused: ClassVar[dict[str, tuple[Any, ...]]] = NEUTRAL

    model: str
    max_tokens: Count | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    seed: Seed | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[int] | None = Field(default=None, max_length=MAX_STOPS)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def refuse(self) -> None:
        """Refuse fields that this server does not honour.

        Raises:
            ApiError: 400, names the field.
        """
        for name, value in (self.model_extra or {}).items():
            if value is None or name not in self.refused:
                continue
            if not any(value == neutral for neutral in self.refused[name]):
                raise ApiError(400, f"{name} is not supported", param=name, code="unsupported_parameter")

    def stops(self) -> tuple[str, ...]:
        """Return the texts that end the answer."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in given if stop)

    def sampling(self, choice: int, scores: int | None) -> Sampling:
        """Return how the tokens of one of the `n` choices are drawn; each choice has a seed of its own."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            seed=None if self.seed is None else (self.seed + choice) % 2**63,
            scores=scores,
        )

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionBody(Body):
    """Body of ``/v1/completions``."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_SCORES)
    best_of: int | None = None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each a text or token ids.

        Raises:
            ApiError: 400: none, or too many choices.
        """
        given: Any = self.prompt
        single = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
        prompts = [given] if single else given
        if not prompts:
            raise ApiError(400, "prompt is empty", param="prompt")
        if len(prompts) * (self.n or 1) > MAX_CHOICES:
            raise ApiError(400, f"more than {MAX_CHOICES} choices", param="prompt")
        if self.best_of not in (None, self.n or 1):
            raise ApiError(400, "best_of is not supported", param="best_of", code="unsupported_parameter")
        return list(prompts)


class TextPart(BaseModel):
    """A part of a turn; only text is read."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a conversation; what else it holds goes to the template."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(max_length=64)]
    content: str | list[TextPart] | None = None

    def plain(self) -> dict[str, Any]:
        """Return the turn as templates read it, with its text parts joined."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": content or ""}


class TemplateOptions(BaseModel):
    """Switches of the chat template; `enable_thinking` is the only one that is passed on."""

    model_config = ConfigDict(extra="forbid")

    enable_thinking: bool | None = None


class ChatBody(Body):
    """Body of ``/v1/chat/completions``."""

    refused: ClassVar[dict[str, tuple[Any, ...]]] = NEUTRAL | {"echo": (False,), "suffix": ()}

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_SCORES)
    chat_template_kwargs: TemplateOptions | None = None

    def scores(self) -> int | None:
        """Return how many alternatives to tell, None for no log-probabilities.

        Raises:
            ApiError: 400: `top_logprobs` without `logprobs`.
        """
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        return None

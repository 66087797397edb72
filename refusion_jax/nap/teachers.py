"""Teachers that write solutions: a model of ours, or an endpoint that speaks OpenAI's protocol."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from refusion_jax.cli.options import UserError
from refusion_jax.config import DecodeConfig
from refusion_jax.decoding.generate import generate
from refusion_jax.model import Model
from refusion_jax.nap.curators import Failure, Request, Teacher

BUSY = (408, 409, 425, 429, 500, 502, 503, 504)
"""Statuses of HTTP by which an endpoint says that it may answer another time."""


def own_model(model: Model, config: DecodeConfig | None = None) -> Teacher:
    """A model as teacher: it decodes as ``config`` says, at the temperature that it is asked for.

    Args:
      config: with the longest reply as ``max_new_tokens``.
    """
    settings = config or DecodeConfig(max_new_tokens=model.config.max_position_embeddings // 2)

    def reply(requests: Sequence[Request]) -> list[str | Failure]:
        (temperature,) = {request.temperature for request in requests}
        answers = generate(
            model,
            [request.messages for request in requests],
            dataclasses.replace(settings, temperature=temperature),
            batch_size=len(requests),
            seeds=[request.seed for request in requests],
        )
        return [
            _cut_short(settings.max_new_tokens) if answer.finish_reason == "length" else answer.text
            for answer in answers
        ]

    return reply


def _cut_short(most: int) -> Failure:
    return Failure("cut short", f"the reply did not end within {most} tokens")


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A model behind HTTP, by the chat completions of OpenAI's protocol, which most servers speak.

    Raises (when it is asked):
      UserError: it cannot be reached, or refuses such requests at all: a wrong address, key or model.
    """

    url: str
    """Up to and with its version, such as http://localhost:8000/v1."""
    model: str
    key: str = dataclasses.field(default_factory=lambda: os.environ.get("OPENAI_API_KEY", ""), repr=False)
    max_tokens: int = 4096
    timeout: float = 120
    """Seconds that a reply may take."""
    pause: float = 1
    """Seconds to wait after a failure, so that a busy endpoint gets rest."""

    def __call__(self, requests: Sequence[Request]) -> list[str | Failure]:
        return [self._reply(request) for request in requests]

    def _reply(self, asked: Request) -> str | Failure:
        requests = _requests()
        body: Any = {
            "model": self.model,
            "messages": list(asked.messages),
            "temperature": asked.temperature,
            "seed": asked.seed,
            "max_tokens": self.max_tokens,
        }
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            response = requests.post(
                f"{self.url.rstrip('/')}/chat/completions", json=body, headers=headers, timeout=self.timeout
            )
        except requests.Timeout:
            return self._rest(Failure("timeout", f"{self.url} gave no reply within {self.timeout:g} seconds"))
        except (requests.RequestException, ValueError) as error:
            raise UserError(f"the teacher at {self.url} cannot be reached: {error}") from error
        if response.status_code in BUSY:
            return self._rest(Failure(f"status {response.status_code}", f"{self.url} said {response.status_code}"))
        if not response.ok:
            said = " ".join(response.text.split())[:300]
            raise UserError(f"the teacher at {self.url} refuses requests, with status {response.status_code}: {said}")
        try:
            choice: Any = response.json()["choices"][0]
            text, reason = choice["message"]["content"], choice.get("finish_reason")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            return Failure("junk", f"the reply is no chat completion ({type(error).__name__}: {error})")
        if reason == "length":
            return _cut_short(self.max_tokens)
        return text if isinstance(text, str) else Failure("junk", f"the reply has {text!r} for its text")

    def _rest(self, failure: Failure) -> Failure:
        time.sleep(self.pause)
        return failure


def _requests() -> ModuleType:
    """requests, of the ``nap`` extra."""
    try:
        import requests
    except ImportError as error:
        raise UserError(f'an endpoint cannot be asked: {error}; pip install "refusion-jax[nap]"') from error
    return requests

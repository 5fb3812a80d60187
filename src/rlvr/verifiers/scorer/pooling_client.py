"""A client of vLLM's server for pooling models, by the schemas of vLLM 0.32 (vllm/entrypoints/pooling): `/classify`
with a chat or a text, `/score` with two texts, `/v1/embeddings`.

`use_activation: false` asks for the logits themselves; vLLM applies the model's own activation otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlvr.verifiers.judge.chat_client import EndpointClient

if TYPE_CHECKING:
    from rlvr.config import FrozenModelConfig


@dataclass
class PoolingClient(EndpointClient[list[list[float]]]):
    """Asks a server for logits or embeddings: a list of numbers for each text of a request."""

    model: str = ""
    reply_name = "answer of a pooling model"

    @classmethod
    def of(cls, config: FrozenModelConfig, **options: Any) -> PoolingClient:
        """The client of a frozen model. These paths lie at the root of vLLM's server, beside `/v1`."""
        urls = tuple(url.rstrip("/").removesuffix("/v1") for url in config.urls)
        return cls(urls, config.key, who="scorer", model=config.model, **options)

    async def classified(self, chat: Sequence[Mapping[str, Any]] | str) -> list[float]:
        """The logits of a chat, which goes through the chat template of the server's model, or of a text."""
        shown = {"input": chat} if isinstance(chat, str) else {"messages": list(chat)}
        (logits,) = await self.post("/classify", self._body(shown | {"use_activation": False}))
        return logits

    async def scored(self, first: str, second: str) -> list[float]:
        """The logit of a pair of texts."""
        texts = {"text_1": first, "text_2": second}
        (logits,) = await self.post("/score", self._body(texts | {"use_activation": False}))
        return logits

    async def embedded(self, text: str) -> list[float]:
        """The embedding of a text."""
        (embedding,) = await self.post("/v1/embeddings", self._body({"input": text, "encoding_format": "float"}))
        return embedding

    def read(self, row: Any) -> tuple[list[list[float]], tuple[int, int]]:
        ordered = sorted(row["data"], key=lambda one: int(one["index"]))
        return [_numbers(one) for one in ordered], (int((row.get("usage") or {}).get("prompt_tokens") or 0), 0)

    def _body(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"model": self.model, **fields} if self.model else dict(fields)


def _numbers(row: Mapping[str, Any]) -> list[float]:
    """The numbers of one text in a reply of either path."""
    if "score" in row:
        return [float(row["score"])]
    return [float(number) for number in (row["probs"] if "probs" in row else row["embedding"])]

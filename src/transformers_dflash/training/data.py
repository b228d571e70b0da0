"""Documents to train on: token ids, and which of them the target wrote.

A row of a file is one of

- `{"messages": [...]}`: a chat, rendered by the target's chat template; every assistant turn is a response, or with
  `"learn": "last"` the last one alone;
- `{"prompt": ..., "response": ...}`: the prompt as text (wrapped into a chat) or as token ids, the response likewise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..rows import chat_ids


@dataclass
class Document:
    """Token ids, and True where the target wrote them."""

    ids: list[int]
    response_mask: list[bool]

    def cut(self, max_length: int) -> "Document":
        """Its first `max_length` tokens."""
        return Document(self.ids[:max_length], self.response_mask[:max_length])

    @property
    def num_response_tokens(self) -> int:
        return sum(self.response_mask)


def encode(row: dict[str, Any], tokenizer: Any, **template_options) -> Document:
    """One row as a document.

    Args:
        row: see the head of this file.
        tokenizer: the target's.
        **template_options: for the chat template, such as `enable_thinking`.

    Raises:
        ValueError: the row has no response, or is of none of the known forms; or the tokenizer has no chat template
            where one is needed.
    """
    if "messages" in row:
        return _encode_chat(row["messages"], tokenizer, row.get("learn") == "last", template_options)
    if "prompt" not in row or not row.get("response"):
        raise ValueError(
            f"a row needs `messages`, or `prompt` and a `response` that is not empty; it has {sorted(row)}"
        )
    prompt, response = row["prompt"], row["response"]
    for name, value in (("prompt", prompt), ("response", response)):
        ids = isinstance(value, list | tuple) and all(isinstance(one, int) and one >= 0 for one in value)
        if not ids and not isinstance(value, str):
            raise ValueError(f"the `{name}` of a row is neither text nor a list of token ids: {str(value)[:60]}")
    if isinstance(prompt, str):
        prompt = chat_ids([{"role": "user", "content": prompt}], tokenizer, **template_options)
    if isinstance(response, str):
        response = tokenizer(response, add_special_tokens=False)["input_ids"]
    return Document(ids=[*prompt, *response], response_mask=[False] * len(prompt) + [True] * len(response))


def _encode_chat(
    messages: Sequence[dict[str, Any]], tokenizer: Any, last_only: bool, template_options: dict[str, Any]
) -> Document:
    """A chat; its response tokens are found by rendering it turn by turn.

    Raises:
        ValueError: it has no assistant turn, or the template renders a turn differently once another follows.
    """
    if not isinstance(messages, list | tuple) or not all(isinstance(one, dict) and "role" in one for one in messages):
        raise ValueError(f"the `messages` of a row are no list of objects with a `role`: {str(messages)[:60]}")
    ids = chat_ids(messages, tokenizer, prompt=False, **template_options)
    mask = [False] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant" or (last_only and turn < len(messages) - 1):
            continue
        start = chat_ids(messages[:turn], tokenizer, prompt=True, **template_options)
        end = chat_ids(messages[: turn + 1], tokenizer, prompt=False, **template_options)
        if ids[: len(start)] != start or ids[: len(end)] != end:
            raise ValueError(
                f"the chat template does not render turn {turn + 1} as a prefix of the whole chat, so that its tokens "
                "cannot be told apart: split the chat into rows that end with an answer"
            )
        # What a template writes behind the end token, as a line feed, the target does not write.
        ends = [place for place in range(len(start), len(end)) if ids[place] == tokenizer.eos_token_id]
        stop = ends[-1] + 1 if ends else len(end)
        mask[len(start) : stop] = [True] * (stop - len(start))
    if not any(mask):
        raise ValueError("a chat without an assistant turn holds nothing to learn: let the target answer it first")
    return Document(ids=ids, response_mask=mask)


__all__ = ["Document", "encode"]

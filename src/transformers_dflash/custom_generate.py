"""`target.generate(custom_generate="me/draft", trust_remote_code=True)`: a pushed draft decodes without this package.

`push_to_hub` puts this file into a draft's repository as `custom_generate/generate.py`, with the flat modules that it
imports beside it and the repository's id in `REPO_ID`.
"""

from functools import lru_cache
from typing import Any

import torch
from transformers import PreTrainedModel

from .integration import hook_generate
from .modeling_dflash import DFlashDraftModel

REPO_ID = ""


@lru_cache(maxsize=1)
def load_draft(revision: str | None, token: str | bool | None, dtype: torch.dtype, device: str) -> DFlashDraftModel:
    return DFlashDraftModel.from_pretrained(REPO_ID, revision=revision, token=token, dtype=dtype).to(device)


def generate(
    model: PreTrainedModel,
    assistant_model: Any = None,
    revision: str | None = None,
    token: str | bool | None = None,
    **arguments,
) -> Any:
    """What `model.generate` returns, decoded with this repository's draft.

    Args:
        model: the target.
        assistant_model: a draft that is loaded already; otherwise this repository's is, once.
        revision, token: of the repository, for loading the draft.
        **arguments: of `generate`.
    """
    hook_generate()
    if assistant_model is None:
        assistant_model = load_draft(revision, token, model.dtype, str(model.device))
    return model.generate(assistant_model=assistant_model, **arguments)


__all__ = ["generate"]

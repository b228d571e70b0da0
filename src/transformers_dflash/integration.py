"""The hooks into Transformers: what `generate` does with a DFlash draft, what `AutoConfig` makes of foreign layouts.

`generate` has no registry of decoding methods. Its public door, `custom_generate`, loses the streamer, the tokenizer
and the assistant on the way, so two methods of `GenerationMixin` are wrapped instead: the check of the generation mode
(which compares vocabularies of independent models) and the assisted decoding loop. Both are looked up on the class by
`generate`, act only where the assistant is a `DFlashDraftModel`, and hand everything else on untouched.
"""

import functools
import inspect
from typing import Any

from transformers import AutoConfig, AutoModel, PreTrainedConfig
from transformers.generation import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode

from .configuration_dflash import DFlashDraftConfig
from .decoding import dflash_decoding
from .modeling_dflash import DFlashDraftModel

_originals: dict[tuple[type, str], Any] = {}
_HOOKED = {"_validate_generation_mode": "generation_mode_kwargs", "_assisted_decoding": "assistant_model"}


def install() -> None:
    """Teach Transformers about DFlash drafts. Importing the package does it; calling it again does nothing.

    Raises:
        ImportError: this Transformers has not the methods that the hooks stand on.
    """
    hook_generate()
    AutoConfig.register(DFlashDraftConfig.model_type, DFlashDraftConfig, exist_ok=True)
    AutoModel.register(DFlashDraftConfig, DFlashDraftModel, exist_ok=True)
    _hook(AutoConfig, "from_pretrained", _config_from_pretrained)


def hook_generate() -> None:
    """Let `generate` take DFlash drafts; raises as `install`."""
    for name, argument in _HOOKED.items():
        method = getattr(GenerationMixin, name, None)
        if method is None or argument not in inspect.signature(method).parameters:
            raise ImportError(
                f"GenerationMixin.{name} of this Transformers does not take {argument}: install a version that "
                "transformers-dflash was tested with (see its README)"
            )
    _hook(GenerationMixin, "_validate_generation_mode", _validate_generation_mode)
    _hook(GenerationMixin, "_assisted_decoding", _assisted_decoding)


def _hook(owner: type, name: str, wrap: Any) -> None:
    if (owner, name) not in _originals:
        _originals[owner, name] = vars(owner)[name]
        setattr(owner, name, wrap(vars(owner)[name]))


def uninstall() -> None:
    """Take the hooks out again. The Auto classes keep the registered model type."""
    for (owner, name), original in _originals.items():
        setattr(owner, name, original)
    _originals.clear()


def draft_of(assistant: Any) -> DFlashDraftModel | None:
    """The DFlash draft that an assistant model is, by itself or under PEFT's adapters; None if it is none."""
    if type(assistant).__module__.partition(".")[0] == "peft":  # its layers are in the draft, which can stand alone
        assistant = assistant.get_base_model()
    # By its name, since a draft that was loaded as remote code has a class of its own.
    is_draft = getattr(getattr(assistant, "config", None), "model_type", None) == DFlashDraftConfig.model_type
    return assistant if is_draft else None


def _is_ours(assistant: Any, generation_config: Any) -> bool:
    """Whether a generation runs in our loop: a DFlash draft, unless Transformers' own loop is asked for by name."""
    return draft_of(assistant) is not None and generation_config.speculation_type != "dflash"


def _validate_generation_mode(original):
    @functools.wraps(original)
    def validate(self, generation_mode, generation_config, generation_mode_kwargs):
        if not _is_ours(generation_mode_kwargs.get("assistant_model"), generation_config):
            return original(self, generation_mode, generation_config, generation_mode_kwargs)
        if generation_mode != GenerationMode.ASSISTED_GENERATION:
            raise ValueError(
                f"a DFlash draft serves greedy search and sampling, not {generation_mode.value}: drop "
                f"assistant_model, or the options that ask for it (num_beams={generation_config.num_beams})"
            )
        tokenizers = [generation_mode_kwargs.get(name) for name in ("tokenizer", "assistant_tokenizer")]
        if None not in tokenizers and tokenizers[0].get_vocab() != tokenizers[1].get_vocab():
            raise ValueError(
                "assistant_tokenizer has another vocabulary than tokenizer, but a DFlash draft speaks its target's "
                "tokens: leave assistant_tokenizer out and use the draft that was trained for this target"
            )
        ours = ("assistant_model", "assistant_tokenizer")
        others = {name: value for name, value in generation_mode_kwargs.items() if name not in ours}
        # Checked as the mode without an assistant: as assisted generation, recurrent targets would be refused.
        mode = GenerationMode.SAMPLE if generation_config.do_sample else GenerationMode.GREEDY_SEARCH
        return original(self, mode, generation_config, others)

    return validate


def _assisted_decoding(original):
    @functools.wraps(original)
    def decode(self, *args, **kwargs):
        if not _is_ours(kwargs.get("assistant_model"), kwargs.get("generation_config")):
            return original(self, *args, **kwargs)
        for name in ("inputs_tensor", "assistant_tokenizer", "tokenizer"):
            kwargs.pop(name, None)
        kwargs["assistant_model"] = draft_of(kwargs["assistant_model"])
        return dflash_decoding(self, *args, **kwargs)

    return decode


def _config_from_pretrained(original):
    @classmethod
    @functools.wraps(original.__func__)
    def from_pretrained(cls, pretrained_model_name_or_path, **kwargs):
        if _holds_foreign_draft(pretrained_model_name_or_path, kwargs):
            for name in ("trust_remote_code", "code_revision"):
                kwargs.pop(name, None)
            kwargs["name_or_path"] = pretrained_model_name_or_path
            return DFlashDraftConfig.from_pretrained(pretrained_model_name_or_path, **kwargs)
        return original.__func__(cls, pretrained_model_name_or_path, **kwargs)

    return from_pretrained


def _holds_foreign_draft(name: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a folder or Hub id holds a draft in another system's layout; several of them say `model_type: qwen3`."""
    if kwargs.get("gguf_file") is not None:  # no draft layout, and reading it twice takes seconds
        return False
    try:
        config_dict, _ = PreTrainedConfig.get_config_dict(name, **kwargs)
    except (OSError, ValueError):  # AutoConfig says what is wrong with it
        return False
    return any(layout.matches(config_dict) for layout in DFlashDraftConfig.foreign_layouts)


__all__ = ["draft_of", "install", "uninstall"]

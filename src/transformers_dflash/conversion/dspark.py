"""DSpark drafts, as DeepSpec and others write them: refused by name.

Their `model_type` is a plain language model's, so that without this module such a folder would load as one.
"""

from typing import Any


def matches(config_dict: Any) -> bool:
    """An architecture with DSpark in its name, or speculators' name of the algorithm."""
    if not isinstance(config_dict, dict):
        return False
    names = [*(config_dict.get("architectures") or ()), str(config_dict.get("speculators_model_type"))]
    return any("dspark" in name.lower() for name in names)


def convert_config(config_dict: dict[str, Any]) -> dict[str, Any]:
    """Refuse.

    Raises:
        ValueError: always.
    """
    name = ", ".join(config_dict.get("architectures") or ["dspark"])
    raise ValueError(
        f"this is a DSpark draft ({name}): its first slot predicts too, and it may hold a Markov head, an embedding "
        "and a head of its own, none of which is read; take a DFlash or DFlash 2 draft of this target"
    )

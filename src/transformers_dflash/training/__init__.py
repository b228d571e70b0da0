"""Training of drafts: data, the target's features, the objective, and a `Trainer`."""

from ..rows import chat_ids, read_rows
from .data import Document, encode
from .features import FeatureStore, TargetFeatures
from .objective import Objective
from .start import start_from_target
from .trainer import BlockDataset, DFlashTrainer, DFlashTrainingArguments

__all__ = [
    "BlockDataset",
    "DFlashTrainer",
    "DFlashTrainingArguments",
    "Document",
    "FeatureStore",
    "Objective",
    "TargetFeatures",
    "chat_ids",
    "encode",
    "read_rows",
    "start_from_target",
]

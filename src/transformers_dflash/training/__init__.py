"""Training of drafts: data, the target's features, the objective, and a `Trainer`."""

from .data import Document, chat_ids, encode, read_rows
from .features import FeatureStore, TargetFeatures
from .objective import Objective
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
]

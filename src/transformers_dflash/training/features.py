"""What the target knows of a document: tapped states, and last states where its law is wanted; on line or from disk.

The states of a frozen target never change, so that several epochs, or several drafts that tap other layers, can share
them: a `FeatureStore` writes them once. Both ways give the same numbers.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from ..target import TapRecorder, Target
from .data import Document

LAST_STATES = -1  # the tap that stands for the target's last hidden states, after its final norm
_INDEX = "index.json"
_DOCUMENTS_PER_SHARD = 64


class TargetFeatures:
    """Runs a frozen target over documents and reads its taps.

    Args:
        model: the target, in evaluation mode.
        layer_ids: the taps, and `LAST_STATES`.
    """

    def __init__(self, model: PreTrainedModel, layer_ids: Sequence[int]):
        self.model = model
        self.target = Target(model)
        self.layer_ids = list(layer_ids)
        self.tapped = [layer for layer in self.layer_ids if layer != LAST_STATES]

    @torch.no_grad()
    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """States of `input_ids (b, n)`: `(b, n, taps, H)`, in the order of `layer_ids` and in the target's dtype."""
        width = self.target.config.hidden_size
        model = self.model
        recorder = TapRecorder(self.target.layers, self.tapped, width, model.device, model.dtype)
        try:
            with recorder.recording():
                # The decoder alone: logits of whole documents would need gigabytes, and nothing here reads them.
                last = model.get_decoder()(
                    input_ids=input_ids.to(model.device), attention_mask=attention_mask, use_cache=False
                ).last_hidden_state  # (b, n, H)
            states = recorder.take().unflatten(-1, (len(self.tapped), width))  # (b, n, taps, H)
        finally:
            recorder.close()
        parts = [last if layer == LAST_STATES else states[:, :, self.tapped.index(layer)] for layer in self.layer_ids]
        return torch.stack(parts, dim=2)


class FeatureStore:
    """States of documents in a folder of safetensors files, one tensor `(n, taps, H)` per document.

    Args:
        folder: as `FeatureStore.build` filled it.

    Raises:
        ValueError: the folder is not complete.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        if not (self.folder / _INDEX).is_file():
            raise ValueError(
                f"{folder} holds no {_INDEX}: build the features first, or let the build go on to its end"
            )
        index = json.loads((self.folder / _INDEX).read_text())
        self.layer_ids: list[int] = index["layer_ids"]
        self.fingerprint: str = index["fingerprint"]
        self.length: int = index["documents"]
        self._files: dict[int, safe_open] = {}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, document: int) -> torch.Tensor:
        shard = document // _DOCUMENTS_PER_SHARD
        if shard not in self._files:
            self._files[shard] = safe_open(_shard(self.folder, shard), "pt")
        return self._files[shard].get_tensor(str(document))

    def __getstate__(self) -> dict:
        return vars(self) | {"_files": {}}  # open files do not travel to workers

    def select(self, states: torch.Tensor, layer_ids: Sequence[int]) -> torch.Tensor:
        """The states `(n, taps, H)` of some of the stored taps.

        Raises:
            ValueError: one of them is not stored.
        """
        missing = [layer for layer in layer_ids if layer not in self.layer_ids]
        if missing:
            raise ValueError(f"{self.folder} holds the taps {self.layer_ids}, not {missing}: build it with those too")
        return states[:, [self.layer_ids.index(layer) for layer in layer_ids]]

    @classmethod
    def build(
        cls,
        folder: str | os.PathLike,
        documents: Sequence[Document],
        model: PreTrainedModel,
        layer_ids: Sequence[int],
        progress: Callable[[int], None] | None = None,
    ) -> "FeatureStore":
        """Write the states of all documents; what lies in the folder already is kept and not made again.

        Args:
            folder: where to.
            documents: in the order in which they will be asked for.
            model: the target.
            layer_ids: taps, and `LAST_STATES`.
            progress: called with each shard's number of documents, for a progress bar.

        Raises:
            ValueError: the folder holds other features.
            OSError: the disk has too little room; nothing was written then.
        """
        folder = Path(folder)
        features = TargetFeatures(model, layer_ids)
        mark = fingerprint(documents, model, layer_ids)
        folder.mkdir(parents=True, exist_ok=True)
        started = folder / "started.json"
        if started.is_file() and json.loads(started.read_text())["fingerprint"] != mark:
            raise ValueError(
                f"{folder} holds features of other documents, another target or other taps: use an empty folder"
            )
        shards = [
            range(i, min(i + _DOCUMENTS_PER_SHARD, len(documents)))
            for i in range(0, len(documents), _DOCUMENTS_PER_SHARD)
        ]
        missing = [number for number in range(len(shards)) if not _shard(folder, number).is_file()]
        tokens = sum(len(documents[i].ids) for number in missing for i in shards[number])
        needed, free = tokens * bytes_per_token(model, layer_ids), shutil.disk_usage(folder).free
        if needed > free:
            raise OSError(
                f"the features of {tokens} tokens need {needed / 2**30:.1f} GiB, and {folder} has {free / 2**30:.1f} "
                "GiB free: use another disk, fewer documents or fewer taps, or train without a feature folder"
            )
        _write(started, json.dumps({"fingerprint": mark}))
        for number in missing:
            tensors = {
                str(i): features(torch.tensor(documents[i].ids)[None])[0].cpu().contiguous() for i in shards[number]
            }
            path = _shard(folder, number)
            save_file(tensors, path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
            if progress is not None:
                progress(len(tensors))
        index = {"documents": len(documents), "layer_ids": list(layer_ids), "fingerprint": mark}
        _write(folder / _INDEX, json.dumps(index))
        return cls(folder)


def bytes_per_token(model: PreTrainedModel, layer_ids: Sequence[int]) -> int:
    """What one token's states need on disk."""
    return len(layer_ids) * Target(model).config.hidden_size * model.dtype.itemsize


def fingerprint(documents: Sequence[Document], model: PreTrainedModel, layer_ids: Sequence[int]) -> str:
    """What features depend on, in one short text: the documents' tokens, the target, its dtype and the taps."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(torch.tensor(document.ids).numpy().tobytes())
        digest.update(b"|")
    for parameter in model.parameters():  # some of each: adapters that were merged change all layers, and no name
        if not parameter.is_meta:
            flat = parameter.detach().flatten()
            digest.update(flat[:: max(1, len(flat) // 8)][:8].float().cpu().numpy().tobytes())
    digest.update(json.dumps([str(model.dtype), list(layer_ids)]).encode())
    return digest.hexdigest()[:16]


def _shard(folder: Path, number: int) -> Path:
    return folder / f"features-{number:06d}.safetensors"


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(f".{os.getpid()}.part")  # the processes of one run write the same
    part.write_text(text)
    part.rename(path)


__all__ = ["LAST_STATES", "FeatureStore", "TargetFeatures", "bytes_per_token", "fingerprint"]

"""`transformers-dflash` with FSDP on processes without a GPU, which accelerate otherwise turns into plain DDP.

Everything but accelerate's choice is real: two processes, gloo, torch's `fully_shard`.
"""

import sys

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from transformers_dflash.cli import main

accelerates_own = AcceleratorState.__init__


def as_on_gpus(self, *args, **kwargs):
    if PartialState._shared_state["distributed_type"] == DistributedType.MULTI_CPU:  # else it is settled already
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    accelerates_own(self, *args, **kwargs)


if __name__ == "__main__":
    AcceleratorState.__init__ = as_on_gpus
    sys.exit(main())

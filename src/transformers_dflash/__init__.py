"""DFlash drafts in Transformers: load them, and hand them to `generate(assistant_model=draft)`.

Importing this package registers `DFlashDraftConfig` and `DFlashDraftModel` with AutoConfig and AutoModel and installs
the hooks of `integration`; it does nothing else.
"""

from importlib.metadata import version

from packaging.version import Version

TRANSFORMERS_FLOOR = "5.18"
if Version(version("transformers")) < Version(TRANSFORMERS_FLOOR):
    raise ImportError(
        f"transformers-dflash needs transformers >= {TRANSFORMERS_FLOOR}, found {version('transformers')}: "
        f"pip install -U 'transformers>={TRANSFORMERS_FLOOR}'"
    )

from . import hub  # noqa: E402  the version is checked first: older ones fail inside these imports
from .cache import ContextCache  # noqa: E402
from .candidate_generator import DFlashCandidateGenerator  # noqa: E402
from .configuration_dflash import DFlashDraftConfig  # noqa: E402
from .conversion import LAYOUTS  # noqa: E402
from .decoding import dflash_decoding  # noqa: E402
from .hub import push_to_hub  # noqa: E402
from .integration import install, uninstall  # noqa: E402
from .modeling_dflash import DFlashDraftModel  # noqa: E402
from .outputs import DFlashGenerateOutput, SpeculationStatistics  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "ContextCache",
    "DFlashCandidateGenerator",
    "DFlashDraftConfig",
    "DFlashDraftModel",
    "DFlashGenerateOutput",
    "SpeculationStatistics",
    "dflash_decoding",
    "install",
    "push_to_hub",
    "uninstall",
]

DFlashDraftConfig.foreign_layouts = LAYOUTS
DFlashDraftModel.hub = hub
install()

"""Settings that hold for every test: this checkout first, one thread, offline, no display."""

import os
import sys
from pathlib import Path

from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

for name, value in {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "MPLBACKEND": "Agg",
}.items():
    os.environ.setdefault(name, value)

# A busy machine makes one example slow, which is not a failure; and a run that found nothing
# must find nothing when it is repeated.
settings.register_profile("midspan", deadline=None, derandomize=True, database=None)
settings.load_profile("midspan")

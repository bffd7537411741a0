"""Run one fuzz target under atheris, which mutates the inputs that reached new code: `./dev fuzz` calls this.

python -m tests.fuzz TARGET SECONDS CORPUS KEPT_CORPUS
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

#: It is a failure if an input takes longer, or if the process uses more memory.
INPUT_S_MAX = 20
MEMORY_MB_MAX = 1_024
INPUT_BYTES_MAX = 4_096


def main(name: str, seconds: int, corpus: str, kept: str) -> None:
    """Fuzz until the time is over or a failure is found; write new inputs to `corpus`, and only read `kept`."""
    import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

    warnings.simplefilter("ignore")
    with atheris.instrument_imports(include=["tidebook"]):
        from tests.fuzz.targets import TARGETS
    Path(corpus).mkdir(parents=True, exist_ok=True)
    options = [
        f"-max_total_time={seconds}",
        f"-timeout={INPUT_S_MAX}",
        f"-rss_limit_mb={MEMORY_MB_MAX}",
        f"-max_len={INPUT_BYTES_MAX}",
        f"-artifact_prefix={corpus}/failed-",
        "-print_final_stats=1",
        "-verbosity=1",
    ]
    atheris.Setup([sys.argv[0], *options, corpus, kept], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])

"""One round of `transom bench images`: decode files with whatever Pillow comes first on the path.

Own process, `python -m transom.bench.image_worker`, because a process has one Pillow. Prints one JSON object.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
import PIL

from transom.encoder.media.image import decode_image
from transom.encoder.media.wire import ImageJob
from transom.errors import MediaError


def main() -> int:
    """Decode each file of a folder `repeats` times by the job that lies beside it; keep the last pixels."""
    folder, results, repeats = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    cases: dict[str, Any] = {}
    for file in sorted(folder.glob("*.picture")):
        job = msgspec.json.decode(file.with_suffix(".job").read_bytes(), type=ImageJob)
        data = memoryview(file.read_bytes())
        times: list[float] = []
        try:
            for _ in range(1 + repeats):
                started = time.process_time()
                pixels = decode_image(data, job).pixels
                times.append(1000 * (time.process_time() - started))
        except MediaError as error:
            cases[file.stem] = {"ms": [], "error": error.message}
            continue
        np.save(results / f"{file.stem}.npy", pixels)
        cases[file.stem] = {"ms": times[1:], "error": None}  # the first loads the plugin
    found = {"pillow": PIL.__version__, "path": str(Path(PIL.__file__).parent), "cases": cases}
    sys.stdout.buffer.write(orjson.dumps(found) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

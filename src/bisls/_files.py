"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import NamedTemporaryFile


def write_whole(path: Path, content: bytes | str) -> None:
    """Write under another name and move: nobody ever reads a part of it, and a full disk leaves the old file."""
    raw = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.chmod(file.name, 0o644)  # a temporary file is its owner's alone, these are to be shared
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise

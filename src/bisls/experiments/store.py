"""Finished runs, one file each, by configuration: a finished run is never repeated, and none is ever half-written."""

from __future__ import annotations

import json
from pathlib import Path

from bisls._files import write_whole
from bisls.experiments.base import Config, RunRecord, from_json, to_json


class Store:
    """A folder of finished runs.

    Args:
        folder: Where they are; made if need be.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, config: Config) -> Path:
        """Where the record of a run is, or would be."""
        return self.folder / f"{config.key}.json"

    def get(self, config: Config) -> RunRecord | None:
        """The record of a run, or None. A file that can't be read counts as none: the run is done again."""
        path = self.path(config)
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            return from_json(config.described(), raw)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def read(self, config: Config) -> RunRecord:
        """The record of a run that has just been put.

        Raises:
            OSError: It can't be read back.
        """
        record = self.get(config)
        if record is None:
            raise OSError(f"{self.path(config)} was written but can't be read back")
        return record

    def put(self, config: Config, record: RunRecord) -> None:
        """Keep a record; the file appears under its name when it is whole."""
        write_whole(self.path(config), to_json(record))

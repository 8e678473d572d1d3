"""Finished runs, one file each, by configuration: a finished run is never repeated, and none is ever half-written."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from bisls._files import write_whole
from bisls.experiments.base import Config, RunRecord, from_json, to_json

logger = logging.getLogger(__name__)


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
        """The record of a run, or None. A file that can't be read or is of another run counts as none: the run is done again."""
        path = self.path(config)
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            record = from_json(config.described(), raw)
            other = _other(config, raw)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            logger.warning("%s is no whole run (%s: %s): it is made again", path, type(error).__name__, error)
            return None
        if other:
            logger.warning("%s holds another run (%s): it is made again", path, other)
            return None
        return record

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
        write_whole(self.path(config), to_json(record, config.key))


def _other(config: Config, raw: dict[str, Any]) -> str:
    """What tells that a file is of another run than it is named for; empty where nothing does."""
    key = raw.get("key", config.key)  # files of earlier versions have none
    if key != config.key:
        return f"of the name {key}"
    asked, found = json.loads(json.dumps(config.described())), raw["config"]
    changed = config.set()
    for name in sorted(asked.keys() | found.keys()):
        if name not in found and name not in changed:
            continue  # an option that is newer than the file, at its default
        if name not in found or name not in asked or found[name] != asked[name]:
            return f"{name} is {found.get(name)!r}, not {asked.get(name)!r}"
    return ""

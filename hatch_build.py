"""What a built wheel holds beside the packages: copies of the project's files at the root, and the commit.

A source distribution holds the commit too: a wheel that is built from it has no git to ask.

hatchling calls this hook (pyproject.toml). An editable install needs none of it: it reads the checkout itself.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class RootFiles(BuildHookInterface[Any]):
    """Adds `configs/project/` to a wheel, and `configs/built_from.json` to a wheel and a source distribution."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the files to add. `version` is "standard" or "editable"."""
        if version != "standard":
            return
        sys.path.insert(0, self.root)  # an isolated build does not have the project on its path
        from configs.common.files.project_files import packed_files
        from slurm.staging.version import BUILT_FROM, code_version

        self._made = tempfile.TemporaryDirectory()
        added: dict[str, str] = {}
        if self.target_name == "wheel":
            added |= {name: str(path) for name, path in packed_files().items()}
        if not (Path(self.root) / BUILT_FROM).is_file():  # where a source distribution was unpacked, it is there
            built_from = Path(self._made.name) / "built_from.json"
            built_from.write_text(json.dumps(code_version(), sort_keys=True))
            added[BUILT_FROM] = str(built_from)
        build_data["force_include"] |= {source: name for name, source in added.items()}

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was made for the build."""
        if version == "standard":
            self._made.cleanup()
